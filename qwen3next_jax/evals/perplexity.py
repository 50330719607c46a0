"""Measures how the loss of a token depends on the token's position in its document. If the model
uses a long context, the loss falls with the position.

Letters: B batch, T time.
"""

import math
from collections.abc import Iterable

import numpy as np

from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.evals.evaluation import Evaluation
from qwen3next_jax.evals.scoring import Scorer

Batch = dict[str, np.ndarray]


class LossByPosition(Evaluation):
    """The evaluation "position": held-out loss by position in the document."""

    metrics = {
        "loss": Metric("loss, nats per token", "nats", "lower"),
        "bits_per_byte": Metric("bits per byte", "bits", "lower"),
        "targets": Metric("tokens predicted", "count"),
    }
    settings_read = ()

    def run(self, params: dict) -> dict[str, float]:
        return loss_by_position(
            self.eval_context.scorer(params),
            self.eval_context.heldout_batches(),
            self.eval_context.open_data().token_byte_counts,
        )


def loss_by_position(
    scorer: Scorer, batches: Iterable[Batch], token_bytes: np.ndarray
) -> dict[str, float]:
    """Computes the mean loss of tokens in buckets. A token's bucket depends on the number of tokens
    before it in its document: 1, 2-3, 4-7, …

    Args:
      scorer: computes the loss of every token.
      batches: host arrays "tokens" and "segment_ids" [B, T]; "target_mask" and "loss_weights" [B,
        T], where present, say which tokens count: tokens whose mask is true, and whose weight is
        above 0.
      token_bytes: [V] int32, the number of UTF-8 bytes of each token.

    Returns:
      loss/FIRST-LAST: nats per token, for every bucket that has tokens.
      bits_per_byte/FIRST-LAST: the loss in bits per UTF-8 byte; absent if the bytes of tokens are
        not known (`DataSource.token_byte_counts`), as in synthetic tasks.
      targets/FIRST-LAST: the number of tokens in the bucket.
      loss, bits_per_byte, targets: the values over all buckets together.
    """
    sums: dict[int, np.ndarray] = {}  # bucket → (sum of losses in nats, tokens, bytes)
    for batch in batches:
        tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
        nll_BT, _ = scorer(tokens_BT, segment_ids_BT)
        same_document_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
        is_target_BT = same_document_BT & (segment_ids_BT[:, 1:] > 0)
        if "target_mask" in batch:
            is_target_BT &= batch["target_mask"][:, 1:]
        if "loss_weights" in batch:
            is_target_BT &= batch["loss_weights"][:, 1:] > 0
        position_BT = _position_in_document(segment_ids_BT)[:, 1:]
        bucket_BT = np.floor(np.log2(np.maximum(position_BT, 1))).astype(int)
        bytes_BT = token_bytes[tokens_BT[:, 1:]]
        for bucket in np.unique(bucket_BT[is_target_BT]).tolist():
            chosen_BT = is_target_BT & (bucket_BT == bucket)
            bucket_sums = [nll_BT[chosen_BT].sum(), chosen_BT.sum(), bytes_BT[chosen_BT].sum()]
            sums[bucket] = sums.get(bucket, 0) + np.array(bucket_sums, np.float64)
    result = {}
    for bucket in sorted(sums):
        result |= _bucket_metrics(f"/{2**bucket}-{2 ** (bucket + 1) - 1}", *sums[bucket])
    return result | (_bucket_metrics("", *sum(sums.values())) if sums else {})


def _bucket_metrics(suffix: str, nll: float, targets: float, n_bytes: float) -> dict[str, float]:
    """Returns the metrics of one bucket.

    Args:
      suffix: the end of the metrics' names.
      nll: the sum of the losses of the bucket's tokens, in nats.
      targets: the number of these tokens.
      n_bytes: the number of their UTF-8 bytes.
    """
    bits = {f"bits_per_byte{suffix}": nll / n_bytes / math.log(2)} if n_bytes else {}
    return {f"loss{suffix}": nll / targets} | bits | {f"targets{suffix}": targets}


def _position_in_document(segment_ids_BT: np.ndarray) -> np.ndarray:
    """Returns the number of tokens before each token in its document, [B, T]."""
    index_BT = np.broadcast_to(np.arange(segment_ids_BT.shape[1]), segment_ids_BT.shape)
    starts_BT = np.pad(
        segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return index_BT - np.maximum.accumulate(np.where(starts_BT, index_BT, 0), axis=1)
