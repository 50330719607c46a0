"""What the backward pass keeps of the forward pass, by the name of `train.remat`.

    none      everything it needs
    block     each block's input; the rest is computed again
    dots      also what costs most for its bytes: results of projections, dense MLPs and attention, the router's logits and choices
    offload   each block's input, in the host's memory (on CPU, which is the host, that is only another address)
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

_INPUT = "block_input"


def rematerialized(block: Callable, policy: str, looped: bool = False) -> Callable:
    """`block(params, x, …)` under the policy of that name (or KeyError). `looped`: in a scan's body, where nothing needs a barrier."""
    def named(params, x, *rest):  # inside: recomputation starts from what was offloaded, and the input itself is let go
        return block(params, checkpoint_name(x, _INPUT), *rest)

    def costly(primitive, *args, **params):
        return primitive.name == "top_k" or products(primitive, *args, **params) or attention(primitive, *args, **params)

    checkpoint, policies = functools.partial(jax.checkpoint, prevent_cse=not looped), jax.checkpoint_policies
    products, attention = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("attention")
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], offload_src="device", offload_dst="pinned_host")
    return {"none": lambda: block, "block": lambda: checkpoint(block), "dots": lambda: checkpoint(block, policy=costly),
            "offload": lambda: checkpoint(named, policy=offloaded)}[policy]()
