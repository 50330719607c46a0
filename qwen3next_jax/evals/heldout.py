"""The held-out evaluation: loss, perplexity, bits per byte and accuracy of next-token prediction on
held-out rows; and for every depth of multi-token prediction (MTP), the loss and the share of drafts
that greedy decoding would accept.

Letters: B batch, R rows of all batches, T time, D model, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.evals.evaluation import EvalContext, Evaluation
from qwen3next_jax.evals.scoring import place_on_mesh, replicated_sharding
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.targets import (
    has_target,
    mask_ignored_targets,
    target_tokens,
)
from qwen3next_jax.model.visible_targets import mask_seen_targets

Batch = dict[str, jax.Array]
_MIN_ROWS_PER_SOURCE = 8  # the least held-out rows of a source for a loss of its own


class Heldout(Evaluation):
    """The evaluation "heldout". If the data have several sources, the loss and the bits per byte
    are also measured for each source, on at least eight rows of the source if it has so many.

    The main metrics are bits per byte and the acceptance of drafts. If the model was trained on a
    synthetic task, accuracy is a main metric too, and there are no bits per byte. If the tokenizer
    does not tell how many bytes a token has, the loss is a main metric in place of bits per byte.
    """

    metrics = {
        "bits_per_byte": Metric("bits per byte", "bits", "lower", main=True),
        "loss": Metric("loss, nats per token", "nats", "lower"),
        "perplexity": Metric("perplexity per token", "", "lower"),
        "accuracy": Metric("accuracy", "share", "higher"),
        "mtp_loss": Metric("MTP loss", "nats", "lower"),
        "mtp_acceptance": Metric("drafts accepted", "share", "higher", main=True),
        "targets": Metric("tokens predicted", "count"),
        "bytes": Metric("bytes predicted", "count"),
    }

    settings_read = ()

    def __init__(self, eval_context: EvalContext):
        super().__init__(eval_context)
        self._step = make_heldout_step(eval_context.graphdef, eval_context.mesh)
        if not eval_context.tokenizer.reads_text:
            accuracy = dataclasses.replace(self.metrics["accuracy"], main=True)
            self.metrics = self.metrics | {"accuracy": accuracy}

    def run(self, params: dict) -> dict[str, float]:
        context = self.eval_context
        data = context.open_data()

        batches = context.heldout_batches(least=_MIN_ROWS_PER_SOURCE)
        rows = heldout_sums_by_row(
            self._step, params, batches, data.token_byte_counts, context.mesh
        )
        # The rows that a small source lacks come after those that make up the total.
        values = metrics_from_sums(sum_rows(rows, slice(context.options.rows)))
        places = data.heldout_places_by_source(context.options.rows, _MIN_ROWS_PER_SOURCE)
        values |= metrics_by_source({name: sum_rows(rows, own) for name, own in places.items()})
        if "bits_per_byte" not in values and context.tokenizer.reads_text:
            loss = dataclasses.replace(self.metrics["loss"], main=True)
            self.metrics = self.metrics | {"loss": loss}
        return values


def make_heldout_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[[dict, Batch, jax.Array], dict[str, jax.Array]]:
    """Returns a jitted function (params, batch, token_bytes) → dict of sums over the tokens of each
    row of the batch, [B]. `metrics_from_sums` turns the sums of all rows into metrics.

    `batch` has the arrays "tokens" and "segment_ids" [B, T] and may have "target_mask" [B, T]. If
    the batch has "loss_weights" [B, T], only tokens with a weight above 0 count, and all of them
    count equally. `token_bytes` [V] int32 is the number of UTF-8 bytes of each token, 0 for special
    tokens.

    Args:
      graphdef: the graph definition of the `Qwen3Next`.
      mesh: the mesh on which the parameters lie; None for a single device.
    """

    def step(params, batch, token_bytes):
        model: Qwen3Next = nnx.merge(graphdef, params)
        tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
        batch = mask_seen_targets(model.config, mask_ignored_targets(batch))
        features = model.features(tokens_BT, segment_ids_BT, mesh=mesh)

        def predict(hidden_BTD, offset):
            """Predicts from every position t the token at position t + `offset`.

            Returns:
              The sum of the losses of each row in nats, [B]; is_target [B, T] bool, whether the
              loss counts the token at t + `offset`; guess [B, T], the most likely token.
            """
            is_target_BT = has_target(batch, offset)
            found = model.cross_entropy(
                hidden_BTD,
                target_tokens(batch, offset),
                is_target_BT.astype(jnp.float32),
                mesh,
            )
            nll_B = jnp.sum(jnp.where(is_target_BT, found.nll, 0), axis=1)
            return nll_B, is_target_BT, found.best_token

        nll_B, is_target_BT, trunk_guess_BT = predict(features.hidden, 1)
        next_token_BT = target_tokens(batch, 1)
        bytes_BT = jnp.where(is_target_BT, token_bytes[next_token_BT], 0)
        correct_BT = is_target_BT & (trunk_guess_BT == next_token_BT)
        sums = {
            "nll": nll_B,
            "targets": jnp.sum(is_target_BT, axis=1),
            "bytes": jnp.sum(bytes_BT, axis=1),
            "correct": jnp.sum(correct_BT, axis=1),
        }
        # Greedy decoding accepts the draft of depth d if it and the drafts of all lower depths are
        # the tokens that the trunk itself would choose.
        accepted_BT = jnp.ones_like(is_target_BT)
        for d, hidden_BTD in enumerate(features.mtp_hidden):
            nll_B, is_target_BT, guess_BT = predict(hidden_BTD, 2 + d)
            accepted_BT &= guess_BT == jnp.roll(trunk_guess_BT, -(1 + d), axis=1)
            sums |= {
                f"mtp_nll/{d}": nll_B,
                f"mtp_targets/{d}": jnp.sum(is_target_BT, axis=1),
                f"mtp_accepted/{d}": jnp.sum(accepted_BT & is_target_BT, axis=1),
            }
        return sums

    return jax.jit(step, out_shardings=replicated_sharding(mesh))


def measure_and_sum_rows(
    step: Callable, params: dict, batches: Iterable[Batch], token_bytes: np.ndarray
) -> dict[str, float]:
    """Runs `step` over the batches and adds up the sums of all rows, for `metrics_from_sums`."""
    return sum_rows(heldout_sums_by_row(step, params, batches, token_bytes))


def heldout_sums_by_row(
    step: Callable,
    params: dict,
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    mesh: Mesh | None = None,
) -> dict[str, np.ndarray]:
    """Runs `step` over the batches and returns the sums of each row, [R], in the order of the rows.

    Args:
      step: the function that `make_heldout_step` returned.
      params: the model's parameters.
      batches: the arguments `batch` of `step`; host arrays, if there is a mesh.
      token_bytes: [V] int32, the number of UTF-8 bytes of each token, 0 for special tokens.
      mesh: the mesh on which the parameters lie; None for a single device.
    """
    token_bytes = jnp.asarray(token_bytes)
    found = []
    for batch in batches:
        sums = jax.device_get(step(params, place_on_mesh(batch, mesh), token_bytes))
        # `place_on_mesh` may have added empty rows at the end.
        found.append({name: x[: len(batch["tokens"])] for name, x in sums.items()})
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def sum_rows(
    rows: Mapping[str, np.ndarray], chosen: slice | Sequence[int] = slice(None)
) -> dict[str, float]:
    """Returns name → the sum of `rows[name]` over the chosen rows."""
    return {name: float(np.sum(x[chosen], dtype=np.float64)) for name, x in rows.items()}


def metrics_by_source(totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the loss and the bits per byte of each source of the held-out rows, as
    "loss/SOURCE" and "bits_per_byte/SOURCE".

    Args:
      totals: name of a source → the sums over the rows of the source.
    """
    metrics = {}
    for source, total in totals.items():
        for name, value in metrics_from_sums(total).items():
            if name in ("loss", "bits_per_byte"):
                metrics[f"{name}/{source}"] = value
    return metrics


def metrics_from_sums(total: dict[str, float]) -> dict[str, float]:
    """Computes the held-out metrics from the sums over all rows.

    Returns:
      loss: nats per token.
      perplexity: per token.
      accuracy: the share of targets that are the trunk's most likely token.
      bits_per_byte: the loss in bits per UTF-8 byte of the predicted tokens; absent if the bytes of
        tokens are not known (`DataSource.token_byte_counts`), as in synthetic tasks.
      targets, bytes: the number of predicted tokens, and the number of their UTF-8 bytes; the other
        metrics are absent if no token was predicted.
      mtp_loss/d: nats per token, for each MTP depth d from 0.
      mtp_acceptance/d: the share of positions at which the drafts of depths 0 … d all match the
        trunk's own greedy tokens.
    """
    targets = total["targets"]
    if not targets:
        return {"targets": 0.0, "bytes": 0.0}
    loss = total["nll"] / targets
    result = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "accuracy": total["correct"] / targets,
    }
    if total["bytes"]:
        result["bits_per_byte"] = total["nll"] / total["bytes"] / math.log(2)
    result |= {"targets": total["targets"], "bytes": total["bytes"]}
    depth = 0
    while f"mtp_nll/{depth}" in total:
        drafts = max(total[f"mtp_targets/{depth}"], 1.0)
        result[f"mtp_loss/{depth}"] = total[f"mtp_nll/{depth}"] / drafts
        result[f"mtp_acceptance/{depth}"] = total[f"mtp_accepted/{depth}"] / drafts
        depth += 1
    return result
