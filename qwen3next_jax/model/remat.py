"""What the backward pass keeps of the forward pass, by the name of `train.remat`.

none      everything it needs
kept      what products and operators made (`ops.blocks.save_for_backward`): "none" in bfloat16,
          where all mixers name what they keep
block     each block's input, and what costs most for its bytes: attention's results, the
          router's choices; the rest is computed again
dots      also results of projections and dense MLPs, the router's logits, and rows that experts
          gathered at once
offload   each block's input, in the host's memory (on CPU, which is the host, that is only
          another address)
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from qwen3next_jax.ops.blocks import SAVED

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str, looped: bool = False) -> Callable:
    """`block(params, x, …)` under the policy of that name (or KeyError). `looped`: in a scan's
    body, where nothing needs a barrier.
    """

    # inside: recomputation starts from what was offloaded, and the input itself is let go
    def named(params, x, *rest):
        return block(params, checkpoint_name(x, _INPUT), *rest)

    checkpoint, policies = (
        functools.partial(jax.checkpoint, prevent_cse=not looped),
        jax.checkpoint_policies,
    )
    both, these, top_k = (
        policies.save_from_both_policies,
        policies.save_only_these_names,
        lambda of, *_, **__: of is jax.lax.top_k_p,
    )
    small, rows = both(these("attention"), top_k), these("gathered rows")
    kept, dots = (
        both(both(small, rows), more)
        for more in (these(SAVED), policies.dots_with_no_batch_dims_saveable)
    )
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
