"""Mosaic GPU kernels of the causal depthwise convolution with its activation (sm_90a): one kernel
for the forward pass and one for the backward pass.

A block of the grid has one warpgroup and computes 32 tokens of 128 or 256 channels; each thread
computes one or two of these channels. The block computes one token after another. Inputs that
several tokens need stay in registers, in float32. The block copies its 32 tokens and the W - 1
tokens before its first token to shared memory, in the backward pass also the W - 1 tokens after its
last token.

B batch, T time, W kernel width, D channels.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels import causal_conv1d_edges, self_test
from qwen3next_jax.kernels.causal_conv1d_edges import (
    count_earlier_inputs_in_document,
    gradient_of_inputs_before,
)
from qwen3next_jax.kernels.gpu import kernel_call
from qwen3next_jax.kernels.gpu.kernel_call import KernelCall, run_kernel

TOLERANCE = 0.02  # largest allowed relative L2 difference between the kernels and XLA
# The tokens of a block. With more tokens, fewer blocks fit on a multiprocessor at a time, and the
# kernels are slower (docs/notes/gpu.md).
TOKENS = 32


def unsupported_reason(x, kernel, activation) -> str:
    """Returns why the GPU kernels cannot run x [B, T, D] with `kernel` [W, D]; "" if they can."""
    if (
        x.dtype not in (jnp.bfloat16, jnp.float32)
        or x.shape[1] % TOKENS
        or x.shape[2] % 128
        or not 2 <= kernel.shape[0] <= 8
    ):
        return (
            f"has {x.shape[1]} tokens of {x.shape[2]} channels in {x.dtype} and a kernel of "
            f"{kernel.shape[0]}: expected multiples of "
            f"{TOKENS} and 128, bfloat16 or float32, 2 to 8"
        )
    return self_test.unsupported_chip_reason()


def is_default(x, kernel, activation) -> bool:
    """Returns whether a call that names no implementation runs the kernels. The call runs the
    kernels if rows have at least 32 tokens (decoding has fewer), if the kernels support the call
    and if the kernels passed their test on this GPU. For rows of 32 tokens or more the function
    prints the decision once.
    """
    if x.shape[1] < TOKENS:
        return False
    return self_test.kernels_run_by_default(
        make_self_test(x, kernel, activation), unsupported_reason(x, kernel, activation)
    )


def make_self_test(x, kernel, activation) -> self_test.SelfTest:
    """Returns the test for calls with the same activation, dtype of x and kernel width."""
    kind = activation, str(x.dtype), kernel.shape[0]
    return self_test.SelfTest(
        "convolution",
        self_test.AVOID,
        kind,
        (__name__, causal_conv1d_edges.__name__, kernel_call.__name__),
        functools.partial(max_error, *kind),
        TOLERANCE,
    )


def max_error(activation, dtype: str, width: int, interpret: bool = False) -> tuple[str, float]:
    """Runs the kernels and a plain sum in JAX, with JAX's gradients, on two rows of two blocks of
    tokens: once with documents and padding, and once with one document per row. Returns the name of
    the result in which kernels and JAX differ most, and the relative L2 difference.
    """
    rng, size = np.random.default_rng(0), TOKENS
    before, x, kernel, dy = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((2, width - 1, 256), (2, 2 * size, 256), (width, 256), (2, 2 * size, 256))
    )
    documents = jnp.asarray(
        [[1] * (size - 1) + [2] * 2 + [3] * (size - 1), [4] * (size + 8) + [0] * (size - 8)]
    )
    documents = jnp.concatenate(
        [jnp.repeat(documents[:, :1], width - 1, axis=1), documents], axis=1
    )

    def plain(ids, before, x, kernel):
        extended, age = (
            jnp.concatenate([before, x], axis=1).astype(jnp.float32),
            count_earlier_inputs_in_document(ids, width),
        )
        z = sum(
            kernel[w]
            * extended[:, w : w + 2 * size]
            * (1.0 if ids is None else (age >= width - 1 - w)[..., None])
            for w in range(width)
        )
        return (jax.nn.silu(z) if activation == "silu" else z).astype(x.dtype)

    @jax.jit
    def got(ids):
        return (
            forward(activation, before, x, kernel, ids, interpret=interpret),
            *backward(activation, before, x, kernel, ids, dy, interpret=interpret),
        )

    @jax.jit
    def want(ids):
        y, pullback = jax.vjp(functools.partial(plain, ids), before, x, kernel)
        return y, *pullback(dy)

    names = "y", "gradient of the inputs before", "dx", "dkernel"
    errors = [self_test.largest_error(names, got(ids), want(ids)) for ids in (documents, None)]
    return max(errors, key=lambda item: item[1])


def forward(activation, before, x, kernel, ids, *, interpret: bool = False):
    """Returns y [B, T, D], the outputs of the convolution after the activation.

    Args:
      activation: "silu" or None.
      before: [B, W - 1, D], the inputs before the first token.
      x: [B, T, D], the inputs.
      kernel: [W, D], the weights of the convolution.
      ids: [B, W - 1 + T], the document ids of all inputs, 0 for padding at the end; None if a row
        is one document.
      interpret: whether a CPU interprets the kernel.
    """
    age = count_earlier_inputs_in_document(ids, kernel.shape[0])
    outputs = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    return _call_kernel(
        _forward_kernel, "forward", activation, before, x, kernel, age, None, outputs, interpret
    )[0]


def backward(activation, before, x, kernel, ids, dy, *, interpret: bool = False):
    """Returns the gradients of before, x and kernel, given dy [B, T, D], the gradient of y. The
    other arguments have the same meaning as in `forward`.
    """
    age = count_earlier_inputs_in_document(ids, kernel.shape[0])
    sums = jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // TOKENS, *kernel.shape), jnp.float32)
    outputs = (jax.ShapeDtypeStruct(x.shape, x.dtype), sums)
    dx, dkernel = _call_kernel(
        _backward_kernel, "backward", activation, before, x, kernel, age, dy, outputs, interpret
    )
    return (
        gradient_of_inputs_before(activation, before, x, kernel, age, dy),
        dx,
        jnp.sum(dkernel, axis=(0, 1)).astype(kernel.dtype),
    )


def _call_kernel(body, name: str, activation, before, x, kernel, age, dy, outputs, interpret):
    """Runs a kernel and returns its outputs.

    Args:
      body: the kernel, a function of a `_Convolution` and of the references.
      name: name of the kernel in a compiled program, after "causal_conv1d_".
      activation, before, x, kernel: the arguments of `forward`.
      age: [B, T] int32, the age of each token; None if a row is one document.
      dy: [B, T, D], the gradient of y; None in the forward pass.
      outputs: the shape and dtype of each output, a tuple.
      interpret: whether a CPU interprets the kernel.
    """
    convolution = _Convolution(activation, kernel.shape[0], x.shape, age is not None)
    backward, channels = dy is not None, convolution.channels_per_block
    # In the backward pass, a block also reads the W - 1 tokens after it.
    rows = TOKENS + (convolution.width - 1 if backward else 0)
    scratch = [
        plgpu.SMEM((convolution.width - 1 + rows, channels), x.dtype),
        plgpu.SMEM((rows, channels), x.dtype),
    ]
    copies = 2
    if convolution.has_age:
        scratch.append(plgpu.SMEM((TOKENS + 32 if backward else TOKENS,), jnp.int32))
        copies += 1
    if backward:  # as many copies for the tokens after the block, and one of dy
        copies += copies + 1
    scratch.append(plgpu.Barrier(num_arrivals=copies))
    batch, time, d = x.shape
    call = KernelCall(
        body=body,
        arguments=(convolution,),
        name=f"causal_conv1d_{name}",
        grid=(("channels", d // channels), ("tokens", time // TOKENS), ("batch", batch)),
        outputs=outputs,
        scratch=tuple(scratch),
        interpret=interpret,
    )
    inputs = x, before.astype(x.dtype), kernel.astype(jnp.float32), age, dy
    return run_kernel(call, *(array for array in inputs if array is not None))


class _Convolution(NamedTuple):
    """The sizes of one call, and the code that the forward and the backward kernel share.

    Attributes:
      activation: "silu" or None.
      width: W.
      shape: [B, T, D], the shape of x.
      has_age: whether the call has document ids. If `has_age`, the kernels also take the age of
        each token (`count_earlier_inputs_in_document`).
    """

    activation: str | None
    width: int
    shape: tuple[int, ...]
    has_age: bool

    @property
    def channels_per_block(self) -> int:
        """The number of channels of a block, 128 or 256."""
        return 256 if self.shape[2] % 256 == 0 else 128

    def block_indices(self):
        """Returns the index of the row of the batch, the index of the block of tokens, the index of
        the block's first token, and the slice of the block's channels.
        """
        t = jax.lax.axis_index("tokens")
        return (
            jax.lax.axis_index("batch"),
            t,
            t * TOKENS,
            pl.ds(
                jax.lax.axis_index("channels") * self.channels_per_block, self.channels_per_block
            ),
        )

    def start_copies(self, refs: "_Refs"):
        """Starts copying to shared memory: the block's inputs, the W - 1 inputs before the block
        and the ages of the block's tokens. Returns a function (source, target) that starts one more
        copy. The barrier `refs.inputs_arrived` counts the copies that have arrived.
        """
        b, t, first, channels = self.block_indices()
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, refs.inputs_arrived)
        edge = refs.x_smem.at[pl.ds(0, self.width - 1)]
        pl.when(t == 0)(lambda: copy(refs.before_gmem.at[b, :, channels], edge))
        pl.when(t > 0)(
            lambda: copy(
                refs.x_gmem.at[b, pl.ds(first - (self.width - 1), self.width - 1), channels], edge
            )
        )
        copy(
            refs.x_gmem.at[b, pl.ds(first, TOKENS), channels],
            refs.x_smem.at[pl.ds(self.width - 1, TOKENS)],
        )
        if self.has_age:
            copy(refs.ages_gmem.at[b, pl.ds(first, TOKENS)], refs.ages_smem.at[pl.ds(0, TOKENS)])
        return copy

    def zero_if_other_document(self, x, age, back: int):
        """Returns x, but zeros if the token is padding, or if the input `back` tokens before the
        token belongs to another document. `age` is the token's age, None if a row is one document.
        """
        return x if age is None else x * (age >= back).astype(jnp.float32)

    def output_before_activation(self, weights, taps, age):
        """Returns the output of a token before the activation: the sum of `taps`, the W inputs that
        the output depends on (newest first), times `weights`, the W rows of the kernel.
        """
        return functools.reduce(
            jnp.add,
            (
                self.zero_if_other_document(weights[self.width - 1 - back] * x, age, back)
                for back, x in enumerate(taps)
            ),
        )


class _Refs(NamedTuple):
    """The references of a kernel: first the inputs and outputs in global memory, then arrays in
    shared memory. `ages_gmem` and `ages_smem` are None if the call has no document ids.
    """

    x_gmem: Any
    before_gmem: Any
    ages_gmem: Any
    dy_gmem: Any  # None in the forward pass
    output_gmems: Sequence[Any]
    x_smem: Any
    result_smem: Any  # in the backward pass it first holds dy
    ages_smem: Any
    inputs_arrived: Any  # barrier
    kernel_rows: Sequence[Any]  # the rows of the kernel, in registers


def _name_refs(convolution, refs, outputs: int, gradient: bool) -> _Refs:
    """Names the references that `_call_kernel` passes to a kernel."""
    x, before, kernel, *refs = refs
    age = refs.pop(0) if convolution.has_age else None
    dy = refs.pop(0) if gradient else None
    results, (xs, ys, *rest) = refs[:outputs], refs[outputs:]
    ages, arrived = rest if convolution.has_age else (None, *rest)
    channels = convolution.block_indices()[3]
    weights = [kernel[w, channels] for w in range(convolution.width)]
    return _Refs(x, before, age, dy, results, xs, ys, ages, arrived, weights)


def _load_row(ref, r):
    """Returns row r of `ref` in float32."""
    return ref[r].astype(jnp.float32)


def _forward_kernel(convolution, *refs):
    """Computes y of a block, from its first token to its last."""
    refs = _name_refs(convolution, refs, 1, False)
    (y_gmem,), xs, ys = refs.output_gmems, refs.x_smem, refs.result_smem
    b, _, first, channels = convolution.block_indices()
    convolution.start_copies(refs)
    plgpu.barrier_wait(refs.inputs_arrived)

    def step(r, earlier):
        taps = (_load_row(xs, r + convolution.width - 1), *earlier)
        z = convolution.output_before_activation(
            refs.kernel_rows, taps, refs.ages_smem[r] if convolution.has_age else None
        )
        ys[r] = (z * jax.nn.sigmoid(z) if convolution.activation == "silu" else z).astype(ys.dtype)
        return taps[:-1]

    jax.lax.fori_loop(
        0,
        TOKENS,
        step,
        tuple(_load_row(xs, convolution.width - 2 - i) for i in range(convolution.width - 1)),
    )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ys, y_gmem.at[b, pl.ds(first, TOKENS), channels])
    plgpu.wait_smem_to_gmem(0)


def _backward_kernel(convolution, *refs):
    """Computes dx of a block and the block's part of the gradient of `kernel`, from the block's
    last token to its first. The kernel begins with the W - 1 tokens after the block, because the
    outputs of these W - 1 tokens depend on the last tokens of the block. For the tokens after the
    block, the kernel computes only the gradient of the activation's input. The last block of a row,
    which no tokens follow, copies its own last tokens instead and multiplies the gradients of these
    copies by zero.
    """
    refs = _name_refs(convolution, refs, 2, True)
    (dx_gmem, sums_gmem), xs, dys, weights = (
        refs.output_gmems,
        refs.x_smem,
        refs.result_smem,
        refs.kernel_rows,
    )
    b, t, first, channels = convolution.block_indices()
    edge, rows = convolution.width - 1, TOKENS
    copy = convolution.start_copies(refs)
    copy(refs.dy_gmem.at[b, pl.ds(first, rows), channels], dys.at[pl.ds(0, rows)])
    after = pl.ds(jnp.minimum(first + rows, convolution.shape[1] - edge), edge)
    copy(refs.x_gmem.at[b, after, channels], xs.at[pl.ds(edge + rows, edge)])
    copy(refs.dy_gmem.at[b, after, channels], dys.at[pl.ds(rows, edge)])
    if convolution.has_age:
        copy(
            refs.ages_gmem.at[b, pl.ds(jnp.minimum(first + rows, convolution.shape[1] - 32), 32)],
            refs.ages_smem.at[pl.ds(rows, 32)],
        )
    plgpu.barrier_wait(refs.inputs_arrived)
    has_tokens_after = (first + rows < convolution.shape[1]).astype(jnp.float32)

    def gradient(r, taps):
        """Returns the gradient of the activation's input for token r. The tokens of the block have
        r = 0 to TOKENS - 1; the W - 1 tokens after the block have the next indices.
        """
        dz = _load_row(dys, r)
        if convolution.activation == "silu":
            z = convolution.output_before_activation(
                weights, taps, refs.ages_smem[r] if convolution.has_age else None
            )
            gate = jax.nn.sigmoid(z)
            dz = dz * (gate * (1 + z * (1 - gate)))
        return dz

    taps_of_kernel = range(edge, -1, -1)  # index into the kernel, 0, 1, … tokens back
    taps_of = lambda r, later: (*later, _load_row(xs, r))  # xs[r] is the oldest input of token r
    inputs = tuple(_load_row(xs, 2 * edge + rows - 1 - i) for i in range(edge))
    following = ()
    for r in range(rows + edge - 1, rows - 1, -1):
        taps = taps_of(r, inputs)
        following = (gradient(r, taps) * has_tokens_after, *following)
        inputs = taps[1:]

    def step(i, carry):
        inputs, following, sums = carry
        r = rows - 1 - i
        taps = taps_of(r, inputs)
        dzs = (gradient(r, taps), *following)
        age = lambda back: refs.ages_smem[r + back] if convolution.has_age else None
        dx = functools.reduce(
            jnp.add,
            (
                convolution.zero_if_other_document(weights[w] * dz, age(back), back)
                for back, (w, dz) in enumerate(zip(taps_of_kernel, dzs))
            ),
        )
        sums = tuple(
            s + convolution.zero_if_other_document(dzs[0] * x, age(0), back)
            for back, (s, x) in enumerate(zip(sums, taps))
        )
        dys[r] = dx.astype(dys.dtype)
        return taps[1:], dzs[:-1], sums

    *_, sums = jax.lax.fori_loop(
        0, rows, step, (inputs, following, tuple(w * 0.0 for w in weights))
    )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(dys.at[pl.ds(0, rows)], dx_gmem.at[b, pl.ds(first, rows), channels])
    for back, total in enumerate(sums):
        sums_gmem[b, t, edge - back, channels] = total
    plgpu.wait_smem_to_gmem(0)
