"""Grouped matrix products with tokamax's kernels (docs/gpu.md). Rows are sorted by group, and the
rows of a group are multiplied by the matrix of that group. Rows after the last group belong to no
group.

On a Hopper GPU (H100, H200), the Mosaic kernel computes y and dx, and the Triton kernel computes
dw. On other GPUs from Ampere on, the Triton kernel computes y, dx and dw. The package tokamax ships
measurements of its kernels on an H100 (tokamax/data/autotuning), and this module uses the tiles
that were the fastest in them. For 131,072 to 524,288 rows, widths of 768 to 4,096 and 128 experts,
tokamax's authors measured the following TFLOP/s.

         Mosaic        Triton
    y    384 to 468    152 to 505
    dx   296 to 425    147 to 430
    dw   108 to 119    591 to 725

R rows, D input width, F output width, E groups.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import tokamax
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.compile_target import compile_target

# The largest allowed relative L2 difference between the kernels' and XLA's products of the same
# bfloat16 operands. Both sum in float32 and round the result to bfloat16.
TOLERANCE = 0.02
MIN_ROWS = 128  # calls of fewer rows than a tile do not run the kernels by default
# The Mosaic kernels copy tiles of 8 x 64 and 1 x 64 numbers, and a copy takes only arrays that
# consist of whole tiles (jax/experimental/mosaic/gpu/launch_context.py, TileTransform). They read x
# [R, D], w [D, F] and dy [R, F], and for dw also x transposed, [D, R].
WIDTHS = 64
ROWS = 64


def unsupported_reason(x, weights) -> str:
    """Returns why the kernels cannot run a call of the operator; "" if they can.

    Args:
      x: [R, D], the rows. Any number of rows can be run: the rows are padded to a multiple of ROWS.
      weights: the arrays of matrices [E, D, F], one array for each product of the call.
    """
    if {x.dtype, *(w.dtype for w in weights)} != {jnp.dtype(jnp.bfloat16)}:
        return f"has rows of {x.dtype} and matrices of {weights[0].dtype}: expected bfloat16"
    return next(filter(None, (_choose_kernels(*w.shape[1:]).refusal for w in weights)), "")


def is_default(x, weights) -> bool:
    """Returns whether a call that names no implementation runs the kernels. The call runs the
    kernels if it has at least MIN_ROWS rows, if the kernels support the call and if the kernels
    passed their tests on this GPU. For MIN_ROWS rows or more the function prints the decision once.
    """
    if x.shape[0] < MIN_ROWS:
        few = f"has {x.shape[0]} rows: the kernels run {MIN_ROWS} or more"
        implementations.record_why_default(False, f"{few} {implementations.BY_DEFAULT}")
        return False
    refusal = unsupported_reason(x, weights)
    shapes = [w.shape[1:] for w in weights]
    if not refusal and not compile_target().may_lack_device:
        for widths in shapes:
            self_test.failure_or_assumed_pass(
                make_self_test(*widths)
            )  # `_choose_kernels` depends on it
    slow = next(filter(None, (_choose_kernels(*widths).slow_dw_warning for widths in shapes)), "")
    return all(
        [
            self_test.kernels_run_by_default(make_self_test(*widths, warning=slow), refusal)
            for widths in shapes
        ]
    )


class _KernelChoice(NamedTuple):
    """Which kernels compute the products with matrices of one shape (D, F).

    Attributes:
      product_kernel: the kernel for y and dx: "mosaic" or "triton".
      weight_gradient_kernel: the kernel for dw: "mosaic" or "triton".
      refusal: why no kernels can run; "" if they can.
      slow_dw_warning: a warning for the user if Mosaic computes dw, which is slower; otherwise "".
    """

    product_kernel: str = ""
    weight_gradient_kernel: str = ""
    refusal: str = ""
    slow_dw_warning: str = ""


def _choose_kernels(*widths: int) -> _KernelChoice:
    """Returns the kernels for matrices of `widths`, (D, F). The usual choice is Mosaic for y and
    dx, and Triton for dw. If the self-test of Mosaic together with Triton has failed in this run,
    Mosaic computes dw, too.

    Triton 3.9 writes PTX 9.4, which needs a ptxas of CUDA 13.4 or later. An older CUDA toolkit on
    PATH or in /usr/local/cuda takes precedence over the toolkit that the extra `gpu` installs.
    TRITON_PTXAS_BLACKWELL_PATH makes Triton write PTX for another ptxas (docs/gpu.md).
    """
    no_triton = tokamax.triton_unsupported_reason()
    no_mosaic = tokamax.mosaic_unsupported_reason()
    if not no_mosaic and any(width % WIDTHS for width in widths):
        no_mosaic = f"has matrices of {widths}: expected multiples of {WIDTHS}"
    if no_mosaic and no_triton:
        same = no_mosaic == no_triton
        return _KernelChoice(
            refusal=no_mosaic if same else f"{no_mosaic}; Triton's run {no_triton}"
        )
    if no_mosaic:
        return _KernelChoice("triton", "triton")
    if not no_triton:
        if not (
            failure := self_test.known_failure(
                _self_test_of_choice(_KernelChoice("mosaic", "triton"), widths)
            )
        ):
            return _KernelChoice("mosaic", "triton")
        no_triton = f"whose test {failure}"
    slow = (
        "expect gradients of the experts' weights to take several times as long: they do not run "
        f"in Triton, {no_triton}"
    )
    return _KernelChoice("mosaic", "mosaic", slow_dw_warning=slow)


def matmul(x_RD, w_EDF, sizes_E):
    """Returns y [R, F], the result of `ops.grouped_matmul`, with zeros in rows of no group.
    `sizes_E` [E] has the number of rows of each group.
    """
    return _zero_rows_of_no_group(sizes_E, unmasked_matmul(x_RD, w_EDF, sizes_E))


def gradients(x_RD, w_EDF, sizes_E, dy_RF):
    """Returns the gradients of x_RD and w_EDF, given dy_RF [R, F], the gradient of y."""
    return matmul(dy_RF, w_EDF.swapaxes(1, 2), sizes_E), weight_gradients(
        x_RD, dy_RF, sizes_E, w_EDF.dtype
    )


def unmasked_matmul(x_RD, w_EDF, sizes_E):
    """Returns y [R, F], where rows of no group are undefined. The result does not depend on the
    rows of x that belong to no group.
    """
    run = (
        _mosaic_product
        if _choose_kernels(*w_EDF.shape[1:]).product_kernel == "mosaic"
        else _triton_product
    )
    return run(_pad_rows(x_RD), w_EDF, sizes_E)[: x_RD.shape[0]]


def weight_gradients(x_RD, dy_RF, sizes_E, dtype):
    """Returns dw [E, D, F], the sum of x_r dy_rᵀ over the rows r of each group; zeros for a group
    without rows. The result does not depend on the rows of x and dy that belong to no group.
    """
    kernels = _choose_kernels(x_RD.shape[1], dy_RF.shape[1])
    run = (
        _mosaic_weight_gradients
        if kernels.weight_gradient_kernel == "mosaic"
        else _triton_weight_gradients
    )
    return run(_pad_rows(x_RD), _pad_rows(dy_RF), sizes_E, dtype)


def _zero_rows_of_no_group(sizes_E, y_RF):
    """Returns y_RF with zeros in rows of no group."""
    return jnp.where(jnp.arange(y_RF.shape[0])[:, None] < jnp.sum(sizes_E), y_RF, 0)


def _pad_rows(x_RD):
    """Returns x_RD, padded with rows of zeros to a multiple of ROWS rows."""
    missing = -x_RD.shape[0] % ROWS
    return jnp.pad(x_RD, ((0, missing), (0, 0))) if missing else x_RD


# ---- Mosaic


def mosaic_product_settings(width: int) -> dict:
    """Returns the settings of tokamax's Mosaic kernel for computing y or dx. `width` is the length
    of the contracted axis. A stage of the pipeline takes 48 KiB of the 227 KiB of shared memory,
    and the result 16 KiB. If the sum has few stages, two blocks share a multiprocessor, so that one
    block computes while the other block writes.
    """
    tiles = dict(block_m=128, block_n=64, block_k=128)
    if width <= 512:
        return tiles | dict(num_stages=2, persistent=False, grid_minor_dim="M", grid_tile_width=1)
    return tiles | dict(num_stages=4, persistent=True, grid_minor_dim="N", grid_tile_width=8)


MOSAIC_WEIGHT_GRADIENT_SETTINGS = dict(
    block_m=128,
    block_n=64,
    block_k=128,
    num_stages=2,
    persistent=False,
    grid_minor_dim="M",
    grid_tile_width=1,
)


def mosaic_config(grid_minor_dim: str, **settings):
    """Returns tokamax's settings of a Mosaic kernel. `grid_minor_dim` is the dimension, "M" or "N",
    along which neighbouring blocks of the grid lie.
    """
    common = tokamax.import_tokamax_operator("ragged_dot.pallas_mosaic_gpu_common")
    return common.Config(
        split_k=1, grid_minor_dim=common.MatmulDimension[grid_minor_dim], **settings
    )


def _mosaic_product(x_RD, w_EDF, sizes_E):
    sm90 = tokamax.import_tokamax_operator("ragged_dot.pallas_mosaic_gpu_kernel_sm90")
    tiles = mosaic_product_settings(x_RD.shape[1])
    # A persistent kernel asks the process's GPU for the number of its multiprocessors. Without a
    # GPU, where a program is only compiled, the kernel is not persistent.
    has_gpu = hasattr(backend.get_default_device(), "core_count")
    config = mosaic_config(**tiles | dict(persistent=tiles["persistent"] and has_gpu))
    return _run_mosaic_kernel(sm90.ragged_dot_kernel, x_RD.dtype, config, x_RD, w_EDF, sizes_E)


def _mosaic_weight_gradients(x_RD, dy_RF, sizes_E, dtype):
    sm90 = tokamax.import_tokamax_operator("ragged_dot.pallas_mosaic_gpu_kernel_sm90")
    # The kernel multiplies rows of no group by zero, so they have to be finite.
    x_RD, dy_RF = _zero_rows_of_no_group(sizes_E, x_RD), _zero_rows_of_no_group(sizes_E, dy_RF)
    config = mosaic_config(**MOSAIC_WEIGHT_GRADIENT_SETTINGS)
    kernel = sm90.ragged_contracting_dim_dot_kernel
    return _run_mosaic_kernel(kernel, jnp.dtype(dtype), config, x_RD, dy_RF, sizes_E)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run_mosaic_kernel(kernel, dtype, config, *arrays):
    """Runs a kernel of tokamax. Equal calls share one traced kernel, as in `kernel_call`. `dtype`
    is the dtype of the result.
    """
    return kernel(*arrays, dtype, config)


# ---- Triton


def triton_product_settings(chip: float) -> dict:
    """Returns tokamax's settings for y and dx on a GPU of the compute capability `chip`. Shared
    memory holds block_m · block_k + block_k · block_n numbers for each stage.
    """
    if int(chip) == 10:
        return dict(block_m=256, block_n=256, block_k=32, num_warps=4, num_stages=3)
    if chip == 8.0:
        return dict(block_m=64, block_n=256, block_k=32, num_warps=4, num_stages=5)
    return dict(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=4)


def triton_weight_gradient_settings(chip: float) -> dict:
    """Returns tokamax's settings for dw on a GPU of the compute capability `chip`."""
    if int(chip) == 10:
        return dict(block_m=256, block_n=256, block_k=32, num_warps=8, num_stages=5)
    if chip == 9.0:
        return dict(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=5)
    if chip == 8.0:
        return dict(block_m=256, block_n=64, block_k=64, num_warps=4, num_stages=3)
    return dict(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=4)


_PRECISION = (jax.lax.Precision.DEFAULT,) * 2


def _triton_product(x_RD, w_EDF, sizes_E):
    triton = tokamax.import_tokamax_operator("ragged_dot.triton")
    return triton._ragged_dot(
        x_RD,
        w_EDF,
        group_sizes=sizes_E,
        precision=_PRECISION,
        out_dtype=x_RD.dtype,
        split_k_intermediate_dtype=None,
        config=triton.Config(**triton_product_settings(tokamax.compute_capability())),
    )


def _triton_weight_gradients(x_RD, dy_RF, sizes_E, dtype):
    triton = tokamax.import_tokamax_operator("ragged_dot.triton")
    return triton._ragged_contracting_dim_dot(
        x_RD,
        dy_RF,
        group_sizes=sizes_E,
        precision=_PRECISION,
        out_dtype=dtype,
        config=triton.Config(**triton_weight_gradient_settings(tokamax.compute_capability())),
    )


# ---- the test


def make_self_test(*widths: int, warning: str = "") -> self_test.SelfTest:
    """Returns the test for matrices of `widths`, (D, F). `warning` is a field of `SelfTest`."""
    return _self_test_of_choice(_choose_kernels(*widths), widths, warning)


def _self_test_of_choice(
    kernels: _KernelChoice, widths: tuple[int, ...], warning: str = ""
) -> self_test.SelfTest:
    languages = {"mosaic": "pallas_mosaic_gpu_kernel_sm90", "triton": "triton"}
    used = sorted({languages[name] for name in kernels[:2] if name})
    names = ("tokamax._src.ops.ragged_dot." + name for name in used)
    return self_test.SelfTest(
        "grouped products",
        self_test.AVOID,
        (tokamax.RELEASE, *kernels[:2], *widths),
        (__name__, *names),
        lambda: max_error(*widths),
        TOLERANCE,
        trained_on="",
        warning=warning,
    )


def max_error(*widths: int, functions=None) -> tuple[str, float]:
    """Runs the kernels and XLA's products on inputs like the inputs of a layer: groups that end
    inside a tile, a group of several tiles, a group without rows, and rows of no group, which are
    NaN. Returns the name of the result in which the kernels and XLA differ most, and the relative
    L2 difference.

    Args:
      widths: (D, F) of the matrices.
      functions: two functions to test instead of `matmul` and `gradients`; None means `matmul` and
        `gradients`.
    """
    d, f = widths
    sizes, rows = (130, 0, 257, 69), 640
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x, w, dy = array(rows, d), array(len(sizes), d, f), array(rows, f)
    ends = np.cumsum(sizes)
    multiply, differentiate = functions or (matmul, gradients)

    def products(x, w, dy):
        x, dy = (a.at[ends[-1] :].set(jnp.nan) for a in (x, dy))
        sizes_E = jnp.asarray(sizes, jnp.int32)
        return multiply(x, w, sizes_E), *differentiate(x, w, sizes_E, dy)

    def expected(x, w, dy):
        exact = dict(precision=jax.lax.Precision.HIGHEST)
        x, w, dy = (a.astype(jnp.float32) for a in (x, w, dy))
        groups = [
            (x[end - size : end], w[e], dy[end - size : end])
            for e, (size, end) in enumerate(zip(sizes, ends))
        ]
        rest = ((0, int(rows - ends[-1])), (0, 0))
        y = jnp.concatenate([jnp.dot(x, w, **exact) for x, w, _ in groups])
        dx = jnp.concatenate([jnp.dot(dy, w.T, **exact) for _, w, dy in groups])
        dw = jnp.stack([jnp.dot(x.T, dy, **exact) for x, _, dy in groups])
        return jnp.pad(y, rest), jnp.pad(dx, rest), dw

    return self_test.largest_error(
        ("product", "dx", "dw"), jax.jit(products)(x, w, dy), jax.jit(expected)(x, w, dy)
    )
