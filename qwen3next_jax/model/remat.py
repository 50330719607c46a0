"""What the backward pass keeps of the forward pass, by the name of `train.remat`.

    none      everything it needs
    kept      what products and operators made (`ops.blocks.kept`): "none" in bfloat16, where all mixers name what they keep
    block     each block's input; the rest is computed again
    dots      also the results of the projections and of dense MLPs; kernels and experts are computed again
    offload   each block's input, in the host's memory (on CPU, which is the host, that is only another address)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from qwen3next_jax.ops.blocks import KEPT

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str) -> Callable:
    """`block(params, x, …)` under the policy of that name.

    Raises:
      KeyError: no policy is called so.
    """
    def named(params, x, *rest):  # inside: recomputation starts from what was offloaded, and the input itself is let go
        return block(params, checkpoint_name(x, _INPUT), *rest)

    policies = jax.checkpoint_policies
    made = policies.save_from_both_policies(policies.save_only_these_names(KEPT), lambda of, *_, **__: of is jax.lax.top_k_p)
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], offload_src="device", offload_dst="pinned_host")
    return {"none": lambda: block, "kept": lambda: jax.checkpoint(block, policy=made), "block": lambda: jax.checkpoint(block),
            "dots": lambda: jax.checkpoint(block, policy=policies.dots_with_no_batch_dims_saveable),
            "offload": lambda: jax.checkpoint(named, policy=offloaded)}[policy]()
