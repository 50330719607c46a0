"""Loss by position in the document: does a long context help?

Letters: B batch, T time.
"""

import math
from collections.abc import Iterable

import numpy as np

from qwen3next_jax.common.figures import Figure
from qwen3next_jax.evals.evaluation import Evaluation
from qwen3next_jax.evals.scoring import Scorer

Batch = dict[str, np.ndarray]


class Position(Evaluation):
    figures = {
        "loss": Figure("loss, nats per token", "nats", "lower"),
        "bits_per_byte": Figure("bits per byte", "bits", "lower"),
        "targets": Figure("tokens predicted", "count"),
    }
    settings = ()

    def run(self, params: dict) -> dict[str, float]:
        return loss_by_position(
            self.subject.scorer(params), self.subject.heldout(), self.subject.tokenizer.token_bytes
        )


def loss_by_position(
    scorer: Scorer, batches: Iterable[Batch], token_bytes: np.ndarray
) -> dict[str, float]:
    """Mean loss of tokens by how many tokens of their document precede them, in buckets that
    double: 1, 2-3, 4-7, …

    Returns:
      loss/FIRST-LAST in nats per token and, where tokens stand for bytes,
      bits_per_byte/FIRST-LAST, for every bucket with tokens, then loss and bits_per_byte over
      all; targets/FIRST-LAST counts them.
    """
    sums: dict[int, np.ndarray] = {}
    for batch in batches:
        tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
        nll_BT, _ = scorer(tokens_BT, segment_ids_BT)
        inside_BT = (segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]) & (segment_ids_BT[:, 1:] > 0)
        if "target_mask" in batch:
            inside_BT &= batch["target_mask"][:, 1:]
        bucket_BT = np.floor(np.log2(np.maximum(_preceding(segment_ids_BT)[:, 1:], 1))).astype(int)
        bytes_BT = token_bytes[tokens_BT[:, 1:]]
        for bucket in np.unique(bucket_BT[inside_BT]).tolist():
            chosen = inside_BT & (bucket_BT == bucket)
            found = np.array(
                [nll_BT[chosen].sum(), chosen.sum(), bytes_BT[chosen].sum()], np.float64
            )
            sums[bucket] = sums.get(bucket, 0) + found
    result = {}
    for bucket in sorted(sums):
        result |= _figures(f"/{2**bucket}-{2 ** (bucket + 1) - 1}", *sums[bucket])
    return result | (_figures("", *sum(sums.values())) if sums else {})


def _figures(suffix: str, nll: float, targets: float, n_bytes: float) -> dict[str, float]:
    bits = {f"bits_per_byte{suffix}": nll / n_bytes / math.log(2)} if n_bytes else {}
    return {f"loss{suffix}": nll / targets} | bits | {f"targets{suffix}": targets}


def _preceding(segment_ids_BT: np.ndarray) -> np.ndarray:
    """How many tokens of its document stand before each token in the row."""
    index_BT = np.broadcast_to(np.arange(segment_ids_BT.shape[1]), segment_ids_BT.shape)
    starts_BT = np.pad(
        segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return index_BT - np.maximum.accumulate(np.where(starts_BT, index_BT, 0), axis=1)
