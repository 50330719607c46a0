"""RMS norm of each head times a SiLU gate, in one pass over memory each way where a TPU or a
Hopper GPU is compiled for.

B batch, T time in blocks of R rows, C = H · V channels of H heads, in blocks of whole heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.ops.pallas_causal_conv1d import block_sizes, columns
from qwen3next_jax.ops.tpu import tpu

_LANES = 128
_BLOCK = 256, 1024  # rows and channels, at most


def gated_norm(o, gate, weight, eps: float):
    """o / rms(o of its head) · weight · silu(gate) in o's dtype, computed in float32.

    Args:
      o, gate: [B, T, H · V]. weight: [V].
    """
    return _operator(eps, o, gate, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operator(eps, o, gate, weight):
    return jax.lax.platform_dependent(
        o,
        gate,
        weight,
        **{"default": functools.partial(whole, eps)} | kernels("forward", eps, o, weight),
    )


def _backward(eps, inputs, dy):
    def products(o, gate, weight, dy):
        return jax.vjp(functools.partial(whole, eps), o, gate, weight)[1](dy)

    return jax.lax.platform_dependent(
        *inputs, dy, **{"default": products} | kernels("backward", eps, inputs[0], inputs[2])
    )


_operator.defvjp(lambda eps, *inputs: (_operator(eps, *inputs), inputs), _backward)


def whole(eps, o, gate, weight):
    wide = jnp.promote_types(jnp.float32, o.dtype)
    heads = o.astype(wide).reshape(*o.shape[:2], -1, weight.shape[0])
    normed = (
        heads
        * jax.lax.rsqrt(jnp.mean(jnp.square(heads), axis=-1, keepdims=True) + eps)
        * weight.astype(wide)
    )
    return (normed.reshape(o.shape) * jax.nn.silu(gate.astype(wide))).astype(o.dtype)


def kernels(name: str, eps: float, o, weight) -> dict:
    """{"tpu": `forward` or `backward`} where it takes such inputs on the chip compiled for, on a
    GPU that of `pallas_gpu_gated_norm.py` where it may; else nothing.
    """
    if jax.default_backend() == "gpu":
        from qwen3next_jax.ops import pallas_gpu_gated_norm  # which imports this

        return pallas_gpu_gated_norm.platforms(name, eps, o, weight)
    fits = (
        tpu()
        and o.dtype in (jnp.bfloat16, jnp.float32)
        and weight.shape == (_LANES,)
        and o.shape[1] % 16 == 0
    )
    return {"tpu": functools.partial(globals()[name], eps)} if fits else {}


def forward(eps, o, gate, weight, *, interpret: bool = False):
    return _call(
        functools.partial(_forward_kernel, eps), o, (o, gate), weight, (o.dtype,), interpret
    )[0]


def backward(eps, o, gate, weight, dy, *, interpret: bool = False):
    """Gradients of o, gate and weight."""
    body = functools.partial(_backward_kernel, eps)
    do, dgate, dweight = _call(
        body, o, (o, gate, dy), weight, (o.dtype, gate.dtype), interpret, sums=True
    )
    return do, dgate, jnp.sum(dweight, axis=0).astype(weight.dtype)


def _call(body, like, inputs, weight, dtypes, interpret, sums=False):
    batch, time, d = like.shape
    rows, channels = block_sizes(time, d, _BLOCK)
    block = pl.BlockSpec((1, rows, channels), lambda c, b, t: (b, t, c))
    outputs, specs = (
        [jax.ShapeDtypeStruct(like.shape, dtype) for dtype in dtypes],
        [block] * len(dtypes),
    )
    if sums:  # of each block of channels
        outputs.append(jax.ShapeDtypeStruct((8 * (d // channels), _LANES), jnp.float32))
        specs.append(pl.BlockSpec((8, _LANES), lambda c, b, t: (c, 0)))
    copied = (len(inputs) + len(dtypes)) * like.size * like.dtype.itemsize
    return pl.pallas_call(
        body,
        grid=(d // channels, batch, time // rows),
        in_specs=[pl.BlockSpec((1, _LANES), lambda c, b, t: (0, 0))] + [block] * len(inputs),
        out_specs=specs,
        out_shape=outputs,
        interpret=interpret,
        name="gated_norm" + body.func.__name__.removesuffix("_kernel"),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=copied),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
    )(weight.astype(jnp.float32)[None], *inputs)


def _parts(eps, o, gate, lanes):
    """(1 / rms, o / rms, silu(gate), its derivative) of one head, float32."""
    o, gate = o[0, :, lanes].astype(jnp.float32), gate[0, :, lanes].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    open_ = jax.nn.sigmoid(gate)
    return scale, o * scale, gate * open_, open_ * (1 + gate * (1 - open_))


def _forward_kernel(eps, weight, o, gate, y):
    def head(lanes):
        _, normed, open_, _ = _parts(eps, o, gate, lanes)
        y[0, :, lanes] = (normed * weight[...] * open_).astype(y.dtype)

    columns(y.shape[2], head)


def _backward_kernel(eps, weight, o, gate, dy, do, dgate, dweight):
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dweight[...] = jnp.zeros_like(dweight)

    def head(lanes):
        scale, normed, open_, slope = _parts(eps, o, gate, lanes)
        d = dy[0, :, lanes].astype(jnp.float32)
        dgate[0, :, lanes] = (d * normed * weight[...] * slope).astype(dgate.dtype)
        d = d * open_
        dweight[...] += jnp.sum((d * normed).reshape(-1, 8, _LANES), axis=0)
        d = d * weight[...]
        do[0, :, lanes] = (
            scale * (d - normed * jnp.mean(d * normed, axis=-1, keepdims=True))
        ).astype(do.dtype)

    columns(do.shape[2], head)
