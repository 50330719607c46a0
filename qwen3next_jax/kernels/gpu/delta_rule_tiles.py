"""Parts that the gated delta rule's Mosaic GPU kernels (sm_90a) share: tiles, accumulators, and
rows that hold one number for each token.

Every matrix is split into tiles of 64 x 64, because a wgmma instruction (the matrix product of a
warpgroup) computes 64 rows. bfloat16 tiles lie in shared memory, swizzled in the order in which
wgmma reads them. float32 sums of products are in registers. Where the terms of a sum may cancel,
the kernels split a float32 operand into two bfloat16 parts (`high_and_low`).

The formulas are in docs/delta_rule.md, "In terms of E". A matrix [C, C] has rows i and
columns j.

C = 64 tokens of a chunk.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

C = 64  # tokens of a chunk, and the side of every tile
# The indices of rows [C] that hold one number for each token. The first line lists the 8 gate rows,
# which `Problem.gate_rows_of_chunks` computes from the inputs: the running sum of g, the document's
# index in the chunk (-1 - index for padding), beta, and the decays gamma and rho. The second line
# lists the 6 norm rows, which `delta_rule_chunks` computes: the inverse L2 norms of k and q, and
# decays times these norms. If a matrix is scaled both along its rows i and along its columns j by
# the same numbers, they are stored twice (the name of the second copy ends in _J), because each
# place in shared memory is read in one layout only.
TOTAL, DOCUMENT, BETA, GAMMA, RHO, TOTAL_J, DOCUMENT_J, BETA_J = range(8)
K_GAMMA, Q_GAMMA, K_RHO, K_NORM, Q_NORM, K_NORM_J = range(6)
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def named_refs(kind, refs, missing: str = ""):
    """Returns the references `refs` of a kernel as a NamedTuple of the class `kind`. If `missing`
    is the name of a field, `refs` has no reference for it, and the field gets None.
    """
    names = [name for name in kind._fields if name != missing]
    values = dict(zip(names, refs, strict=True))
    if missing:
        values[missing] = None
    return kind(**values)


def tile_memory(*count, height: int = C, width: int = C, columns: int = C):
    """Returns shared memory for bfloat16 tiles, [*count, height, width].

    Args:
      count: the sizes of the axes before a tile's own two axes.
      height: number of rows of a tile.
      width: number of columns of a tile, a multiple of `columns`.
      columns: number of columns that are swizzled together.
    """
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM((*count, height, width), jnp.bfloat16, transforms=transforms)


def row_memory(*count):
    """Returns shared memory [*count, C] for rows of C float32 numbers."""
    return plgpu.SMEM((*count, C), jnp.float32)


class Accumulator:
    """A sum of matrix products, [C, columns] float32 in registers. The left operand of a product
    may be in registers or in shared memory; the right operand is in shared memory. The products run
    asynchronously until `wait_and_read` waits for them.
    """

    def __init__(self, ref):
        self.ref = ref

    def set_sum(self, x):
        """Sets the sum to x [C, columns]."""
        self.ref[...] = x

    def add_product(self, a, b):
        """Starts to add the product a @ b to the sum."""
        plgpu.wgmma(self.ref, a, b)

    def wait_and_read(self, in_flight: int = 0):
        """Waits for all products except the last `in_flight` ones, then returns the sum.

        Without the optimization barrier in this function, the compiler moves an operation on the
        sum (a change of sign) to a place before the wait (docs/notes/gpu.md).
        """
        x = jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight))
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


class InterpretedAccumulator:
    """An `Accumulator` for the interpreter on a CPU. The interpreter's wgmma takes no operand from
    registers, and its sums always start from zero.
    """

    def __init__(self):
        self.value = 0.0

    def set_sum(self, x):
        self.value = x

    def add_product(self, a, b):
        a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
        self.value = self.value + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def wait_and_read(self, in_flight: int = 0):
        return self.value


def with_accumulators(p, widths, body):
    """Calls `body` with one accumulator [C, width] for every width in `widths` and returns the
    result of `body`. `p` is the `Problem`.
    """
    if p.interpret:
        return body(*(InterpretedAccumulator() for _ in widths))
    return pl.run_scoped(
        lambda *refs: body(*map(Accumulator, refs)), *[plgpu.ACC((C, width)) for width in widths]
    )


def sums_of_products(*sums):
    """Returns a list with one sum of matrix products, [C, columns] in float32, for each argument.
    An argument is a list of pairs (a, b), and its sum is the sum of a @ b over the pairs.
    """

    def accumulate(*sum_refs):
        for sum_ref, pairs in zip(sum_refs, sums):
            for a, b in pairs:
                plgpu.wgmma(sum_ref, a, b)
        return [Accumulator(sum_ref).wait_and_read() for sum_ref in sum_refs]

    return pl.run_scoped(accumulate, *[plgpu.ACC((C, pairs[0][1].shape[1])) for pairs in sums])


def sum_of_products(*pairs):
    """Returns the sum of a @ b over the pairs (a, b), [C, columns] in float32."""
    return sums_of_products(pairs)[0]


def transposed_ref(tile):
    """Returns a reference to the transpose of a tile in shared memory."""
    return tile.transpose((1, 0))


def high_and_low(x):
    """Splits a float32 array into two bfloat16 arrays: the rounded array and the rounded remainder.
    The code rounds by integer operations on the bits, because the compiler's conversion to bfloat16
    converts one number at a time, which is slow.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) + 0x8000 & -65536
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def store_tiles(tile_refs, *arrays):
    """Stores arrays in tiles of shared memory; wgmma and asynchronous copies can then read them."""
    for i, x in enumerate(arrays):
        tile_refs[i] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


# The pairs of parts (0 high, 1 low) of two operands that are multiplied: all pairs except (low,
# low).
PART_PAIRS = (0, 0), (1, 0), (0, 1)


def broadcast_over_columns(x_C):
    """Returns a matrix [C, C]: row i holds x[i] in all columns."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_C, (C, C), (0,)), plgpu.Layout.WGMMA)


def load_over_columns(ref, row: int):
    """Returns a matrix [C, C]: row i holds ref[row, i] in all columns."""
    return broadcast_over_columns(plgpu.load(ref.at[row], layout=ROW))


def load_over_rows(ref, row: int):
    """Returns a matrix [C, C]: column j holds ref[row, j] in all rows."""
    return plgpu.layout_cast(
        jax.lax.broadcast_in_dim(plgpu.load(ref.at[row], layout=COLUMN), (C, C), (1,)),
        plgpu.Layout.WGMMA,
    )


def same_document_mask(gate_rows_ref):
    """Returns booleans [C, C]: whether tokens i and j belong to one document."""
    document = [
        jnp.where(x >= 0, x, -1 - x)
        for x in (
            load_over_columns(gate_rows_ref, DOCUMENT),
            load_over_rows(gate_rows_ref, DOCUMENT_J),
        )
    ]
    return document[0] == document[1]


def row_and_column_indices():
    """Returns two arrays [C, C]: the row index i and the column index j."""
    return tuple(
        plgpu.broadcasted_iota(jnp.int32, (C, C), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )


def channel_slice(i: int):
    """Returns the slice of the channels from 64 i to 64 i + 63."""
    return pl.ds(i * C, C)


def token_slice(n):
    """Returns the slice of the tokens of chunk n."""
    return pl.ds(n * C, C)
