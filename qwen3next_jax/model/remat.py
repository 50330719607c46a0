"""What the forward pass saves for the backward pass, by the name of `train.remat`. The backward
pass computes the rest again.

none      everything that the backward pass needs
kept      the results of products and operators (`ops.blocks.save_for_backward`); "none" becomes
          this in bfloat16, where all mixers name their results
block     each block's input, and what costs most to compute for its bytes: attention's results,
          the router's choices
dots      also the results of projections and dense MLPs, the router's logits, and rows that
          experts gathered at once
offload   each block's input, in the host's memory (on CPU this changes only its address)
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from qwen3next_jax.ops.blocks import SAVED

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str, looped: bool = False) -> Callable:
    """`block(params, x, …)` under the policy of that name.

    Args:
      looped: whether `block` is in the body of a scan, where recomputation needs no barrier.

    Raises:
      KeyError: there is no such policy.
    """

    # The name is given inside of `jax.checkpoint`: recomputation then starts from the copy in the
    # host's memory, and the input itself is freed.
    def named(params, x, *rest):
        return block(params, checkpoint_name(x, _INPUT), *rest)

    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not looped)
    policies = jax.checkpoint_policies
    both, names = policies.save_from_both_policies, policies.save_only_these_names

    def is_top_k(primitive, *_, **__):
        return primitive is jax.lax.top_k_p

    small = both(names("attention"), is_top_k)
    with_rows = both(small, names("gathered rows"))
    kept = both(with_rows, names(SAVED))
    dots = both(with_rows, policies.dots_with_no_batch_dims_saveable)
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return {
        "none": lambda: block,
        "kept": lambda: checkpoint(block, policy=kept),
        "block": lambda: checkpoint(block, policy=small),
        "dots": lambda: checkpoint(block, policy=dots),
        "offload": lambda: checkpoint(named, policy=offloaded),
    }[policy]()
