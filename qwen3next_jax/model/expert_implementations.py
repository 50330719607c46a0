"""The implementations of the routed experts. Each implementation is a function that computes the
experts for the tokens of one device. `choose_expert_implementation` chooses the fastest one.

All implementations take the same arguments:
  x_RD: the tokens.
  weight_RA, expert_RA: the weights and the numbers of the experts that each token chose.
  gate_up_ED2I, down_EID: the experts' weights.
All implementations return [R, D], the weighted sum of the outputs of each token's experts.

Letters: R tokens, D model, A choices per token, Q = R·A choices, E experts, I expert width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.ops import expert_mlp
from qwen3next_jax.ops.decode_moe import decode_moe
from qwen3next_jax.ops.preferences import prefers_cache_sized_experts
from qwen3next_jax.sharding.rules import EXPERT, TOKENS_OF_SLICE, num_shards


def choose_expert_implementation(
    mesh: Mesh | None,
    dtype: jnp.dtype,
    *,
    in_tiles: bool,
    few_tokens: bool,
    layer: jax.Array | None,
    keep_hidden: bool,
) -> Callable:
    """Returns the fastest implementation for the platform, the mesh and the number of tokens.

    Args:
      mesh: the devices; None for one. If the mesh splits the experts, the implementation sends
        tokens to other devices. If the mesh splits the experts' width over `tensor`, the caller of
        the implementation has to add the results of the shards.
      dtype: the dtype of the tokens and weights.
      in_tiles: whether this platform computes all experts in tiles (`ops.preferences`).
      few_tokens: whether there are as few tokens as in cached decoding.
      layer: in decoding, the implementation may get the experts' weights of all stacked layers;
        `layer` is then the index of the layer to compute. None: the implementation gets the weights
        of one layer.
      keep_hidden: whether the remat policy saves the experts' hidden layer
        (`remat.keeps_expert_hidden`).
    """
    is_split = num_shards(mesh, EXPERT) > 1
    if not is_split and not in_tiles:
        if layer is not None:
            return functools.partial(_decode_from_stacked_experts, layer)
        if few_tokens:
            return _decode_with_sorted_gradient if prefers_cache_sized_experts() else sorted_moe
        if dtype.itemsize >= 4:
            return sorted_moe
    from qwen3next_jax.model.expert_parallelism import expert_parallel_moe, local_moe

    if is_split:
        return functools.partial(
            expert_parallel_moe,
            expert_axis=EXPERT,
            token_axes=TOKENS_OF_SLICE,
            keep_hidden=keep_hidden,
        )
    if in_tiles:
        return functools.partial(local_moe, keep_hidden=keep_hidden)
    # In bfloat16 `local_moe` is used, because it saves little beside its inputs for the backward
    # pass.
    return functools.partial(
        local_moe,
        implementation=sorted_moe if prefers_cache_sized_experts() else None,
        keep_hidden=keep_hidden,
    )


def sorted_moe(x_RD, weight_RA, expert_RA, *experts, mlp: Callable = expert_mlp):
    """The fastest implementation on CPUs. This function makes one row for each choice of a token,
    sorts the rows by expert, applies one grouped SwiGLU, restores the order of the rows, multiplies
    each row by the weight of its choice and sums the rows of each token.

    Args:
      mlp: function (x [Q, D], *experts, group_sizes [E]) → [Q, D] that computes the experts of rows
        that are sorted by expert.
    """
    r, a = expert_RA.shape
    expert_Q = expert_RA.reshape(-1)  # Q = R·A choices
    order_Q = jnp.argsort(expert_Q, stable=True)
    inverse_Q = jnp.argsort(order_Q)
    group_sizes_E = count_choices(expert_Q, experts[0].shape[0])
    x_QD = _permute(jnp.repeat(x_RD, a, axis=0), order_Q, inverse_Q)
    y_QD = mlp(x_QD, *experts, group_sizes_E)
    y_RAD = _permute(y_QD, inverse_Q, order_Q).reshape(r, a, -1)
    return jnp.einsum("rad,ra->rd", y_RAD, weight_RA)


def _decode_from_stacked_experts(layer, x, weight, expert, gate_up, down):
    """The implementation for decoding with stacked layers; it has no gradient. `gate_up` and `down`
    hold the experts of all stacked layers, and the experts of the layer with the index `layer` are
    used.
    """
    if prefers_cache_sized_experts():
        return decode_moe(x, weight, expert, gate_up, down, layer=(layer,))
    return sorted_moe(x, weight, expert, gate_up[layer], down[layer])


_decode_with_sorted_gradient = jax.custom_vjp(lambda *inputs: decode_moe(*inputs))
_decode_with_sorted_gradient.defvjp(
    lambda *inputs: jax.vjp(sorted_moe, *inputs), lambda pullback, dy: pullback(dy)
)


def count_choices(expert: jax.Array, experts: int, weight: jax.Array | None = None) -> jax.Array:
    """Returns [E] int32: how often each of the numbers 0 … `experts` - 1 occurs in `expert` [Q].
    With `weight` [Q], the function sums the weights of the occurrences instead of counting the
    occurrences. XLA fuses the comparisons with the numbers and the sums into one loop; a
    scatter-add would run serially on CPU and TPU.
    """
    hit_QE = expert[:, None] == jnp.arange(experts)
    return (
        jnp.sum(hit_QE, axis=0, dtype=jnp.int32)
        if weight is None
        else weight @ hit_QE.astype(weight.dtype)
    )


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns x[order] for a permutation `order` with the inverse permutation `inverse`. The
    gradient is dy[inverse], a gather; the default gradient would be a slower scatter.
    """
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse), lambda inverse, dy: (dy[inverse], None, None)
)
