"""Mosaic GPU kernels that apply an RMS norm to each head and multiply the result by silu(gate)
(sm_90a): one kernel for the forward pass and one for the backward pass.

A block of the grid has one warpgroup and computes one head of C = 64 tokens, in tiles of 64
channels.

B batch, T time, H heads of V channels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import delta_rule_tiles, kernel_call
from qwen3next_jax.kernels.gpu.delta_rule_tiles import (
    COLUMN,
    C,
    broadcast_over_columns,
    channel_slice,
    tile_memory,
    token_slice,
)
from qwen3next_jax.kernels.gpu.kernel_call import KernelCall, run_kernel
from qwen3next_jax.ops.gated_norm import gated_norm_in_xla

TOLERANCE = 0.02  # largest allowed relative L2 difference between the kernels and XLA


def unsupported_reason(o, gate, weight, eps: float) -> str:
    """Returns why the kernels cannot run o and gate [B, T, H · V] with a weight [V]; "" if they
    can.
    """
    width = weight.shape[0]
    if not o.dtype == gate.dtype == jnp.bfloat16:
        return f"has o and gate of {o.dtype} and {gate.dtype}: expected bfloat16"
    if o.shape[1] % C or width not in (64, 128, 256):
        return (
            f"has {o.shape[1]} tokens and heads of {width}: expected a multiple of {C}, "
            "and 64, 128 or 256"
        )
    return self_test.unsupported_chip_reason()


def is_default(o, gate, weight, eps: float) -> bool:
    """Returns whether a call that names no implementation runs the kernels. The call runs the
    kernels if they support the call and passed their test on this GPU. The function prints the
    decision once.
    """
    return self_test.kernels_run_by_default(
        make_self_test(eps, weight.shape[0]), unsupported_reason(o, gate, weight, eps)
    )


def make_self_test(eps: float, width: int) -> self_test.SelfTest:
    """Returns the test for calls with heads of `width` channels and with `eps` in the norm."""
    return self_test.SelfTest(
        "norm and gate",
        self_test.AVOID,
        (eps, width),
        (__name__, delta_rule_tiles.__name__, kernel_call.__name__),
        functools.partial(max_error, eps, width),
        TOLERANCE,
    )


def max_error(eps: float, width: int, interpret: bool = False) -> tuple[str, float]:
    """Runs the kernels and the XLA implementation on two blocks of tokens of two heads. Returns the
    name of the result in which the kernels and XLA differ most, and the relative L2 difference.
    """
    rng = np.random.default_rng(0)
    o, gate, dy = (
        jnp.asarray(rng.normal(size=(1, 2 * C, 2 * width)), jnp.bfloat16) for _ in range(3)
    )
    weight = jnp.asarray(rng.normal(size=width), jnp.float32)
    got = jax.jit(
        lambda: (
            forward(eps, o, gate, weight, interpret=interpret),
            *backward(eps, o, gate, weight, dy, interpret=interpret),
        )
    )

    @jax.jit
    def want():
        y, pullback = jax.vjp(functools.partial(gated_norm_in_xla, eps), o, gate, weight)
        return y, *pullback(dy)

    return self_test.largest_error(("y", "do", "dgate", "dweight"), got(), want())


def forward(eps, o, gate, weight, *, interpret: bool = False):
    """Returns y [B, T, H · V], the result of `ops.gated_norm`, in o's dtype."""
    return _call_kernel(_forward_kernel, eps, weight, (o, gate), [o], (), interpret)[0]


def backward(eps, o, gate, weight, dy, *, interpret: bool = False):
    """Returns the gradients of o, gate and weight, given dy [B, T, H · V], the gradient of y."""
    batch, time, d = o.shape
    sums = jax.ShapeDtypeStruct((batch, time // C, d), jnp.float32)
    do, dgate, sums = _call_kernel(
        _backward_kernel, eps, weight, (o, gate, dy), [o, gate], [sums], interpret
    )
    return do, dgate, jnp.sum(sums.reshape(-1, weight.shape[0]), axis=0).astype(weight.dtype)


def _call_kernel(body, eps, weight, inputs, like, sums, interpret):
    """Runs the kernel `body`. Returns the outputs of the kernel: first one output for each array in
    `like`, with the array's shape and dtype, then one output for each shape and dtype in `sums`.
    """
    batch, time, d = inputs[0].shape
    width = weight.shape[0]
    scratch = [tile_memory(width // C)] * len(inputs) + [plgpu.SMEM((width,), jnp.float32)]
    scratch.append(plgpu.Barrier(num_arrivals=len(inputs) * (width // C) + 1))
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    call = KernelCall(
        body=body,
        arguments=(eps, width),
        name=f"gated_norm{body.__name__.removesuffix('_kernel')}",
        grid=(("heads", d // width), ("tokens", time // C), ("batch", batch)),
        outputs=(*outputs, *sums),
        scratch=tuple(scratch),
        interpret=interpret,
    )
    return run_kernel(call, weight.astype(jnp.float32), *inputs)


class _HeadBlock:
    """The inputs of one block of the grid, in shared memory.

    Attributes:
      tiles: number of tiles of 64 channels of a head.
      weight: [V], the norm's weight.
      targets: the tiles [tiles, C, C] of each input: o, the gate and, in the backward pass, dy.
      at: function that takes the index of a tile of the head's channels and returns the tile's
        index in arrays [B, T, H · V].
      scale: [C, C], 1 / rms of the rows of o, repeated in all columns.
    """

    def __init__(self, eps, width, weight_gmem, sources, targets, weight_ref, arrived):
        self.tiles, self.weight, self.targets = width // C, weight_ref, targets
        b, t, h = (jax.lax.axis_index(name) for name in ("batch", "tokens", "heads"))
        self.at = lambda c: (b, token_slice(t), channel_slice(h * self.tiles + c))
        plgpu.copy_gmem_to_smem(weight_gmem, weight_ref, arrived)
        for source, target in zip(sources, targets):
            for c in range(self.tiles):
                plgpu.copy_gmem_to_smem(source.at[self.at(c)], target.at[c], arrived)
        plgpu.barrier_wait(arrived)
        squares = sum(jnp.sum(x * x, axis=1) for x in map(self.load_o_tile, range(self.tiles)))
        self.scale = broadcast_over_columns(jax.lax.rsqrt(squares / width + eps))

    def load_input_tile(self, i: int, c: int):
        """Returns tile c of input i, [C, C] in float32."""
        return plgpu.load(self.targets[i].at[c], layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    def load_o_tile(self, c: int):
        """Returns tile c of o, [C, C] in float32."""
        return self.load_input_tile(0, c)

    def load_weight_over_rows(self, c: int):
        """Returns a matrix [C, C]: column j holds the weight of channel j of tile c in all rows."""
        row = plgpu.load(self.weight.at[channel_slice(c)], layout=COLUMN)
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, (C, C), (1,)), plgpu.Layout.WGMMA)


class _ForwardRefs(NamedTuple):
    """The references of `_forward_kernel`: global memory, then shared memory."""

    weight_gmem: Any  # [V]
    o_gmem: Any  # [B, T, H · V]
    gate_gmem: Any  # [B, T, H · V]
    y_gmem: Any  # output [B, T, H · V]
    o_tiles: Any  # [tiles, C, C]; y overwrites it
    gate_tiles: Any  # [tiles, C, C]
    weight_smem: Any  # [V]
    inputs_arrived: Any  # barrier, passed when the inputs are in shared memory


def _forward_kernel(eps, width, *refs):
    """Computes y of a block."""
    refs = _ForwardRefs(*refs)
    block = _HeadBlock(
        eps,
        width,
        refs.weight_gmem,
        (refs.o_gmem, refs.gate_gmem),
        (refs.o_tiles, refs.gate_tiles),
        refs.weight_smem,
        refs.inputs_arrived,
    )
    for c in range(block.tiles):
        x = block.load_input_tile(1, c)
        refs.o_tiles[c] = (
            block.load_o_tile(c)
            * block.scale
            * block.load_weight_over_rows(c)
            * (x * jax.nn.sigmoid(x))
        ).astype(refs.o_tiles.dtype)
    plgpu.commit_smem()
    for c in range(block.tiles):
        plgpu.copy_smem_to_gmem(refs.o_tiles.at[c], refs.y_gmem.at[block.at(c)])
    plgpu.wait_smem_to_gmem(0)


class _BackwardRefs(NamedTuple):
    """The references of `_backward_kernel`: global memory, then shared memory."""

    weight_gmem: Any  # [V]
    o_gmem: Any  # [B, T, H · V]
    gate_gmem: Any  # [B, T, H · V]
    dy_gmem: Any  # [B, T, H · V]
    do_gmem: Any  # output [B, T, H · V]
    dgate_gmem: Any  # output [B, T, H · V]
    weight_gradient_sums_gmem: Any  # output, sums over the tokens of a block
    o_tiles: Any  # [tiles, C, C]
    gate_tiles: Any  # [tiles, C, C]; the gradient of the gate overwrites it
    dy_tiles: Any  # [tiles, C, C]; the gradient of o overwrites it
    weight_smem: Any  # [V]
    inputs_arrived: Any  # barrier, passed when the inputs are in shared memory


def _backward_kernel(eps, width, *refs):
    """Computes the gradients of o and of the gate, and for the gradient of the weight a sum over
    the tokens of the block.
    """
    refs = _BackwardRefs(*refs)
    block = _HeadBlock(
        eps,
        width,
        refs.weight_gmem,
        (refs.o_gmem, refs.gate_gmem, refs.dy_gmem),
        (refs.o_tiles, refs.gate_tiles, refs.dy_tiles),
        refs.weight_smem,
        refs.inputs_arrived,
    )
    b, t = (jax.lax.axis_index(name) for name in ("batch", "tokens"))

    def load_tile(c: int):
        """Returns o / rms, the gate, the sigmoid of the gate, and dy of tile c."""
        x = block.load_input_tile(1, c)
        return block.load_o_tile(c) * block.scale, x, jax.nn.sigmoid(x), block.load_input_tile(2, c)

    inner = 0.0
    for c in range(block.tiles):
        normed, x, sigmoid, d = load_tile(c)
        weighted = d * (x * sigmoid) * normed
        refs.weight_gradient_sums_gmem[b, t, block.at(c)[2]] = jnp.sum(weighted, axis=0)
        inner = inner + jnp.sum(weighted * block.load_weight_over_rows(c), axis=1)
    mean = broadcast_over_columns(inner / width)
    for c in range(block.tiles):
        normed, x, sigmoid, d = load_tile(c)
        d = d * block.load_weight_over_rows(c)
        refs.gate_tiles[c] = (d * normed * (sigmoid * (1 + x * (1 - sigmoid)))).astype(
            refs.gate_tiles.dtype
        )
        refs.dy_tiles[c] = (block.scale * (d * (x * sigmoid) - normed * mean)).astype(
            refs.dy_tiles.dtype
        )
    plgpu.commit_smem()
    for c in range(block.tiles):
        plgpu.copy_smem_to_gmem(refs.gate_tiles.at[c], refs.dgate_gmem.at[block.at(c)])
        plgpu.copy_smem_to_gmem(refs.dy_tiles.at[c], refs.do_gmem.at[block.at(c)])
    plgpu.wait_smem_to_gmem(0)
