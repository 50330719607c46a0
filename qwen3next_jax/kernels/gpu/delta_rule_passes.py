"""The forward and the backward pass of the gated delta rule, computed by Mosaic GPU kernels
(sm_90a).

The kernel of `delta_rule_chunks` computes the matrices of each chunk that do not depend on the
state. A kernel of `delta_rule_states` then carries the state, or in the backward pass its gradient,
from chunk to chunk. In the backward pass, the kernel of `delta_rule_gradients` finally computes the
gradients of each chunk's inputs.

If a call has too few heads to fill the chip, each row is split into pieces that run at the same
time. An additional call of a kernel of `delta_rule_states` then computes the affine map of each
piece: the state after the piece is U + M S if the state before it is S. Composing these maps gives
the state before each piece.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.gpu import delta_rule_gradients, delta_rule_states
from qwen3next_jax.kernels.gpu.delta_rule_problem import Problem
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, tiles
from qwen3next_jax.ops.delta_rule import associative, chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

EXACT = chunk_math.Products(jnp.float32)


def forward(
    x: Inputs,
    initial_state,
    inverses,
    settings: Settings,
    *,
    save: bool,
    interpret: bool = False,
    pieces: int | None = None,
):
    """Computes what `ops.delta_rule.interface.Implementation.forward` describes, always in chunks
    of 64 tokens.

    The argument and the result `inverses` hold the inverses of I + M beta (docs/delta_rule.md) in
    the layout that `to_residual` returns.

    Args:
      interpret: whether a CPU interprets the kernels.
      pieces: number of pieces into which each row is split, a divisor of the number of chunks; if
        None, `Problem.best_pieces` chooses it.
    """
    p = Problem.of(x, settings, pieces, save=save, interpret=interpret)
    q, k, v = (p.pad_time(y) for y in x[:3])
    rows = p.rows(x)
    made = p.run_chunks(q, k, rows, settings.erase and inverses is None)
    inputs = [q, k, v, made["factors"], rows, made["p"]]
    initial = initial_state.astype(jnp.float32)
    if settings.erase:
        inverses = made["inverses"] if inverses is None else from_residual(inverses, p.value_heads)
        inputs.append(inverses)
    if p.pieces > 1:
        u, m = _maps_of_pieces(p, p.value_tiles, inputs)
        initial = associative.states((m, u), initial, EXACT, reverse=False)[0]
        initial = initial.reshape(-1, *p.state_shape[1:])
    outputs = dict(final=_transposed_states(p), o=p.shaped(*v.shape))
    if save:
        outputs["states"] = p.shaped(p.chunks, *p.state_shape)
    results = p.run_states(
        delta_rule_states.forward_kernel,
        "forward",
        outputs,
        tiles(p.warpgroups),
        [*inputs, transpose(initial)],
    )
    o = results["o"][:, : x.v.shape[1]]
    final = transpose(p.by_piece(results["final"])[-1])
    if not save:
        return o, final, None, None
    return o, final, results["states"], to_residual(inverses) if settings.erase else None


def backward(
    x: Inputs,
    states,
    inverses,
    do,
    dfinal,
    settings: Settings,
    *,
    interpret: bool = False,
    pieces: int | None = None,
):
    """Computes what `ops.delta_rule.interface.Implementation.backward` describes, in chunks of 64
    tokens. `inverses`, `interpret` and `pieces` have the same meaning as in `forward`.
    """
    p = Problem.of(x, settings, pieces, interpret=interpret)
    q, k, v, do = (p.pad_time(y) for y in (*x[:3], do.astype(x.v.dtype)))
    rows = p.rows(x)
    made = p.run_chunks(q, k, rows, False)
    known = [from_residual(inverses, p.value_heads)] if settings.erase else []
    chunk_inputs = [made["factors"], rows, made["p"], *known]
    out = _state_gradients(p, q, k, v, do, dfinal.astype(jnp.float32), chunk_inputs)
    dinitial = transpose(p.by_piece(out["dinitial"])[0])

    tokens = [q, k, v, do, out["dv"], out["dv_low"]]
    inputs = [*tokens, states, out["dstates"], made["factors"], rows, *known]
    by_head = p.shaped(*v.shape[:3], p.key)
    outputs = dict(
        dq=by_head,
        dk=by_head,
        sums=p.shaped(p.batch, p.value_heads, p.chunks, 2, C, dtype=jnp.float32),
    )
    gradients = p.call(
        delta_rule_gradients.gradient_kernel,
        "gradients",
        dict(chunks=p.chunks, heads=p.value_heads, batch=p.batch),
        outputs,
        delta_rule_gradients.scratch(p),
        inputs,
        **delta_rule_gradients.threads(p),
    )
    time = x.v.shape[1]
    dq, dk = (p.to_key_heads(gradients[name])[:, :time] for name in ("dq", "dk"))
    dg, dbeta = (p.from_rows(gradients["sums"][:, :, :, i])[:, :time] for i in range(2))
    return dq, dk, out["dv"][:, :time], dg, dbeta, dinitial


def _state_gradients(p: Problem, q, k, v, do, dfinal, chunk_inputs: list) -> dict:
    """Runs the pass that carries the gradient of the state from the last chunk to the first.

    Args:
      chunk_inputs: the arrays factors, rows, P beta and, with the delta term, the inverses.

    Returns:
      dinitial: [pieces · B, H, V, K] float32, the gradient of the state before each piece.
      dv, dv_low: [B, N C, H, V], two bfloat16 arrays whose sum is the gradient of v.
      dstates: [N, B, H, K, V], the gradient of the state after each chunk.
    """
    outputs = dict(dinitial=_transposed_states(p))
    if p.pieces > 1:
        _, m = _maps_of_pieces(p, 0, [q, k, v, *chunk_inputs])
        # The part of the gradient of the state before each piece that comes from the outputs of
        # that piece.
        own = dataclasses.replace(p, map_tiles=(p.value_tiles, 0)).run_states(
            delta_rule_states.backward_kernel,
            "map_backward",
            outputs,
            tiles(1),
            [q, k, do, *chunk_inputs],
        )
        maps = transpose(m), transpose(p.by_piece(own["dinitial"]))
        dfinal = associative.states(maps, dfinal, EXACT, reverse=True)[0]
        dfinal = dfinal.reshape(-1, *p.state_shape[1:])
    outputs |= dict(
        dv=p.shaped(*v.shape), dv_low=p.shaped(*v.shape), dstates=p.shaped(p.chunks, *p.state_shape)
    )
    return p.run_states(
        delta_rule_states.backward_kernel,
        "backward",
        outputs,
        tiles(p.warpgroups, 2),
        [q, k, do, *chunk_inputs, transpose(dfinal)],
    )


def _maps_of_pieces(p: Problem, value_tiles: int, inputs: list):
    """Returns U and M of each piece, [pieces, B, H, K, …] in float32: if S is the state before a
    piece, U + M S is the state after it.

    Args:
      value_tiles: number of blocks of 64 value channels that U has.
    """
    p = dataclasses.replace(p, save=False, map_tiles=(value_tiles, p.key_tiles))
    shape = p.pieces * p.batch, p.value_heads, p.columns * C, p.key
    results = p.run_states(
        delta_rule_states.forward_kernel,
        "maps",
        dict(maps=p.shaped(*shape, dtype=jnp.float32)),
        tiles(1),
        inputs,
    )
    return jnp.split(transpose(p.by_piece(results["maps"])), [value_tiles * C], axis=-1)


def _transposed_states(p: Problem):
    """Returns the shape [pieces · B, H, V, K] and dtype float32 of the kernels' transposed
    states.
    """
    shape = p.pieces * p.batch, p.value_heads, p.value, p.key
    return p.shaped(*shape, dtype=jnp.float32)


def transpose(x):
    """Returns x with its last two axes exchanged."""
    return jnp.swapaxes(x, -1, -2)


def to_residual(inverses):
    """Converts the inverses [N, B, H, 2, C, C], the high and low parts in bfloat16, to the shape
    [N, B, ⌈H / 2⌉, C, 2C] and the dtype float32 that every implementation saves. If H is odd, it
    adds a head of zeros. The bits of two bfloat16 numbers become the bits of one float32 number, so
    the float32 numbers have no meaning.
    """
    chunks, batch, heads = inverses.shape[:3]
    x = jax.lax.bitcast_convert_type(inverses.reshape(chunks, batch, heads, C * C, 2), jnp.float32)
    return jnp.pad(x, [(0, 0), (0, 0), (0, heads % 2), (0, 0)]).reshape(chunks, batch, -1, C, 2 * C)


def from_residual(x, heads: int):
    """Returns the argument of `to_residual` whose result is x. `heads` is H."""
    chunks, batch = x.shape[:2]
    x = x.reshape(chunks, batch, -1, C * C)[:, :, :heads]
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).reshape(chunks, batch, heads, 2, C, C)
