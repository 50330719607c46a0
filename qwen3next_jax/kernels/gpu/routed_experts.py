"""The routed experts of `ops.routed_experts` on GPUs. The kernels of `grouped_matmul` compute the
products; XLA computes everything between two products in one pass over memory. The results of rows
that belong to no expert are neither computed nor set to zero, because nothing reads these results.

P rows of the layout, T tiles, D model width, E experts, I expert width, F = 2I (gate before up).
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.gpu import grouped_matmul


def unsupported_reason(x, gate_up, tile, added) -> str:
    """Returns why the kernels cannot run a call of the operator; "" if they can.

    Args:
      x: [P, D], the rows.
      gate_up: [E, D, F], the gate and up matrices.
      tile, added: the rows of a tile, and whether the call adds its gradients to earlier gradients.
        The result does not depend on `tile` and `added`.
    """
    return grouped_matmul.unsupported_reason(x, _matrix_shapes(gate_up))


def is_default(x, gate_up, tile, added) -> bool:
    """Returns whether a call runs the kernels, by the rule of `grouped_matmul.is_default`."""
    return grouped_matmul.is_default(x, _matrix_shapes(gate_up))


def _matrix_shapes(gate_up):
    """Returns the shapes of the gate and up matrices and of the down matrices."""
    e, d, f = gate_up.shape
    return gate_up, jax.ShapeDtypeStruct((e, f // 2, d), gate_up.dtype)


def mlp(
    x_PD,
    weight_P,
    gate_up_EDF,
    down_EID,
    expert_T,
    used,
    *,
    keep_hidden: bool = False,
):
    """Returns y [P, D] with y_p = (weight_p · silu(x_p gate) · (x_p up)) down, where gate, up and
    down are the matrices of the expert of row p's tile. From tile `used` on, y is undefined.

    Args:
      x_PD: the rows.
      weight_P: the router's weight of each row.
      gate_up_EDF: the gate and up matrices.
      down_EID: the down matrices.
      expert_T: [T] int32, the expert of each tile, ascending.
      used: [1] int32, the number of tiles that hold rows.
      keep_hidden: whether to return also the hidden layer x_p (gate, up), [P, F], for
        `mlp_gradients`. From tile `used` on, the hidden layer is undefined.

    Returns:
      (y, the hidden layer or None).
    """
    sizes_E = _rows_per_expert(expert_T, used, x_PD.shape[0], gate_up_EDF.shape[0])
    hidden_PF = grouped_matmul.unmasked_matmul(x_PD, gate_up_EDF, sizes_E)
    activation_PI = _weighted_swiglu(hidden_PF, weight_P)
    y_PD = grouped_matmul.unmasked_matmul(activation_PI, down_EID, sizes_E)
    return y_PD, hidden_PF if keep_hidden else None


def mlp_gradients(
    x_PD,
    weight_P,
    gate_up_EDF,
    down_EID,
    expert_T,
    used,
    hidden_PF,
    dy_PD,
    *dw_before,
):
    """Returns the gradients of the arguments of `mlp`, given dy_PD [P, D], the gradient of y. The
    other arguments have the same meaning as in `mlp`.

    Args:
      hidden_PF: the hidden layer that `mlp` returned; None: the hidden layer is computed again.
      dw_before: nothing, or two arrays: earlier gradients of gate_up and down, to which the
        gradients of this call are added.

    Returns:
      dx [P, D], dweight [P] in float32, dgate_up [E, D, F] and ddown [E, I, D]. From tile `used`
      on, dx and dweight are undefined.
    """
    sizes_E = _rows_per_expert(expert_T, used, x_PD.shape[0], gate_up_EDF.shape[0])
    if hidden_PF is None:
        hidden_PF = grouped_matmul.unmasked_matmul(x_PD, gate_up_EDF, sizes_E)
    da_PI = grouped_matmul.unmasked_matmul(dy_PD, down_EID.swapaxes(1, 2), sizes_E)
    # Without the barrier, XLA computes dweight in a pass of its own, as a part of its scatter.
    activation_PI, dhidden_PF, dweight_P = jax.lax.optimization_barrier(
        _swiglu_gradients(hidden_PF, weight_P, da_PI)
    )
    ddown = grouped_matmul.weight_gradients(activation_PI, dy_PD, sizes_E, down_EID.dtype)
    # The memory of dy is free before that of dx is needed.
    dhidden_PF, ddown = jax.lax.optimization_barrier((dhidden_PF, ddown))
    dgate_up = grouped_matmul.weight_gradients(x_PD, dhidden_PF, sizes_E, gate_up_EDF.dtype)
    dx_PD = grouped_matmul.unmasked_matmul(dhidden_PF, gate_up_EDF.swapaxes(1, 2), sizes_E)
    dw = dgate_up, ddown
    return dx_PD, dweight_P, *(map(jnp.add, dw, dw_before) if dw_before else dw)


def _rows_per_expert(expert_T, used, rows: int, experts: int):
    """Returns [E] int32, the number of rows in the tiles of each expert."""
    tiles = expert_T.shape[0]
    is_used_T = jnp.arange(tiles) < used
    hit_ET = (expert_T == jnp.arange(experts)[:, None]) & is_used_T
    return jnp.sum(hit_ET, axis=1, dtype=jnp.int32) * (rows // tiles)


def _weighted_swiglu(hidden_PF, weight_P):
    """Returns silu(gate) · up · weight [P, I], computed in float32."""
    gate, up = jnp.split(hidden_PF.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up * weight_P[:, None]).astype(hidden_PF.dtype)


def _swiglu_gradients(hidden_PF, weight_P, da_PI):
    """Returns the result of `_weighted_swiglu` and, given the gradient da_PI of this result, the
    gradients of hidden_PF and weight_P (float32).
    """
    gate, up = jnp.split(hidden_PF.astype(jnp.float32), 2, axis=-1)
    da, weight = da_PI.astype(jnp.float32), weight_P[:, None]
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    dgate = da * weight * up * sigmoid * (1 + gate * (1 - sigmoid))
    dhidden = jnp.concatenate([dgate, da * weight * silu], axis=-1)
    dtype = hidden_PF.dtype
    return (
        (silu * up * weight).astype(dtype),
        dhidden.astype(dtype),
        jnp.sum(da * silu * up, axis=-1),
    )
