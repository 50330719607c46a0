"""How one call of the TPU kernels is cut: heads and tokens of a grid step, layouts of the
arrays, blocks of the grid.

Value heads go in twos (`head_pairs.py`); an odd number of them is filled up with zeros.

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip, head_pairs
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.ops.delta_rule import chunk_math


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one call is cut: `block` value heads and `size` tokens a grid step, widths padded to
    whole lanes.

    The heads of a step are independent and hide each other's latency, so the largest block wins,
    up to 32, as long as each core of a chip has one; memory for what the compiler keeps of a
    head while the others go through the same stage sets the bound.
    """

    block: int
    share: int  # value heads a key head
    size: int
    key: int
    value: int
    key_bytes: int  # of a number in q and k
    value_bytes: int  # of one in v

    def __post_init__(self):
        if self.block % self.share != 0 or self.block % 2 != 0:
            raise ValueError(
                f"block of {self.block} value heads: expected an even multiple of the "
                f"{self.share} that share a key head"
            )
        if self.key % LANES != 0 or self.value % LANES != 0:
            raise ValueError(f"widths {self.key} and {self.value}: expected multiples of {LANES}")

    @property
    def vmem_bytes(self) -> int:
        """Of the backward kernel: double-buffered blocks and the intermediates of every head (8
        arrays of [C, K + V] float32 in the compiler's allocation for v6e, and as much again to
        be safe: the map's M, [K, K] float32, fits in that too).
        """
        keys, values = self.size * self.key, self.size * self.value
        state = self.key * self.value
        buffers = (
            4 * (self.key_bytes * keys + self.value_bytes * values)
            + (4 + self.value_bytes) * state
            + 4 * self.size**2
        )
        return self.block * (2 * buffers + 16 * 4 * (keys + values))

    @classmethod
    def choose(cls, value_heads: int, *, vmem: int, cores: int, **sizes):
        """The largest block that divides the heads, fits in `vmem` bytes and leaves no core idle
        if that can be.

        Raises NotImplementedError where not even one key head fits.
        """
        share = sizes["share"]
        blocks = [
            n for n in range(2, max(32, 2 * share) + 1, 2) if value_heads % n == n % share == 0
        ]
        fitting = [x for x in (cls(n, **sizes) for n in blocks) if x.vmem_bytes <= vmem]
        if not fitting:
            raise NotImplementedError(
                f"has head widths {sizes['key']} and {sizes['value']} with {share} value heads a "
                "key head: one block of the TPU kernel "
                f"needs more than {vmem} bytes of VMEM (95 % of the chip's, of "
                f"{chip.SMALLEST_VMEM} where none is known)"
            )
        return max(fitting, key=lambda x: (min(value_heads // x.block, cores), x.block))


def _pad(x, *axes_and_sizes):
    """Zeros after the entries of each axis, up to the size that follows it."""
    pads = [(0, 0)] * x.ndim
    for axis, size in zip(axes_and_sizes[::2], axes_and_sizes[1::2]):
        pads[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pads)


class Problem:
    """The sizes of one call, its arrays in the kernels' layouts, and the blocks the grid cuts
    from them.
    """

    def __init__(self, q, v, size: int):
        self.batch, self.time, self.key_heads, self.key_in = q.shape
        self.value_heads, self.value_in = v.shape[2:]
        self.operand = v.dtype
        self.share, self.heads_in = self.value_heads // self.key_heads, self.value_heads
        if self.value_heads % 2 == 1:  # heads go in twos: one key head of zeros more
            self.key_heads, self.value_heads = self.key_heads + 1, self.value_heads + self.share
        self.key, self.value = (-(-x // LANES) * LANES for x in (self.key_in, self.value_in))
        self.size, self.chunks = size, -(-self.time // size)
        cores = chip.cores()
        cores = 1 if self.batch % cores == 0 else cores  # rows of the batch go to the cores first
        tiling = Tiling.choose(
            self.value_heads,
            vmem=int(chip.vmem_budget()),
            cores=cores,
            share=self.share,
            size=size,
            key=self.key,
            value=self.value,
            key_bytes=q.dtype.itemsize,
            value_bytes=v.dtype.itemsize,
        )
        self.block, self.key_block = tiling.block, tiling.block // self.share
        self.grid = (self.batch, self.value_heads // self.block, self.chunks)
        self.state_shape = (self.batch, self.value_heads, self.key, self.value)
        self.inverses_shape = jax.ShapeDtypeStruct(
            (self.chunks, self.batch, self.value_heads // 2, size, 2 * size), jnp.float32
        )
        self.compiler_params = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes(),
        )

    def call(
        self,
        kernel,
        inputs: dict,
        shapes: dict,
        forward: bool,
        normalize: bool,
        erase: bool,
        interpret: bool,
    ) -> dict:
        """`kernel` over the grid: named inputs in, named outputs out."""
        spec = self.specs(forward)
        call = pl.pallas_call(
            functools.partial(kernel, self, list(inputs), list(shapes), normalize, erase),
            grid=self.grid,
            out_shape=list(shapes.values()),
            in_specs=[spec[n] for n in inputs],
            out_specs=[spec[n] for n in shapes],
            interpret=interpret,
            name=f"gated_delta_rule{kernel.__name__.removesuffix('_kernel')}",
            compiler_params=self.compiler_params,
        )
        with jax.enable_x64(False):  # the TPU's compiler aborts the process at a 64-bit index
            out = call(*inputs.values())
        return dict(zip(shapes, out))

    # layouts

    def flat(self, heads: int, width: int, dtype):
        return jax.ShapeDtypeStruct((self.batch, self.chunks * self.size, heads * width), dtype)

    def flatten(self, x, heads: int):
        """[B, T, heads, width] to [B, N C, heads * padded width]: a head is then a slice of
        whole lanes.
        """
        width = -(-x.shape[-1] // LANES) * LANES
        x = _pad(x, 1, self.chunks * self.size, 2, heads, 3, width)
        return x.reshape(*x.shape[:2], -1)

    def unflatten(self, x, shape):
        """The reverse, for an array of `shape`."""
        x = x.reshape(*x.shape[:2], -1, -(-shape[-1] // LANES) * LANES)
        return x[:, : self.time, : shape[2], : shape[3]]

    def pad_state(self, x):
        return _pad(x, -3, self.value_heads, -2, self.key, -1, self.value)

    def cut_state(self, x):
        return x[..., : self.heads_in, : self.key_in, : self.value_in]

    def pad_pairs(self, x):
        return _pad(x, 2, self.value_heads // 2)

    def cut_pairs(self, x):
        return x[:, :, : (self.heads_in + 1) // 2]

    def rows(self, x):
        """[B, T, H] to [B, N, blocks, pairs of a block, 2C]: two heads a row."""
        x = _pad(x, 1, self.chunks * self.size, 2, self.value_heads)
        x = jnp.swapaxes(x.reshape(self.batch, self.chunks, self.size, -1), 2, 3)
        return x.reshape(self.batch, self.chunks, -1, self.block // 2, 2 * self.size)

    def unchunk(self, x):
        """The reverse of `rows`."""
        x = x.reshape(self.batch, self.chunks, self.value_heads, self.size)
        return jnp.swapaxes(x, 2, 3).reshape(self.batch, -1, self.value_heads)[
            :, : self.time, : self.heads_in
        ]

    def inputs(self, q, k, v, g, beta, segments) -> dict:
        arrays = dict(
            q=self.flatten(q, self.key_heads),
            k=self.flatten(k, self.key_heads),
            v=self.flatten(v, self.value_heads),
            total=head_pairs.sums(self.rows(g.astype(jnp.float32)), jnp.less_equal),
            beta=self.rows(beta.astype(jnp.float32)),
        )
        if segments is not None:
            signed = jnp.pad(
                segments, ((0, 0), (0, self.chunks * self.size - self.time)), mode="edge"
            )
            signed = signed.reshape(self.batch, self.chunks, self.size)
            index = jnp.swapaxes(
                chunk_math.document_index(jnp.swapaxes(signed, 0, 1)), 0, 1
            ).astype(jnp.float32)
            # padding rows keep their document, negated
            index = jnp.where(signed > 0, index, -1 - index)
            arrays["documents"] = jnp.concatenate([index, index], axis=-1)[:, :, None]
        return arrays

    def specs(self, forward: bool) -> dict:
        """Block specifications by name; the backward grid walks the chunks from the last to the
        first.
        """
        n = (lambda i: i) if forward else (lambda i: self.chunks - 1 - i)
        flat = lambda width: pl.BlockSpec((1, self.size, width), lambda b, h, i: (b, n(i), h))
        rows = pl.BlockSpec(
            (1, 1, 1, self.block // 2, 2 * self.size), lambda b, h, i: (b, n(i), h, 0, 0)
        )
        state = pl.BlockSpec((1, self.block, self.key, self.value), lambda b, h, i: (b, h, 0, 0))
        per_chunk = lambda *shape: pl.BlockSpec(
            (1, 1, self.block, *shape), lambda b, h, i: (n(i), b, h, 0, 0)
        )
        keys, values = flat(self.key_block * self.key), flat(self.block * self.value)
        return dict(
            q=keys,
            k=keys,
            v=values,
            do=values,
            o=values,
            dq=keys,
            dk=keys,
            dv=values,
            total=rows,
            beta=rows,
            dg=rows,
            dbeta=rows,
            documents=pl.BlockSpec((1, 1, 1, 2 * self.size), lambda b, h, i: (b, n(i), 0, 0)),
            initial_state=pl.BlockSpec(memory_space=pl.ANY),
            final=state,
            dfinal=pl.BlockSpec(memory_space=pl.ANY),
            dinitial=state,
            states=per_chunk(self.key, self.value),
            inverses=pl.BlockSpec(
                (1, 1, self.block // 2, self.size, 2 * self.size),
                lambda b, h, i: (n(i), b, h, 0, 0),
            ),
            reads=per_chunk(self.size, self.key),
            m=pl.BlockSpec((1, self.block, self.key, self.key), lambda b, h, i: (b, h, 0, 0)),
        )
