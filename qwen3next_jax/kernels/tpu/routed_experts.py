"""TPU kernels of the routed experts: the SwiGLU experts, forward and backward, and the sum of the
rows of each token.

There is one row for each pair of a token and an expert that the token chose. The rows lie in tiles.
All rows of a tile belong to one expert. An expert's last tile is padded with rows that hold finite
numbers and have the weight 0. Products accumulate in float32. In the forward pass the hidden layer
of an expert never leaves VMEM. Results [P, width] are written in the dtype of the inputs.

T tiles, M rows per tile, P = T·M, D model width, I expert width, F = 2I (gate before up),
E experts, N tokens. In `sum_rows_by_token`, V is the number of grid steps; each step adds the rows
of one tile to the sums of one block of tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.pallas_call import pallas_call

_NT = (((1,), (1,)), ((), ()))  # x yᵀ
_TN = (((0,), (0,)), ((), ()))  # xᵀ y
_SUM_TOKENS, _SUM_ROWS = (
    128,
    256,
)  # in `sum_rows_by_token`: the tokens of a block and the rows of a tile


def unsupported_reason(x, gate_up, tile: int, added: bool) -> str:
    """Returns why the kernels of the experts cannot run these shapes on the chip; "" if they can.

    D has to be a multiple of LANES times the number of cores, F has to be a multiple of 2 LANES,
    and the weights of one expert, or the gradients of these weights, have to fit in VMEM.

    Args:
      x: [P, D].
      gate_up: [E, D, F].
      tile: M.
      added: whether the gradients of the weights are added to earlier gradients; if so, VMEM has to
        hold the earlier gradients, too.
    """
    (_, d, f), size = gate_up.shape, x.dtype.itemsize
    if x.dtype not in (jnp.bfloat16, jnp.float32) or gate_up.dtype != x.dtype:
        return (
            f"has rows of {x.dtype} and matrices of {gate_up.dtype}: expected both in bfloat16 or "
            "both in float32"
        )
    if d % (LANES * chip.core_count()) or f % (2 * LANES) or tile % (32 // size):
        return (
            f"has widths {d} and {f} and tiles of {tile} rows: expected multiples of "
            f"{LANES * chip.core_count()}, {2 * LANES} and {32 // size}"
        )
    # VMEM holds the inputs and outputs of two grid steps, because the compiler double-buffers them.
    # For one grid step it also holds the float32 sums and the float32 values between products.
    weights, rows = d * f * 3 // 2, 2 * tile * size * (3 * d + f * 3 // 2) + 4 * tile * 5 * f
    gradients = 4 if added else 2
    weight_bytes = max(2 * size * weights, (4 + gradients * size) * weights // chip.core_count())
    if weight_bytes + rows >= chip.vmem_budget_bytes():
        return f"needs {weight_bytes + rows} bytes of VMEM of {int(chip.vmem_budget_bytes())}"
    return ""


def _dot(a, b, dims=(((1,), (0,)), ((), ()))):
    """Returns a @ b, or the product with the dimension numbers `dims`, in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _call_kernel(
    kernel,
    scalars,
    inputs,
    in_specs,
    outputs,
    out_specs,
    grid,
    semantics,
    scratch=(),
    flops=0.0,
    shared=(),
    aliases=(),
    interpret=False,
):
    """Runs `kernel` over the grid and returns its outputs.

    Args:
      kernel: the kernel, a function of the Pallas references of scalars, inputs, outputs and
        scratch memory.
      scalars: arrays of integers, which the kernel and the index maps of the specifications take.
      inputs: the input arrays.
      in_specs: the block specification of each input.
      outputs: the shape and dtype of each output.
      out_specs: the block specification of each output.
      grid: the size of each grid axis.
      semantics: "parallel" or "arbitrary" for each grid axis.
      scratch: the shapes of scratch memory.
      flops: number of operations, for the compiler's scheduler.
      shared: the inputs that every core reads as a whole.
      aliases: pairs (index of an input, index of the output that is written to the memory of this
        input).
      interpret: whether a CPU interprets the kernel.
    """
    read_by_others = shared * (chip.core_count() - 1)
    sizes = [a.size * a.dtype.itemsize for a in (*inputs, *outputs, *read_by_others)]
    return pallas_call(
        kernel,
        out_shape=outputs,
        interpret=interpret,
        name=kernel.__name__.strip("_").removesuffix("_kernel"),
        input_output_aliases={len(scalars) + i: output for i, output in aliases},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=chip.vmem_bytes()
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(flops), transcendentals=0, bytes_accessed=sum(sizes)
        ),
    )(*scalars, *inputs)


# ---- the SwiGLU experts


def mlp(
    x_PD,
    weight_P,
    gate_up_EDF,
    down_EID,
    expert_T,
    used,
    *,
    keep_hidden: bool = False,
    interpret: bool = False,
):
    """Returns y [P, D] with y_p = (weight_p · silu(x_p gate) · (x_p up)) down, where gate, up and
    down are the matrices of the expert of row p's tile. From tile `used` on, y is zero.

    Args:
      x_PD: [P, D], the rows.
      weight_P: [P], the router's weight of each row.
      gate_up_EDF: [E, D, F], the gate and up matrices.
      down_EID: [E, I, D], the down matrices.
      expert_T: [T] int32, the expert of each tile, ascending.
      used: [1] int32, the number of tiles that hold rows.
      keep_hidden: whether to return also the hidden layer x_p (gate, up), [P, F], for
        `mlp_gradients`. From tile `used` on, the hidden layer is undefined.
      interpret: whether a CPU interprets the kernel.

    Returns:
      (y, the hidden layer or None).
    """
    spec = _TileSpecs(x_PD, gate_up_EDF, down_EID, expert_T)
    shape = lambda width: jax.ShapeDtypeStruct((x_PD.shape[0], width), x_PD.dtype)
    widths = (spec.d, spec.f) if keep_hidden else (spec.d,)
    y, *hidden = _call_kernel(
        _expert_forward_kernel,
        (expert_T, used),
        (x_PD, weight_P[:, None], gate_up_EDF, down_EID),
        (spec.input_rows_spec(spec.d), spec.input_rows_spec(1), spec.gate_up, spec.down),
        [shape(width) for width in widths],
        [spec.output_rows_spec(width) for width in widths],
        spec.grid,
        spec.semantics,
        flops=3 * spec.flops,
        interpret=interpret,
    )
    return y, hidden[0] if hidden else None


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
    interpret: bool = False,
):
    """Returns the gradients of the arguments of `mlp`, given dy_PD [P, D], the gradient of y. The
    other arguments have the same meaning as in `mlp`.

    Args:
      hidden_PF: the hidden layer that `mlp` returned; None: the hidden layer is computed again.
      dw_before: nothing, or two arrays: earlier gradients of gate_up and down, to which the
        gradients of this call are added. Without `dw_before`, the gradients of an expert that has
        no tile are undefined.

    Returns:
      dx [P, D], dweight [P] in float32, dgate_up [E, D, F] and ddown [E, I, D]. From tile `used`
      on, dx is zero and dweight is undefined.
    """
    spec = _TileSpecs(x_PD, gate_up_EDF, down_EID, expert_T)
    p, shape = x_PD.shape[0], jax.ShapeDtypeStruct
    known = hidden_PF is not None
    dx, dweight, dhidden, activation = _call_kernel(
        _expert_backward_rows_given_hidden_kernel if known else _expert_backward_rows_kernel,
        (expert_T, used),
        (hidden_PF if known else x_PD, weight_P[:, None], dy_PD, gate_up_EDF, down_EID),
        (
            spec.input_rows_spec(spec.f if known else spec.d),
            spec.input_rows_spec(1),
            spec.input_rows_spec(spec.d),
            spec.gate_up,
            spec.down,
        ),
        (
            shape((p, spec.d), x_PD.dtype),
            shape((p, 1), jnp.float32),
            shape((p, spec.f), x_PD.dtype),
            shape((p, spec.f // 2), x_PD.dtype),
        ),
        (
            spec.output_rows_spec(spec.d),
            spec.output_rows_spec(1),
            spec.output_rows_spec(spec.f),
            spec.output_rows_spec(spec.f // 2),
        ),
        spec.grid,
        spec.semantics,
        flops=(3 if known else 5) * spec.flops,
        interpret=interpret,
    )
    # The width D is split into one part for each core of the chip.
    cores = chip.core_count()
    part, i, f = spec.d // cores, spec.f // 2, spec.f
    at = lambda t, used: jnp.minimum(t, used[0] - 1)
    row = lambda width: pl.BlockSpec((spec.tile, width), lambda c, t, e, used: (at(t, used), 0))
    row_part = pl.BlockSpec((spec.tile, part), lambda c, t, e, used: (at(t, used), c))
    results = (
        pl.BlockSpec((1, part, f), lambda c, t, e, used: (e[at(t, used)], c, 0)),
        pl.BlockSpec((1, i, part), lambda c, t, e, used: (e[at(t, used)], 0, c)),
    )
    dgate_up, ddown = _call_kernel(
        _expert_backward_weights_kernel,
        (expert_T, used),
        (x_PD, dhidden, activation, dy_PD, *dw_before),
        (row_part, row(f), row(i), row_part, *results[: len(dw_before)]),
        (shape(gate_up_EDF.shape, gate_up_EDF.dtype), shape(down_EID.shape, down_EID.dtype)),
        results,
        (cores, spec.tiles),
        ("parallel", "arbitrary"),
        (pltpu.VMEM((part, f), jnp.float32), pltpu.VMEM((i, part), jnp.float32)),
        flops=3 * spec.flops,
        shared=(dhidden, activation),
        aliases=[(4 + n, n) for n in range(len(dw_before))],
        interpret=interpret,
    )
    return dx, dweight[:, 0], dgate_up, ddown


class _TileSpecs:
    """The sizes of a call over tiles, its grid, and the block specifications of a tile's rows and
    of its expert's weights.

    The grid has the axes (core, step of the core). Each core takes an equal share of the used
    tiles, one after another, and then an equal share of the unused tiles (index `used` or more), so
    that all cores have the same amount of work. A grid step for an unused tile reads the blocks of
    the core's last used tile, which are in VMEM already, so nothing is copied.
    """

    def __init__(self, x_PD, gate_up_EDF, down_EID, expert_T):
        _, self.d, self.f = gate_up_EDF.shape
        self.tiles = expert_T.shape[0]
        self.tile = x_PD.shape[0] // self.tiles
        self.flops = 2.0 * x_PD.shape[0] * self.d * self.f / 2  # of one product with `down`
        # If the cores cannot have equally many tiles, the compiler divides them, used or not.
        cores = chip.core_count() if self.tiles % chip.core_count() == 0 else 1
        self.grid = (cores, self.tiles // cores)
        self.semantics = ("parallel", "parallel" if cores == 1 else "arbitrary")
        self.gate_up = pl.BlockSpec(
            (1, self.d, self.f), lambda c, i, e, used: (e[self._tile_to_read(c, i, used)], 0, 0)
        )
        self.down = pl.BlockSpec(
            (1, self.f // 2, self.d),
            lambda c, i, e, used: (e[self._tile_to_read(c, i, used)], 0, 0),
        )

    def input_rows_spec(self, width):
        """Returns the block specification of an input [P, width]."""
        return pl.BlockSpec(
            (self.tile, width), lambda c, i, e, used: (self._tile_to_read(c, i, used), 0)
        )

    def output_rows_spec(self, width):
        """Returns the block specification of an output [P, width]."""
        cores, steps = self.grid

        def tile(c, i, used):
            own = _tiles_per_core(used, cores)
            return jnp.where(i < own, c * own + i, (cores - c - 1) * own + c * steps + i)

        return pl.BlockSpec((self.tile, width), lambda c, i, e, used: (tile(c, i, used), 0))

    def _tile_to_read(self, core, step, used):
        """Returns the tile that a grid step reads."""
        own = _tiles_per_core(used, self.grid[0])
        return jnp.minimum(core * own + jnp.minimum(step, own - 1), used[0] - 1)


def _tiles_per_core(used, cores: int):
    """Returns the number of used tiles of each core. The last core may have fewer tiles."""
    return jax.lax.div(used[0] + (cores - 1), jnp.int32(cores))


def _tile_has_rows(used):
    """Returns whether the tile of this grid step holds rows."""
    core, step = pl.program_id(0), pl.program_id(1)
    own = _tiles_per_core(used, pl.num_programs(0))
    return (step < own) & (core * own + step < used[0])


def _expert_forward_kernel(expert_T, used, x, weight, gate_up, down, y, *kept):
    """Computes y of one tile. `kept` is () or has one reference, to which the kernel writes the
    tile's hidden layer.
    """
    has_rows = _tile_has_rows(used)

    @pl.when(has_rows)
    def _():
        hidden = _dot(x[...], gate_up[0])
        for ref in kept:
            ref[...] = hidden.astype(ref.dtype)
        gate, up = _split_gate_and_up(hidden)
        y[...] = _dot(
            (gate * jax.nn.sigmoid(gate) * up * weight[...]).astype(x.dtype), down[0]
        ).astype(y.dtype)

    @pl.when(~has_rows)
    def _():
        y[...] = jnp.zeros_like(y)


class _RowGradientRefs(NamedTuple):
    """The references of the two kernels that compute the gradients of a tile's rows, except the
    reference to the rows (in one kernel) or to the hidden layer (in the other kernel).
    """

    router_weight: Any  # [rows, 1]
    dy: Any  # [rows, D]
    gate_up: Any  # [1, D, F]
    down: Any  # [1, I, D]
    dx: Any  # output [rows, D]
    drouter_weight: Any  # output [rows, 1]
    dhidden: Any  # output [rows, F]
    weighted_activation: Any  # output [rows, I], silu(gate) · up · router weight


def _expert_backward_rows_kernel(expert_T, used, x, *refs):
    """Computes for one tile the gradients of x, of the router's weights and of the hidden layer
    (gate and up), and the activation times the router's weight.
    """
    refs = _RowGradientRefs(*refs)
    _write_row_gradients(used, lambda: _dot(x[...], refs.gate_up[0]), refs)


def _expert_backward_rows_given_hidden_kernel(expert_T, used, hidden, *refs):
    """Computes the same as `_expert_backward_rows_kernel`, but from the hidden layer instead of the
    rows.
    """
    _write_row_gradients(used, lambda: hidden[...].astype(jnp.float32), _RowGradientRefs(*refs))


def _write_row_gradients(used, hidden, refs: _RowGradientRefs):
    dhidden = refs.dhidden
    has_rows = _tile_has_rows(used)

    @pl.when(has_rows)
    def _():
        gate, up = _split_gate_and_up(hidden())
        sigmoid = jax.nn.sigmoid(gate)
        swiglu = gate * sigmoid * up
        da = _dot(refs.dy[...], refs.down[0], _NT)
        refs.drouter_weight[...] = jnp.sum(swiglu * da, axis=1, keepdims=True)
        refs.weighted_activation[...] = (swiglu * refs.router_weight[...]).astype(
            refs.weighted_activation.dtype
        )
        da = da * refs.router_weight[...]
        half = gate.shape[1]
        dhidden[:, :half] = (da * up * sigmoid * (1 + gate * (1 - sigmoid))).astype(dhidden.dtype)
        dhidden[:, half:] = (da * gate * sigmoid).astype(dhidden.dtype)
        refs.dx[...] = _dot(dhidden[...], refs.gate_up[0], _NT).astype(refs.dx.dtype)

    @pl.when(~has_rows)
    def _():
        refs.dx[...] = jnp.zeros_like(refs.dx)


def _expert_backward_weights_kernel(expert_T, used, x, dhidden, activation, dy, *refs):
    """Adds a tile's part to the gradients of the matrices of the tile's expert."""
    *dw_before, dgate_up, ddown, dgate_up_sum, ddown_sum = refs
    t = pl.program_id(1)
    first = (t == 0) | (expert_T[t] != expert_T[jnp.maximum(t - 1, 0)])

    @pl.when(t < used[0])
    # The sums are stored after every tile, because these stores overlap with the products. A store
    # of zeros before an expert's first tile, or a store after its last tile only, would not
    # overlap.
    def _():
        gradients = (dgate_up_sum, dgate_up, x, dhidden), (ddown_sum, ddown, activation, dy)
        for (sums, result, left, right), begin in zip(
            gradients, [w[0].astype(jnp.float32) for w in dw_before] or (0.0, 0.0)
        ):
            total = jnp.where(first, begin, sums[...]) + _dot(left[...], right[...], _TN)
            sums[...] = total
            result[0] = total.astype(result.dtype)


def _split_gate_and_up(hidden):
    """Splits the hidden layer [rows, F] into gate and up, [rows, I] each."""
    return hidden[:, : hidden.shape[1] // 2], hidden[:, hidden.shape[1] // 2 :]


# ---- sums by token


def sum_rows_by_token(rows_PD, token_P, tokens: int, *, interpret: bool = False):
    """Returns the sum of each token's rows, [N, D].

    The kernel cuts the rows into tiles of _SUM_ROWS rows, and the tokens into blocks of
    _SUM_TOKENS tokens. For each block of tokens that has rows in a tile, the kernel adds to the
    block's sums the product of a matrix [_SUM_TOKENS, _SUM_ROWS] and the tile. The matrix has a one
    where the row belongs to the token, and zeros elsewhere.

    Args:
      rows_PD: [P, D]. All numbers have to be finite, because the kernel multiplies the rows of
        other tokens by zero.
      token_P: [P] integers, ascending, the token of each row. Rows whose token is N or more are
        left out.
      tokens: N.
      interpret: whether a CPU interprets the kernel.
    """
    p, d = rows_PD.shape
    cores = chip.core_count()
    # Each of several cores sums a part of the columns, which has to consist of whole lanes.
    width = d if cores == 1 else d + -d % (LANES * cores)
    rows_PD = jnp.pad(rows_PD, ((0, -p % _SUM_ROWS), (0, width - d)))
    token_P = jnp.pad(
        token_P.astype(jnp.int32), (0, -p % _SUM_ROWS), constant_values=tokens + _SUM_TOKENS
    )
    tiles, blocks = rows_PD.shape[0] // _SUM_ROWS, -(-tokens // _SUM_TOKENS)
    edges = jnp.arange(blocks + 1) * _SUM_TOKENS
    starts = jnp.sum(token_P < edges[:, None], axis=1, dtype=jnp.int32)
    first = jnp.minimum(starts[:-1] // _SUM_ROWS, tiles - 1)  # the first tile of each block
    # Each block gets at least one step. In a block without rows, this step sets the sums to zero.
    visits = jnp.maximum(-(-starts[1:] // _SUM_ROWS) - first, 1)
    ends = jnp.cumsum(visits)
    v = jnp.minimum(jnp.arange(tiles + blocks), ends[-1] - 1)
    block_V = jnp.sum(ends <= v[:, None], axis=1, dtype=jnp.int32)
    tile_V = (first[block_V] + v - (ends - visits)[block_V]).astype(jnp.int32)
    return _call_kernel(
        _sum_by_token_kernel,
        (block_V, tile_V, ends[-1:].astype(jnp.int32)),
        (token_P.reshape(tiles, 1, _SUM_ROWS), rows_PD),
        (
            pl.BlockSpec((1, 1, _SUM_ROWS), lambda c, v, block, tile, used: (tile[v], 0, 0)),
            pl.BlockSpec((_SUM_ROWS, width // cores), lambda c, v, block, tile, used: (tile[v], c)),
        ),
        (jax.ShapeDtypeStruct((blocks * _SUM_TOKENS, width), rows_PD.dtype),),
        (
            pl.BlockSpec(
                (_SUM_TOKENS, width // cores), lambda c, v, block, tile, used: (block[v], c)
            ),
        ),
        (cores, tiles + blocks),
        ("parallel", "arbitrary"),
        (pltpu.VMEM((_SUM_TOKENS, width // cores), jnp.float32),),
        flops=2.0 * (tiles + blocks) * _SUM_ROWS * _SUM_TOKENS * width,
        interpret=interpret,
    )[0][:tokens, :d]


def _sum_by_token_kernel(block_V, tile_V, used, token, rows, y, total):
    """Adds the rows of one tile to the sums of one block of tokens."""
    v = pl.program_id(1)
    block = block_V[v]
    first = (v == 0) | (block != block_V[jnp.maximum(v - 1, 0)])

    @pl.when(v < used[0])
    def _():
        token_of_row = (
            jax.lax.broadcasted_iota(jnp.int32, (_SUM_TOKENS, _SUM_ROWS), 0) + block * _SUM_TOKENS
        )
        sums = jnp.where(first, 0.0, total[...]) + _dot(
            (token_of_row == token[0]).astype(rows.dtype), rows[...]
        )
        total[...] = sums
        y[...] = sums.astype(y.dtype)
