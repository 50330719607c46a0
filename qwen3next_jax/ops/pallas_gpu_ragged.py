"""Products of rows sorted by group, each row once, by tokamax's kernels for Hopper GPUs
(docs/gpu.md).

R rows, D width in, F width out, E groups.
"""

import functools
import importlib
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.ops import kernel_trial

# its kernels have no public name that says nothing of the device, so that no other release is taken
TOKAMAX = "0.0.17"
# relative L2, of two products of the same bfloat16 operands with float32 sums, rounded to bfloat16
APART = 0.02
FEWEST = 128  # rows of a tile; fewer are not worth a kernel


def of_tokamax(module: str):
    return importlib.import_module(f"tokamax._src.ops.{module}")


def tokamax_refusal() -> str:
    """Why tokamax's kernels are not to be taken in this process; empty where they are."""
    if importlib.util.find_spec("tokamax") is None:
        return f"without tokamax, which is not installed: expected {TOKAMAX} (uv run --extra gpu)"
    if (found := importlib.metadata.version("tokamax")) != TOKAMAX:
        return f"with tokamax {found}: expected {TOKAMAX}"
    if jax.__version_info__ < (0, 12):
        return (
            f"with jax {jax.__version__}, where -accumulator * x gives zeros on an H100: expected "
            "0.12"
        )
    return kernel_trial.hopper_refusal()


def platforms(ragged, x, *arguments) -> dict:
    """What `None` runs on a GPU where the kernels take these rows and matrices [E, D, F], {}
    where not; it says once which, and why.
    """
    weights = [w for w in arguments if w.ndim == 3]
    if x.shape[0] < FEWEST:
        return {}
    why = tokamax_refusal()
    if {x.dtype, *(w.dtype for w in weights)} != {jnp.dtype(jnp.bfloat16)}:
        why = f"has rows of {x.dtype} and matrices of {weights[0].dtype}: expected bfloat16"
    elif any(n % 64 for w in weights for n in w.shape[1:]) or x.shape[0] % 8:
        why = (
            f"has {x.shape[0]} rows, matrices of {weights[0].shape[1:]}: expected multiples of 8 "
            "and 64"
        )
    return (
        {"cuda": functools.partial(ragged, matmul, gradients)}
        if kernel_trial.takes(trial(), why)
        else {}
    )


def matmul(x_RD, w_EDF, sizes_E):
    """As `grouped_matmul`."""
    kernel = of_tokamax("ragged_dot.pallas_mosaic_gpu_kernel_sm90").ragged_dot_kernel
    y_RF = kernel(x_RD, w_EDF, sizes_E, x_RD.dtype, _config(block_m=128, num_stages=4))
    # what it leaves alone may be anything
    return jnp.where(jnp.arange(x_RD.shape[0])[:, None] < jnp.sum(sizes_E), y_RF, 0)


def gradients(x_RD, w_EDF, sizes_E, dy_RF):
    """Of `matmul`: dx, dw."""
    kernel = of_tokamax(
        "ragged_dot.pallas_mosaic_gpu_kernel_sm90"
    ).ragged_contracting_dim_dot_kernel
    return matmul(dy_RF, w_EDF.swapaxes(1, 2), sizes_E), kernel(
        x_RD, dy_RF, sizes_E, w_EDF.dtype, _config(block_m=64, num_stages=2)
    )


def _config(**sizes):
    common = of_tokamax("ragged_dot.pallas_mosaic_gpu_common")
    return common.Config(
        block_n=64,
        block_k=128,
        split_k=1,
        persistent=False,
        grid_minor_dim=common.MatmulDimension.M,
        **sizes,
    )


def trial() -> kernel_trial.Trial:
    names = "pallas_mosaic_gpu_kernel_sm90", "pallas_mosaic_gpu_common"
    modules = tuple(f"tokamax._src.ops.ragged_dot.{name}" for name in names)
    return kernel_trial.Trial(
        "grouped products", kernel_trial.AVOID, (TOKAMAX,), modules, worst, APART, ran=""
    )


def worst(form=None) -> tuple[str, float]:
    """The result in which the kernels and XLA's products differ most: groups that end within
    tiles, an empty one, rows of none.
    """
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    sizes = np.array([130, 0, 57, 69])
    x, w, dy = array(264, 192), array(len(sizes), 192, 64), array(264, 64)
    both = lambda matmul, gradients: jax.jit(
        lambda x, w, dy: (
            matmul(x, w, jnp.asarray(sizes, jnp.int32)),
            *gradients(x, w, jnp.asarray(sizes, jnp.int32), dy),
        )
    )(x, w, dy)
    group = np.repeat(np.arange(len(sizes) + 1), [*sizes, 264 - sum(sizes)])

    def dense(x, w, *_):
        every = jnp.concatenate([w, jnp.zeros_like(w[:1])]).astype(jnp.float32)
        return jnp.einsum(
            "rd,rdf->rf", x.astype(jnp.float32), every[group], precision=jax.lax.Precision.HIGHEST
        ).astype(x.dtype)

    want = both(dense, lambda x, w, _, dy: jax.vjp(dense, x, w)[1](dy))
    return kernel_trial.worst_of(
        ("product", "dx", "dw"), both(*(form or (matmul, gradients))), want
    )
