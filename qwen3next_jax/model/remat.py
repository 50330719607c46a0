"""The policies of `train.remat`: what the forward pass saves for the backward pass, which computes
the rest again.

none      saves everything that the backward pass needs
kept      saves the results of products and operators (`ops.blocks.save_for_backward`); in bfloat16
          "none" becomes "kept" if all mixers and MLPs of the model name their results
block     saves each block's input, and the results that cost most to compute for their size: those
          of attention, and the router's choices
dots      saves what "block" saves, the results of projections and dense MLPs, the router's logits,
          and the rows that experts gathered in a single chunk
offload   saves each block's input in the host's memory (on CPU only the memory's address differs)
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from qwen3next_jax.ops.blocks import SAVED

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str, looped: bool = False) -> Callable:
    """`block` as a function (params, x, …) with the named policy.

    Args:
      block: function (params, x, …).
      policy: name of the policy.
      looped: whether `block` is in the body of a scan, where recomputation needs no barrier.

    Raises:
      KeyError: there is no such policy.
    """

    # `named` runs inside of `jax.checkpoint`, so that recomputation starts from the copy in the
    # host's memory, and the input on the device is freed.
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
