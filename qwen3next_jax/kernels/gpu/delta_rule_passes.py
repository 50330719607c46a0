"""The forward and the backward pass of the gated delta rule, computed by Mosaic GPU kernels
(sm_90a).

The kernel of `delta_rule_chunks` computes the matrices of each chunk that do not depend on the
state. After the kernel of `delta_rule_chunks`, a kernel of `delta_rule_states` carries the state,
or in the backward pass the gradient of the state, from chunk to chunk. In the backward pass, the
kernel of `delta_rule_gradients` finally computes the gradients of each chunk's inputs.

If a call has too few heads to fill the chip, each row is split into pieces, and two kernels of
`delta_rule_states` run one after the other. If S is the state before a piece, the state after the
piece is U + M S. The first kernel computes piece 0, and the maps U + M S of all pieces between the
first and the last. The composition of the maps gives the state before each piece, and the second
kernel computes all pieces except piece 0.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.gpu import delta_rule_gradients, delta_rule_states
from qwen3next_jax.kernels.gpu.delta_rule_problem import Problem, WorkSplit
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, tile_memory
from qwen3next_jax.ops.delta_rule import associative, chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

EXACT = chunk_math.MatrixProducts(jnp.float32)


def forward(
    x: Inputs,
    initial_state,
    inverses,
    settings: Settings,
    *,
    save: bool,
    interpret: bool = False,
    split: WorkSplit | None = None,
):
    """Computes the results that `ops.delta_rule.interface.Implementation.forward` describes, always
    in chunks of 64 tokens.

    Heads are padded with zeros to 64, 128 or 256 channels. The padding changes no result: a channel
    of zeros in k or v writes nothing to the state, and a channel of zeros in q reads nothing.
    `states` keep the padded width.

    The argument and the result `inverses` hold the inverses of I + M beta (docs/delta_rule.md) in
    the layout that `to_saved_inverses` returns.

    Args:
      interpret: whether a CPU interprets the kernels.
      split: how the passes of the state split the work; None: `Problem.best_work_split` chooses.
    """
    p = Problem.of_call(x, settings, split, save_states=save, interpret=interpret)
    q, k, v = p.pad_keys(x.q), p.pad_keys(x.k), p.pad_values(x.v)
    gate_rows = p.gate_rows_of_chunks(x)
    made = p.run_chunk_kernel(q, k, gate_rows, settings.delta_term and inverses is None)
    inputs = [q, k, v, made["norm_rows"], gate_rows, made["p_beta"]]
    if settings.delta_term:
        inverses = (
            made["inverses"] if inverses is None else from_saved_inverses(inverses, p.value_heads)
        )
        inputs.append(inverses)
    outputs = dict(o=p.shape_struct(*v.shape))
    if save:
        outputs["states"] = p.shape_struct(p.chunks, *p.state_shape)
    first = p.pad_state(initial_state)
    results, final = _run_state_pass(
        p, "forward", inputs, first, outputs, tile_memory(p.warpgroups_per_block)
    )
    o = remove_padding(results["o"], x.v.shape)
    final = remove_padding(final, initial_state.shape)
    if not save:
        return o, final, None, None
    return o, final, results["states"], to_saved_inverses(inverses) if settings.delta_term else None


def backward(
    x: Inputs,
    states,
    inverses,
    do,
    dfinal,
    settings: Settings,
    *,
    interpret: bool = False,
    split: WorkSplit | None = None,
):
    """Computes the results that `ops.delta_rule.interface.Implementation.backward` describes, in
    chunks of 64 tokens. `inverses`, `interpret` and `split` have the same meaning as in `forward`.
    """
    p = Problem.of_call(x, settings, split, interpret=interpret)
    q, k = p.pad_keys(x.q), p.pad_keys(x.k)
    v, do = p.pad_values(x.v), p.pad_values(do.astype(x.v.dtype))
    gate_rows = p.gate_rows_of_chunks(x)
    made = p.run_chunk_kernel(q, k, gate_rows, False)
    known = [from_saved_inverses(inverses, p.value_heads)] if settings.delta_term else []
    outputs = dict(
        dv=p.shape_struct(*v.shape),
        dv_low=p.shape_struct(*v.shape),
        dstates=p.shape_struct(p.chunks, *p.state_shape),
    )
    inputs = [q, k, do, made["norm_rows"], gate_rows, made["p_beta"], *known]
    last = p.pad_state(dfinal)
    out, dinitial = _run_state_pass(
        p, "backward", inputs, last, outputs, tile_memory(p.warpgroups_per_block, 2)
    )

    tokens = [q, k, v, do, out["dv"], out["dv_low"]]
    inputs = [*tokens, states, out["dstates"], made["norm_rows"], gate_rows, *known]
    by_head = p.shape_struct(*v.shape[:3], p.key_width)
    outputs = dict(
        dq=by_head,
        dk=by_head,
        sums=p.shape_struct(p.batch, p.value_heads, p.chunks, 2, C, dtype=jnp.float32),
    )
    gradients = p.call_kernel(
        delta_rule_gradients.gradient_kernel,
        "gradients",
        dict(chunks=p.chunks, heads=p.value_heads, batch=p.batch),
        outputs,
        delta_rule_gradients.scratch_memory(p),
        inputs,
        delta_rule_gradients.warpgroup_count(p),
    )
    dq, dk = (
        remove_padding(p.sum_over_value_heads(gradients[name]), x.q.shape) for name in ("dq", "dk")
    )
    dg, dbeta = (
        remove_padding(p.chunks_to_tokens(gradients["sums"][:, :, :, i]), x.log_decay.shape)
        for i in range(2)
    )
    return (
        dq,
        dk,
        remove_padding(out["dv"], x.v.shape),
        dg,
        dbeta,
        remove_padding(dinitial, dfinal.shape),
    )


KERNELS = {
    "forward": (
        delta_rule_states.first_piece_and_maps_forward_kernel,
        delta_rule_states.forward_kernel,
    ),
    "backward": (
        delta_rule_states.first_piece_and_maps_backward_kernel,
        delta_rule_states.backward_kernel,
    ),
}


def _run_state_pass(
    p: Problem, name: str, inputs: list, first, outputs: dict, results
) -> tuple[dict, Any]:
    """Runs the pass of the state called `name`, "forward" or "backward". The backward pass carries
    the gradient of the state from the last chunk to the first.

    Args:
      p: the problem.
      name: the key of the kernels in KERNELS.
      inputs: the input arrays of the kernels, except the states with which pieces start.
      first: [B, H, K, V] float32, the state (or gradient) with which the pass starts.
      outputs: shape and dtype of each output with an axis of tokens or chunks, by name.
      results: shared memory from which the outputs are copied, for `Problem.run_state_kernel`.

    Returns:
      The outputs by name, and the state (or gradient) with which the pass ends, [B, H, K, V].
    """
    rows = p.batch, p.value_heads
    last = lambda pieces: p.shape_struct(
        pieces * rows[0], rows[1], p.value_width, p.key_width, dtype=jnp.float32
    )
    first_kernel, kernel = KERNELS[name]
    if p.pieces_per_row == 1:
        made = p.run_state_kernel(
            kernel,
            name,
            dict(outputs, last=last(1)),
            results,
            [*inputs, transpose_last_axes(first)],
        )
        return made, transpose_last_axes(made.pop("last"))

    columns = 2 * C * p.blocks_per_map
    maps = p.shape_struct(
        (p.pieces_per_row - 2) * rows[0], rows[1], columns, p.key_width, dtype=jnp.float32
    )
    made = p.run_first_piece_and_maps(
        first_kernel,
        f"{name}_first",
        dict(outputs, last=last(1), maps=maps),
        results,
        [*inputs, transpose_last_axes(first)],
    )
    u, m, _ = jnp.split(
        transpose_last_axes(p.unflatten_pieces(made["maps"])),
        [p.value_width, p.value_width + p.key_width],
        axis=-1,
    )
    firsts, after = associative.states_before_each_map(
        (m, u), transpose_last_axes(made["last"]), EXACT, reverse=False
    )
    firsts = jnp.concatenate([firsts, after[None]]).reshape(-1, *p.state_shape[1:])
    # The second call writes to the same arrays, which hold the first piece already.
    refs = {output: jax.new_ref(made[output]) for output in outputs}
    lasts = p.run_state_kernel(
        kernel,
        name,
        dict(last=last(p.pieces_per_row - 1)),
        results,
        [*inputs, transpose_last_axes(firsts), *refs.values()],
    )["last"]
    made = {output: jax.freeze(ref) for output, ref in refs.items()}
    return made, transpose_last_axes(p.unflatten_pieces(lasts)[-1])


def remove_padding(x, shape):
    """Returns x without the padding: the first `shape` elements of every axis."""
    return x[tuple(slice(size) for size in shape)]


def transpose_last_axes(x):
    """Returns x with its last two axes exchanged."""
    return jnp.swapaxes(x, -1, -2)


def to_saved_inverses(inverses):
    """Converts the inverses [N, B, H, 2, C, C], with their high and low parts in bfloat16, to
    float32 [N, B, ⌈H / 2⌉, C, 2C], the shape and dtype that every implementation saves. If H is
    odd, a head of zeros is added. The bits of two bfloat16 numbers become the bits of one float32
    number, so the values of the float32 numbers have no meaning.
    """
    chunks, batch, heads = inverses.shape[:3]
    x = jax.lax.bitcast_convert_type(inverses.reshape(chunks, batch, heads, C * C, 2), jnp.float32)
    return jnp.pad(x, [(0, 0), (0, 0), (0, heads % 2), (0, 0)]).reshape(chunks, batch, -1, C, 2 * C)


def from_saved_inverses(x, heads: int):
    """Returns the inverses that `to_saved_inverses` converted to x. `heads` is H."""
    chunks, batch = x.shape[:2]
    x = x.reshape(chunks, batch, -1, C * C)[:, :, :heads]
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).reshape(chunks, batch, heads, 2, C, C)
