"""What the bodies of the Mosaic GPU kernels for Hopper (sm_90a) are made of: tiles, sums of
products, rows of numbers.

Every matrix is cut into tiles of 64 x 64, the height of a wgmma: rows of a chunk by channels,
channels by channels. bfloat16 tiles lie in shared memory, swizzled as wgmma reads them; what is
summed, decayed or inverted is float32 in registers. Where sums cancel, a float32 operand goes in
two bfloat16 parts (`high_and_low`).

The algebra is that of docs/delta_rule.md, "In terms of E"; i is the row, j the column of a [C,
C] matrix.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

C = 64  # tokens of a chunk, and the side of every tile
# Rows of numbers by token: those that a chunk brings (`pallas_gpu.Problem.rows`), and those that
# the chunk kernel makes, norms and decays times norms. What is needed along i and along j lies
# there twice: one place in shared memory is read in one layout.
TOTAL, DOCUMENT, BETA, GAMMA, RHO, TOTAL_J, DOCUMENT_J, BETA_J = range(8)
K_GAMMA, Q_GAMMA, K_RHO, K_NORM, Q_NORM, K_NORM_J = range(6)
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def tiles(*count, height: int = C, width: int = C, columns: int = C):
    """Shared memory for so many bfloat16 tiles, of which products take so many columns at a
    time.
    """
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM((*count, height, width), jnp.bfloat16, transforms=transforms)


def rows(*count):
    return plgpu.SMEM((*count, C), jnp.float32)


class Sum:
    """[C, columns] float32, to which products are added by and by; a left operand may lie in
    registers.
    """

    def __init__(self, ref):
        self.ref = ref

    def start(self, x):
        self.ref[...] = x

    def add(self, a, b):
        plgpu.wgmma(self.ref, a, b)

    def __call__(self, in_flight: int = 0):
        """Its value, once no more than so many products, the last ones, are not done. The
        barrier keeps the compiler from taking a step with the registers, a change of sign, ahead
        of that wait: docs/gpu.md.
        """
        x = jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight))
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


class InterpretedSum:
    """The same where a CPU interprets: its wgmma takes no registers, and its sums start from
    zero.
    """

    def __init__(self):
        self.value = 0.0

    def start(self, x):
        self.value = x

    def add(self, a, b):
        a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
        self.value = self.value + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def __call__(self, in_flight: int = 0):
        return self.value


def with_sums(p, widths, body):
    """What `body` returns, given a sum of every width."""
    if p.interpret:
        return body(*(InterpretedSum() for _ in widths))
    return pl.run_scoped(
        lambda *refs: body(*map(Sum, refs)), *[plgpu.ACC((C, width)) for width in widths]
    )


def products(*sums):
    """[C, columns] float32 each: for every list of pairs the sum of a @ b."""

    def accumulate(*sum_refs):
        for sum_ref, pairs in zip(sum_refs, sums):
            for a, b in pairs:
                plgpu.wgmma(sum_ref, a, b)
        return [Sum(sum_ref)() for sum_ref in sum_refs]

    return pl.run_scoped(accumulate, *[plgpu.ACC((C, pairs[0][1].shape[1])) for pairs in sums])


def product(*pairs):
    """[C, C] float32: the sum of a @ b."""
    return products(pairs)[0]


def transposed(tile):
    return tile.transpose((1, 0))


def high_and_low(x):
    """A float32 array as two bfloat16 ones: its high part and what that leaves. Rounded by the
    bits, since a conversion of one number at a time is slow.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) + 0x8000 & -65536
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def put(tile_refs, *arrays):
    """Arrays into tiles, for wgmma and copies to read."""
    for i, x in enumerate(arrays):
        tile_refs[i] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


PARTS = (0, 0), (1, 0), (0, 1)  # of two operands in halves: all but low with low


def down(ref, row: int):
    """[C, C] a row of numbers by token, along i."""
    return plgpu.layout_cast(
        jax.lax.broadcast_in_dim(plgpu.load(ref.at[row], layout=ROW), (C, C), (0,)),
        plgpu.Layout.WGMMA,
    )


def across(ref, row: int):
    """[C, C] the same along j."""
    return plgpu.layout_cast(
        jax.lax.broadcast_in_dim(plgpu.load(ref.at[row], layout=COLUMN), (C, C), (1,)),
        plgpu.Layout.WGMMA,
    )


def same_document(rows_ref):
    """[C, C] whether two tokens are of one; symmetric."""
    document = [
        jnp.where(x >= 0, x, -1 - x)
        for x in (down(rows_ref, DOCUMENT), across(rows_ref, DOCUMENT_J))
    ]
    return document[0] == document[1]


def indices():
    return tuple(
        plgpu.broadcasted_iota(jnp.int32, (C, C), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )


def channels(i: int):
    return pl.ds(i * C, C)


def tokens(n):
    return pl.ds(n * C, C)
