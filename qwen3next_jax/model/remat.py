"""The policies of the setting `train.remat`. A policy says which results of a block (a decoder
layer) the forward pass saves for the backward pass. The backward pass recomputes the results that
are not saved. Beside the named policies below, "keep=… offload=…" saves the block's input and the
listed parts of the block. "NAME keep=… offload=…" saves the listed parts and what the policy NAME
saves (`config/remat.py`).

none      saves every result that the backward pass needs. In bfloat16 it is replaced by "kept" if
          all mixers and MLPs of the model mark their results with `ops.blocks.save_for_backward`
kept      saves the results that `ops.blocks.save_for_backward` marks: the results of matrix
          products and operators
block     saves each block's input, the outputs of attention, the router's choices and their order
          by expert: they are cheap to save and expensive to compute again
full      saves each block's input, and nothing else
dots      saves what "block" saves, the results of projections and dense MLPs, the router's logits,
          and the tokens that expert parallelism gathered, if they are gathered in one chunk
offload   saves each block's input in the host's memory, and nothing else (on a CPU this frees no
          memory, because the device's memory is the host's)
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from qwen3next_jax.config.remat import PARTS, parse_remat
from qwen3next_jax.ops.blocks import SAVED


def keeps_expert_hidden(policy: str) -> bool:
    """Returns whether a remat policy saves the hidden layer of the routed experts. With other
    policies, the backward pass of the experts computes the hidden layer again
    (`ForwardOptions.keep_expert_hidden`).
    """
    if policy in ("none", "kept"):
        return True
    saved = parse_remat(policy)
    return "experts" in saved.kept_on_device | saved.offloaded_to_host


def rematerialized(block: Callable, policy: str, looped: bool = False) -> Callable:
    """Wraps `block` in `jax.checkpoint` with a remat policy.

    Args:
      block: function (params, x, …).
      policy: name of the policy, or "keep=… offload=…", alone or behind a name.
      looped: whether `block` is called in the body of a scan. In a scan XLA cannot merge the
        recomputation with the forward pass, so `jax.checkpoint` does not have to prevent this merge
        (`prevent_cse`).
    """

    # The input that goes to the host gets its name inside of `jax.checkpoint`. Then the
    # recomputation starts from the copy in the host's memory, and the copy on the device is freed.
    def named(params, x, *rest):
        return block(params, checkpoint_name(x, "input"), *rest)

    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not looped)
    policies = jax.checkpoint_policies
    both, names = policies.save_from_both_policies, policies.save_only_these_names

    def is_top_k(primitive, *_, **__):
        return primitive is jax.lax.top_k_p

    small = both(names("attention", "router"), is_top_k)
    by_name = {
        "kept": both(is_top_k, names(SAVED, *PARTS)),
        "block": small,
        "full": policies.nothing_saveable,
        "dots": both(both(small, names("rows")), policies.dots_with_no_batch_dims_saveable),
    }
    if policy == "none":
        return block
    if policy in by_name:
        return checkpoint(block, policy=by_name[policy])
    before, keep, offload = parse_remat("offload=input" if policy == "offload" else policy)
    # `jax.checkpoint` saves the input as it is: an argument. If the input was saved by its name,
    # the `jax.checkpoint` of the first norm would save the same array a second time.
    keep -= {"input"}
    listed = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(keep),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def saved(primitive, *args, **settings):
        if primitive is jax.lax.top_k_p and "router" in keep:
            return True
        if settings.get("name") in keep | offload:
            return listed(primitive, *args, **settings)
        return by_name[before](primitive, *args, **settings)

    return checkpoint(named, policy=saved)
