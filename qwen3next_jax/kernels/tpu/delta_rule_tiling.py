"""Defines how the gated delta rule's TPU kernels divide a call over their grid: the heads of a grid
step, the layouts of the arrays, and the blocks.

The kernels take value heads in pairs (`head_pairs.py`). If the number of value heads is odd, heads
of zeros are added.

B batch, T time, N chunks, C chunk length, G key heads, H value heads, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip, head_pairs
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.pallas_call import pallas_call
from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of one grid step, which computes one chunk of `block_value_heads` value heads.

    The heads of a grid step are independent, so the work of one head hides the latency of another
    head. Up to 32 heads, larger blocks are faster, as long as each core of the chip has a block.
    VMEM limits the size, because the compiler keeps intermediate arrays of all heads of a block.

    Raises:
      ValueError: `block_value_heads` is odd or no multiple of `heads_per_key`, or a width is no
        multiple of LANES.
    """

    block_value_heads: int  # the value heads of a block
    heads_per_key: int  # the value heads of a key head
    chunk_size: int  # C
    key_width: int  # K, padded to a multiple of LANES
    value_width: int  # V, padded to a multiple of LANES
    qk_itemsize: int  # the bytes of a number in q and k
    v_itemsize: int  # the bytes of a number in v

    def __post_init__(self):
        if self.block_value_heads % self.heads_per_key != 0 or self.block_value_heads % 2 != 0:
            raise ValueError(
                f"block of {self.block_value_heads} value heads: expected an even multiple of the "
                f"{self.heads_per_key} that share a key head"
            )
        if self.key_width % LANES != 0 or self.value_width % LANES != 0:
            raise ValueError(
                f"widths {self.key_width} and {self.value_width}: expected multiples of {LANES}"
            )

    @property
    def needed_vmem_bytes(self) -> int:
        """The bytes of VMEM that the backward kernel needs for double-buffered blocks and for the
        intermediate arrays of every head. For a v6e the compiler allocates 8 arrays [C, K + V] in
        float32 per head. To be safe, this property counts 16 arrays [C, K + V] per head, which is
        also enough for the matrix M [K, K] of an affine map in float32.
        """
        keys, values = self.chunk_size * self.key_width, self.chunk_size * self.value_width
        state = self.key_width * self.value_width
        buffers = (
            4 * (self.qk_itemsize * keys + self.v_itemsize * values)
            + (4 + self.v_itemsize) * state
            + 4 * self.chunk_size**2
        )
        return self.block_value_heads * (2 * buffers + 16 * 4 * (keys + values))

    @classmethod
    def choose(cls, value_heads: int, *, vmem: int, cores: int, **sizes):
        """Returns the tiling with the largest block that divides the heads, fits in VMEM and, if
        possible, leaves no core idle. A block has at most 32 value heads; but if two key heads
        together have more than 32 value heads, a block may have all value heads of two key heads.

        Args:
          value_heads: number of value heads of the call.
          vmem: bytes of VMEM that the kernel may use.
          cores: number of cores that divide the blocks among them.
          sizes: the fields of `Tiling` other than `block_value_heads`.

        Raises:
          NotImplementedError: the smallest block does not fit in VMEM.
        """
        per_key = sizes["heads_per_key"]
        blocks = [
            n for n in range(2, max(32, 2 * per_key) + 1, 2) if value_heads % n == n % per_key == 0
        ]
        fitting = [x for x in (cls(n, **sizes) for n in blocks) if x.needed_vmem_bytes <= vmem]
        if not fitting:
            raise NotImplementedError(
                f"has head widths {sizes['key_width']} and {sizes['value_width']} with {per_key} "
                "value heads a key head: one block of the TPU kernel "
                f"needs more than {vmem} bytes of VMEM (95 % of the chip's; of an unknown chip "
                f"95 % of {chip.SMALLEST_VMEM})"
            )
        return max(
            fitting,
            key=lambda x: (min(value_heads // x.block_value_heads, cores), x.block_value_heads),
        )


def _pad_axes(x, sizes: dict[int, int]):
    """Returns x padded with zeros at the end of every axis in `sizes` (axis: size) to that size."""
    pads = [(0, 0)] * x.ndim
    for axis, size in sizes.items():
        pads[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pads)


class Problem:
    """The sizes of one call, its arrays in the kernels' layouts, and the blocks of the grid.

    The attributes for heads and widths (`key_heads`, `value_heads`, `key_width`, `value_width`)
    describe the padded arrays. The attributes named `unpadded_…` describe the caller's arrays.
    `operand_dtype` is the dtype of the operands of matrix products.

    Raises:
      NotImplementedError: no block of heads fits in the chip's VMEM.
    """

    def __init__(self, q, v, chunk_size: int):
        self.batch, self.time, self.key_heads, self.unpadded_key_width = q.shape
        self.value_heads, self.unpadded_value_width = v.shape[2:]
        self.operand_dtype = v.dtype
        self.unpadded_value_heads = self.value_heads
        self.heads_per_key = self.value_heads // self.key_heads
        if self.value_heads % 2 == 1:  # the kernels compute pairs, so add a key head of zeros
            self.key_heads += 1
            self.value_heads += self.heads_per_key
        self.key_width, self.value_width = (
            -(-width // LANES) * LANES
            for width in (self.unpadded_key_width, self.unpadded_value_width)
        )
        self.chunk_size, self.chunks = chunk_size, -(-self.time // chunk_size)
        cores = chip.core_count()
        # If the cores can share the batch evenly, one block of heads is enough to keep all cores
        # busy.
        cores = 1 if self.batch % cores == 0 else cores
        tiling = Tiling.choose(
            self.value_heads,
            vmem=int(chip.vmem_budget_bytes()),
            cores=cores,
            heads_per_key=self.heads_per_key,
            chunk_size=chunk_size,
            key_width=self.key_width,
            value_width=self.value_width,
            qk_itemsize=q.dtype.itemsize,
            v_itemsize=v.dtype.itemsize,
        )
        self.block_value_heads = tiling.block_value_heads
        self.block_key_heads = tiling.block_value_heads // self.heads_per_key
        self.grid = (self.batch, self.value_heads // self.block_value_heads, self.chunks)
        self.state_shape = (self.batch, self.value_heads, self.key_width, self.value_width)
        self.inverses_shape = jax.ShapeDtypeStruct(
            (self.chunks, self.batch, self.value_heads // 2, chunk_size, 2 * chunk_size),
            jnp.float32,
        )
        rows = (
            self.value_heads // self.block_value_heads,
            self.block_value_heads // 2,
            2 * chunk_size,
        )
        self.rows_shape = jax.ShapeDtypeStruct((self.batch, self.chunks, *rows), jnp.float32)
        self.compiler_params = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes(),
        )

    def call_kernel(
        self,
        kernel,
        inputs: dict,
        outputs: dict,
        settings: Settings,
        backward: bool,
        interpret: bool,
    ) -> dict:
        """Runs `kernel` over the grid (rows of the batch, blocks of heads, chunks).

        Args:
          kernel: function of this problem, the names of inputs, the names of outputs, the settings,
            and the Pallas references of inputs and outputs.
          inputs: the input arrays by name. `block_specs` lists the possible names.
          outputs: the shapes and dtypes of outputs by name, also from `block_specs`.
          settings: the static settings of the call.
          backward: whether the grid goes from the last chunk to the first.
          interpret: whether a CPU interprets the kernel.

        Returns:
          The outputs by name.
        """
        specs = self.block_specs(backward)
        results = pallas_call(
            functools.partial(kernel, self, list(inputs), list(outputs), settings),
            grid=self.grid,
            out_shape=list(outputs.values()),
            in_specs=[specs[name] for name in inputs],
            out_specs=[specs[name] for name in outputs],
            interpret=interpret,
            name=f"gated_delta_rule{kernel.__name__.removesuffix('_kernel')}",
            compiler_params=self.compiler_params,
        )(*inputs.values())
        return dict(zip(outputs, results))

    # layouts

    def flattened_shape_struct(self, heads: int, width: int, dtype):
        """Returns the shape and dtype of an array that `flatten_heads` returns."""
        shape = self.batch, self.chunks * self.chunk_size, heads * width
        return jax.ShapeDtypeStruct(shape, dtype)

    def flatten_heads(self, x, heads: int):
        """Rearranges [B, T, heads of the call, width] into [B, N C, heads * padded width]. Pads
        with zeros the tokens to N C, the heads to `heads`, and the channels of a head to a multiple
        of LANES.
        """
        width = -(-x.shape[-1] // LANES) * LANES
        x = _pad_axes(x, {1: self.chunks * self.chunk_size, 2: heads, 3: width})
        return x.reshape(*x.shape[:2], -1)

    def unflatten_heads(self, x, shape):
        """The reverse of `flatten_heads`, for an array of `shape` [B, T, heads, width]."""
        x = x.reshape(*x.shape[:2], -1, -(-shape[-1] // LANES) * LANES)
        return x[:, : self.time, : shape[2], : shape[3]]

    def pad_state(self, x):
        """Pads states [..., H, K, V] to the padded heads and widths."""
        return _pad_axes(x, {-3: self.value_heads, -2: self.key_width, -1: self.value_width})

    def unpad_state(self, x):
        """The reverse of `pad_state`."""
        return x[
            ..., : self.unpadded_value_heads, : self.unpadded_key_width, : self.unpadded_value_width
        ]

    def pad_inverses(self, x):
        """Pads inverses [N, B, ⌈H / 2⌉, C, 2C] to the padded heads."""
        return _pad_axes(x, {2: self.value_heads // 2})

    def unpad_inverses(self, x):
        """The reverse of `pad_inverses`."""
        return x[:, :, : (self.unpadded_value_heads + 1) // 2]

    def to_pair_rows(self, x):
        """Rearranges [B, T, H] into [B, N, blocks, pairs of a block, 2C]. A row of 2C numbers has
        the first head of a pair, then the second head.
        """
        x = _pad_axes(x, {1: self.chunks * self.chunk_size, 2: self.value_heads})
        x = jnp.swapaxes(x.reshape(self.batch, self.chunks, self.chunk_size, -1), 2, 3)
        return x.reshape(
            self.batch, self.chunks, -1, self.block_value_heads // 2, 2 * self.chunk_size
        )

    def from_pair_rows(self, x):
        """The reverse of `to_pair_rows`."""
        x = x.reshape(self.batch, self.chunks, self.value_heads, self.chunk_size)
        x = jnp.swapaxes(x, 2, 3).reshape(self.batch, -1, self.value_heads)
        return x[:, : self.time, : self.unpadded_value_heads]

    def common_kernel_inputs(self, x: Inputs) -> dict:
        """Returns the arrays that every kernel takes, by name, in the kernels' layouts: q, k, v,
        beta, `total` (the running sum of g inside each chunk) and, if x has segments, `documents`
        [B, N, 1, 2C] (the index of each row's document in its chunk, twice, once for each head of a
        pair).
        """
        q, k, v, g, beta, segments = x
        arrays = dict(
            q=self.flatten_heads(q, self.key_heads),
            k=self.flatten_heads(k, self.key_heads),
            v=self.flatten_heads(v, self.value_heads),
            total=head_pairs.sum_columns_where(
                self.to_pair_rows(g.astype(jnp.float32)), jnp.less_equal
            ),
            beta=self.to_pair_rows(beta.astype(jnp.float32)),
        )
        if segments is not None:
            signed = jnp.pad(
                segments, ((0, 0), (0, self.chunks * self.chunk_size - self.time)), mode="edge"
            )
            signed = signed.reshape(self.batch, self.chunks, self.chunk_size)
            index = jnp.swapaxes(
                chunk_math.document_index_in_chunk(jnp.swapaxes(signed, 0, 1)), 0, 1
            ).astype(jnp.float32)
            # A padding row whose document has the index i gets -1 - i instead.
            index = jnp.where(signed > 0, index, -1 - index)
            arrays["documents"] = jnp.concatenate([index, index], axis=-1)[:, :, None]
        return arrays

    def block_specs(self, backward: bool) -> dict:
        """Returns the block specification of every input and output, by name."""

        def n(i):
            """The chunk of grid step i."""
            return self.chunks - 1 - i if backward else i

        size, heads = self.chunk_size, self.block_value_heads
        flat = lambda width: pl.BlockSpec((1, size, width), lambda b, h, i: (b, n(i), h))
        rows = pl.BlockSpec((1, 1, 1, heads // 2, 2 * size), lambda b, h, i: (b, n(i), h, 0, 0))
        state = pl.BlockSpec(
            (1, heads, self.key_width, self.value_width), lambda b, h, i: (b, h, 0, 0)
        )
        per_chunk = lambda *shape: pl.BlockSpec((1, 1, *shape), lambda b, h, i: (n(i), b, h, 0, 0))
        keys, values = flat(self.block_key_heads * self.key_width), flat(heads * self.value_width)
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
            documents=pl.BlockSpec((1, 1, 1, 2 * size), lambda b, h, i: (b, n(i), 0, 0)),
            initial_state=pl.BlockSpec(memory_space=pl.ANY),
            final=state,
            dfinal=pl.BlockSpec(memory_space=pl.ANY),
            dinitial=state,
            states=per_chunk(heads, self.key_width, self.value_width),
            inverses=per_chunk(heads // 2, size, 2 * size),
            reads=per_chunk(heads, size, self.key_width),
            m=pl.BlockSpec(
                (1, heads, self.key_width, self.key_width), lambda b, h, i: (b, h, 0, 0)
            ),
        )
