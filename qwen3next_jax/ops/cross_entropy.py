"""The cross-entropy loss of a linear head, computed without storing the logits of all rows, [R, V].

R rows, C rows per chunk, D model width, V vocabulary size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.compile_target import compile_target

# The largest number of logits in one chunk. On a CPU 2**22 float32 logits, 16 MB, stay in the
# last-level cache: with 2048 rows and a vocabulary of 8192, chunks of 256 to 512 rows are 15 %
# faster than one chunk of all rows. Accelerators are faster with larger chunks, because matrix
# products of many rows are more efficient, and because every chunk reads and writes dw. The float32
# logits of a chunk take 0.5 to 2 GiB on a GPU, and 1 / _MEMORY_PART of the chip's memory on a TPU.
_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 2**22, (2**27, 2**29)
# On a GPU, a row of a chunk causes reads and writes of some 20 bytes for each of its V logits, and,
# for the float32 dw, of 8 D / C more bytes. With C = 4 D rows, these 2 bytes are a tenth of the 20.
_GPU_CHUNK_ROWS_PER_WIDTH = 4
_MIN_CHUNK_ROWS = 512
_MEMORY_PART = 32


class RowResults(NamedTuple):
    """The results for each row. No gradient flows through these results."""

    nll: jax.Array  # [R] float32, the negative log-likelihood of the target in nats
    logsumexp: jax.Array  # [R] float32, the logsumexp of the logits
    argmax: jax.Array  # [R] int32, the index of the largest logit
    correct: jax.Array  # [R] bool, whether `argmax` is the target


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_weight: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
) -> tuple[jax.Array, RowResults]:
    """Returns the loss Σ_r weights_r · (logsumexp(l_r) − l_r[targets_r] + z · logsumexp(l_r)²) of
    the logits l_r = x_r w, computed one chunk of rows after another, and results for each row.

    If the call is differentiated, the forward pass also computes the gradients of each chunk from
    the chunk's logits. The backward pass only multiplies the stored gradients by the gradient of
    the loss, a scalar. Each chunk of a differentiated call takes three matrix products. For a
    narrow model on a TPU, each chunk takes two more products, which compute the logits again,
    because computing logits takes less time than writing them to HBM and reading them. The arrays
    saved between the passes are dx [R, D], dw [D, V] and vectors [R]; no array [R, V] is saved.

    Args:
      x: [R, D], the inputs of the head, in the dtype of computation.
      w: [D, V], the weights of the head, cast to x's dtype for the products. Pass tied embeddings
        [V, D] transposed; XLA folds the transpose into the product.
      targets: [R] integers in [0, V). The target of a row of weight 0 may be any integer.
      weights: [R] float32, the weight of each row in the loss. The gradient with respect to a row's
        weight is the row's unweighted loss.
      z_weight: z, the weight of the z-loss (PaLM, 2204.02311, section 5), which keeps logsumexp
        near 0.
      softcap: c; the logits are c · tanh(x_r w / c) (Gemma 2, 2408.00118). 0: the logits are x_r w.
      chunk: number of rows in a chunk, at least 1; None means a number that suits the platform.

    Returns:
      loss_sum: float32 scalar.
      rows: the results for each row. If several logits of a row are equally large, `argmax` is the
        smallest of their indices.

    Raises:
      ValueError: shapes or dtypes do not fit, or `chunk` is less than 1.
    """
    _check_arguments(x, w, targets, weights, chunk)
    rows, vocabulary = x.shape[0], w.shape[1]
    if chunk is None:
        target = compile_target()
        elements = _CHUNK_ELEMENTS
        if target.platform == "gpu":
            least, most = _GPU_CHUNK_ELEMENTS
            elements = min(max(_GPU_CHUNK_ROWS_PER_WIDTH * w.size, least), most)
        if target.memory_bytes:
            elements = target.memory_bytes // (4 * _MEMORY_PART)
        chunk = max(elements // vocabulary, _MIN_CHUNK_ROWS)
        if target.platform != "cpu":
            # All chunks get about the same size; otherwise the last one could be mostly padding.
            chunk = -(-rows // -(-rows // chunk))
    settings = _LossSettings(min(chunk, rows), z_weight, softcap)
    return _differentiable_loss(settings, x, w, targets, weights)


class _LossSettings(NamedTuple):
    """The arguments `chunk_rows`, `z_loss_weight` and `softcap` of `linear_cross_entropy`."""

    chunk_rows: int
    z_loss_weight: float
    softcap: float

    def unweighted_row_losses(self, rows: RowResults) -> jax.Array:
        """Returns the loss of each row, [R], before its weight."""
        return rows.nll + self.z_loss_weight * rows.logsumexp**2 if self.z_loss_weight else rows.nll


def _check_arguments(x, w, targets, weights, chunk):
    checks.check_shapes(x=(x, "RD"), w=(w, "DV"), targets=(targets, "R"), weights=(weights, "R"))
    checks.check_integers(targets=targets)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_loss(settings, x, w, targets, weights):
    loss, rows, _ = _loss_and_gradients_by_chunk(settings, x, w, targets, weights, gradients=False)
    return loss, rows


def _loss_forward(settings, x, w, targets, weights):
    loss, rows, (dx, dw) = _loss_and_gradients_by_chunk(
        settings, x, w, targets, weights, gradients=True
    )
    # dw is cast to w's dtype only after it has been multiplied by the cotangent. The empty slice of
    # w tells the backward pass that dtype.
    return (loss, rows), (dx, dw, settings.unweighted_row_losses(rows), w[:0], weights[:0])


def _loss_backward(settings, residuals, cotangents):
    dx, dw, row_losses, w_empty, weights_empty = residuals
    scale = cotangents[0]
    return (
        (scale * dx).astype(dx.dtype),
        (scale * dw).astype(w_empty.dtype),
        None,
        (scale * row_losses).astype(weights_empty.dtype),
    )


_differentiable_loss.defvjp(_loss_forward, _loss_backward)


def _loss_and_gradients_by_chunk(settings: _LossSettings, x, w, targets, weights, *, gradients):
    """Returns (loss, rows, (dx, dw)). dw has the dtype of accumulation, at least float32. If
    `gradients` is False, dx and dw are None.
    """
    wide = jnp.promote_types(jnp.float32, x.dtype)
    w_DV = w.astype(x.dtype)

    def step(carry, inputs):
        loss, dw_DV = carry
        x_CD, target_C, weight_C = inputs
        figures, dx_CD, dw_chunk_DV = _chunk_results_and_gradients(
            settings, x_CD, w_DV, target_C, weight_C, wide, gradients
        )
        loss = loss + jnp.sum(weight_C * settings.unweighted_row_losses(figures))
        return (loss, dw_DV + dw_chunk_DV if gradients else None), (figures, dx_CD)

    zero = (jnp.zeros((), wide), jnp.zeros(w.shape, wide) if gradients else None)
    chunks = blocks.to_chunks(
        (x, targets.astype(jnp.int32), weights.astype(wide)), 0, settings.chunk_rows
    )
    (loss, dw), by_chunk = blocks.scan_or_call_once(step, zero, chunks)
    figures, dx = blocks.from_chunks(by_chunk, 0, x.shape[0])
    return loss, figures, (dx, dw)


def _chunk_results_and_gradients(
    settings: _LossSettings, x_CD, w_DV, target_C, weight_C, wide, gradients
):
    """Returns the `RowResults` of a chunk, dx [C, D], and the chunk's part of dw [D, V]. If
    `gradients` is False, dx and dw are None.
    """

    def product(*after):
        """Computes the logits. If arrays `after` are given, XLA computes the logits again, but only
        after the arrays `after` are known.
        """
        logits_CV = jnp.dot(
            jax.lax.optimization_barrier((x_CD, *after))[0], w_DV, preferred_element_type=wide
        )
        cap = settings.softcap
        return cap * jnp.tanh(logits_CV / cap) if cap else logits_CV

    logits_CV, chip = product(), compile_target().tpu_info
    # XLA fuses the reductions over the logits with the product that computes the logits, so that
    # the logits need not be written to HBM. Two more such products may take less time than writing
    # the logits once and reading them three times.
    recompute = chip and x_CD.shape[1] * chip.mem_bw_bytes_per_second < 3 * chip.bf16_ops_per_second

    def logits(*after):
        return product(*after) if recompute else logits_CV

    index_1V = jnp.arange(w_DV.shape[1], dtype=jnp.int32)[None]
    hit_CV = index_1V == target_C[:, None]
    largest_C = jnp.max(logits_CV, axis=1)
    # The index comes from the same product as the largest logit, because a repeated product may
    # round differently.
    best_C = (
        jnp.argmax(logits_CV, axis=1).astype(jnp.int32)
        if recompute
        else jnp.min(jnp.where(logits_CV == largest_C[:, None], index_1V, w_DV.shape[1]), axis=1)
    )
    logits_CV = logits(largest_C)
    total_C = jnp.sum(jnp.exp(logits_CV - largest_C[:, None]), axis=1)
    logsumexp_C = largest_C + jnp.log(total_C)
    target_logit_C = _target_logits(logits_CV, target_C, hit_CV)
    figures = RowResults(logsumexp_C - target_logit_C, logsumexp_C, best_C, best_C == target_C)
    if not gradients:
        return figures, None, None
    # The gradient of a logit is weight · softmax, minus the weight at the target. Computed as exp ·
    # (weight / total), it takes one division per row, not one per logit. The z-loss multiplies the
    # softmax by 1 + 2 z logsumexp.
    logits_CV = logits(total_C)
    exp_CV = jnp.exp(logits_CV - largest_C[:, None])
    of_softmax_C = weight_C
    if settings.z_loss_weight:
        of_softmax_C = weight_C * (1 + 2 * settings.z_loss_weight * logsumexp_C)
    dlogits_CV = exp_CV * (of_softmax_C / total_C)[:, None]
    dlogits_CV = dlogits_CV - jnp.where(hit_CV, weight_C[:, None], 0)
    if settings.softcap:
        dlogits_CV = dlogits_CV * (1 - jnp.square(logits_CV / settings.softcap))
    dlogits_CV = dlogits_CV.astype(x_CD.dtype)
    dx_CD = jnp.dot(dlogits_CV, w_DV.T, preferred_element_type=wide).astype(x_CD.dtype)
    dw_DV = jnp.dot(x_CD.T, dlogits_CV, preferred_element_type=wide)
    return figures, dx_CD, dw_DV


def _target_logits(logits_CV, target_C, hit_CV):
    """Returns the logit of each target [C]; 0 if the target is outside of the vocabulary.

    On a GPU, the function reads only the logits of the targets. A sum over all logits, masked by
    `hit_CV` (True at the targets), would read all logits once more. On other platforms, XLA fuses
    the masked sum with other reductions.
    """
    if compile_target().platform != "gpu":
        return jnp.sum(jnp.where(hit_CV, logits_CV, 0), axis=1)
    # An index below 0 would count from the end.
    index_C = jnp.where(target_C < 0, logits_CV.shape[1], target_C)
    found = jnp.take_along_axis(logits_CV, index_C[:, None], axis=1, mode="fill", fill_value=0)
    return found[:, 0]
