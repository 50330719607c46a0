"""Held-out loss, perplexity and bits per byte, and per depth of multi-token prediction its loss
and acceptance.

Letters: B batch, T time, D model, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.figures import Figure
from qwen3next_jax.evals.evaluation import Evaluation, Subject
from qwen3next_jax.evals.scoring import place
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.multi_token_prediction import target_positions
from qwen3next_jax.model.visible_targets import mask_seen_targets

Batch = dict[str, jax.Array]


class Heldout(Evaluation):
    """What is judged is the loss in bits per byte, or the accuracy where tokens are no text."""

    figures = {
        "bits_per_byte": Figure("bits per byte", "bits", "lower", main=True),
        "loss": Figure("loss, nats per token", "nats", "lower"),
        "perplexity": Figure("perplexity per token", "", "lower"),
        "accuracy": Figure("accuracy", "share", "higher"),
        "mtp_loss": Figure("MTP loss at depth", "nats", "lower"),
        "mtp_acceptance": Figure("drafts accepted at depth", "share", "higher", main=True),
        "targets": Figure("tokens predicted", "count"),
        "bytes": Figure("bytes predicted", "count"),
    }

    settings = ()

    def __init__(self, subject: Subject):
        super().__init__(subject)
        self._step = make_heldout_step(subject.graphdef, subject.mesh)
        if not subject.tokenizer.reads_text:
            self.figures = self.figures | {
                "accuracy": dataclasses.replace(self.figures["accuracy"], main=True)
            }

    def run(self, params: dict) -> dict[str, float]:
        batches = (place(batch, self.subject.mesh) for batch in self.subject.heldout())
        return evaluate_heldout(self._step, params, batches, self.subject.tokenizer.token_bytes)


def make_heldout_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[[dict, Batch, jax.Array], dict[str, jax.Array]]:
    """→ jitted `step(params, batch, token_bytes)` → sums over the batch, to be added up and
    given to `summarise`.

    token_bytes: [V] int32, UTF-8 bytes of each token (0 for special ones). mesh: as in
    `Qwen3Next.features`.
    """

    def step(params, batch, token_bytes):
        model: Qwen3Next = nnx.merge(graphdef, params)
        tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
        batch = mask_seen_targets(model.config, batch)
        features = model.features(tokens_BT, segment_ids_BT, mesh=mesh)

        def predict(hidden_BTD, offset):
            """(sum of losses, [B, T] whether the token `offset` later is a target, [B, T] best
            guess for it).
            """
            inside_BT = target_positions(batch, offset)
            nll, _, guess_BT, _ = model.cross_entropy(
                hidden_BTD,
                jnp.roll(tokens_BT, -offset, axis=1),
                inside_BT.astype(jnp.float32),
                mesh,
            )
            return nll, inside_BT, guess_BT

        nll, inside_BT, trunk_guess_BT = predict(features.hidden, 1)
        bytes_BT = jnp.where(inside_BT, token_bytes[jnp.roll(tokens_BT, -1, axis=1)], 0)
        hit_BT = inside_BT & (trunk_guess_BT == jnp.roll(tokens_BT, -1, axis=1))
        sums = {
            "nll": nll,
            "targets": jnp.sum(inside_BT),
            "bytes": jnp.sum(bytes_BT),
            "correct": jnp.sum(hit_BT),
        }
        # A draft is accepted as far as it says what the trunk itself would have said, one depth
        # after another.
        agreed_BT = jnp.ones_like(inside_BT)
        for d, hidden_BTD in enumerate(features.mtp_hidden):
            nll, inside_BT, guess_BT = predict(hidden_BTD, 2 + d)
            agreed_BT &= guess_BT == jnp.roll(trunk_guess_BT, -(1 + d), axis=1)
            sums |= {
                f"mtp_nll/{d}": nll,
                f"mtp_targets/{d}": jnp.sum(inside_BT),
                f"mtp_accepted/{d}": jnp.sum(agreed_BT & inside_BT),
            }
        return sums

    return jax.jit(step)


def evaluate_heldout(
    step: Callable, params: dict, batches: Iterable[Batch], token_bytes: np.ndarray
) -> dict[str, float]:
    """Runs `step` over `batches` and summarises: see `summarise`."""
    token_bytes = jnp.asarray(token_bytes)
    total: dict[str, float] = {}
    for batch in batches:
        for name, value in jax.device_get(step(params, batch, token_bytes)).items():
            total[name] = total.get(name, 0.0) + float(value)
    return summarise(total)


def summarise(total: dict[str, float]) -> dict[str, float]:
    """Sums → loss (nats per token), perplexity, accuracy, bits_per_byte, and mtp_loss/d,
    mtp_acceptance/d per depth.

    Where tokens stand for no text (synthetic tasks) there is no bits_per_byte.

    Acceptance at depth d is the share of positions whose drafts 0 … d all match the trunk's own
    greedy tokens.
    """
    targets = max(total["targets"], 1.0)
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
        possible = max(total[f"mtp_targets/{depth}"], 1.0)
        result[f"mtp_loss/{depth}"] = total[f"mtp_nll/{depth}"] / possible
        result[f"mtp_acceptance/{depth}"] = total[f"mtp_accepted/{depth}"] / possible
        depth += 1
    return result
