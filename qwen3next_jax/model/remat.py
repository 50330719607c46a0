"""What the backward pass keeps of the forward pass, by the name of `train.remat`.

    none      everything it needs
    block     each block's input; the rest is computed again
    dots      also the results of the projections and of dense MLPs; kernels and experts are computed again
    offload   each block's input, in the host's memory (on CPU, which is the host, that is only another address)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str) -> Callable:
    """`block(params, x, …)` under the policy of that name.

    Raises:
      KeyError: no policy is called so.
    """
    return {"none": lambda: block, "block": lambda: jax.checkpoint(block), "dots": lambda: _keeping_dots(block),
            "offload": lambda: _offloading(block)}[policy]()


def _keeping_dots(block: Callable) -> Callable:
    return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def _offloading(block: Callable) -> Callable:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], offload_src="device", offload_dst="pinned_host")

    # The name stands inside: recomputation starts from what was offloaded, and the input itself is let go.
    return jax.checkpoint(lambda params, x, *rest: block(params, checkpoint_name(x, _INPUT), *rest), policy=policy)
