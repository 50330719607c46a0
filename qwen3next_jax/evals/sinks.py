"""Attention sinks and massive activations: how much attention goes to the first token of a
document, and how far the largest activation stands out. A gate on attention's output removes
both (2505.06708, whose figures are .467 → .048 and 1053 → 94).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.figures import Figure
from qwen3next_jax.evals.evaluation import Evaluation, Subject
from qwen3next_jax.evals.scoring import everywhere, place
from qwen3next_jax.model.layers import SINK_HEAD


class Sinks(Evaluation):
    figures = {
        "first_token_share": Figure("attention on the first token", "share", "lower", main=True),
        "first_token_heads": Figure(
            f"heads with more than {SINK_HEAD} of it there", "share", "lower", main=True
        ),
        "activation_max": Figure("largest activation", "", "lower", main=True),
        "activation_ratio": Figure("largest over median activation", "", "lower", main=True),
    }

    settings = ()

    def __init__(self, subject: Subject):
        super().__init__(subject)
        self._step = make_probe_step(subject.graphdef, subject.mesh)

    def run(self, params: dict) -> dict[str, float]:
        batches = (place(batch, self.subject.mesh) for batch in self.subject.heldout(32))
        return sinks(self._step, params, batches, self.subject.config.num_hidden_layers)


def make_probe_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[..., tuple[dict[str, jax.Array], ...]]:
    """→ jitted `step(params, tokens [B, T], segment_ids [B, T])` → what every layer says of
    itself, the MTP module's last.
    """

    def step(params, tokens_BT, segment_ids_BT):
        return (
            nnx.merge(graphdef, params)
            .features(tokens_BT, segment_ids_BT, diagnose=True, mesh=mesh)
            .diagnostics
        )

    return jax.jit(step, out_shardings=everywhere(mesh))


def sinks(
    step: Callable, params: dict, batches: Iterable[dict[str, np.ndarray]], layers: int
) -> dict[str, float]:
    """Runs `step` over `batches`, for the `layers` of the trunk.

    Returns:
      first_token_share: probability of attention on the document's first token, mean over heads,
      tokens after it and attention
        layers; first_token_share/layer I of each; first_token_heads: share of heads where it is
        above SINK_HEAD.
      activation_max/layer I: the largest |x| of the residual stream after the layer;
      activation_max over all layers;
        activation_ratio: the largest of the layers' activation_max over the median |x|.
    """
    measured: list[Any] = [
        jax.device_get(step(params, batch["tokens"], batch["segment_ids"])) for batch in batches
    ]
    shares, largest, ratios = {}, {}, []
    for i, batches_of_layer in enumerate(zip(*(batch[:layers] for batch in measured), strict=True)):
        largest[i] = max(float(layer["activation_max"]) for layer in batches_of_layer)
        ratios.append(
            largest[i]
            / max(float(np.mean([layer["activation_median"] for layer in batches_of_layer])), 1e-12)
        )
        if "first_token_share" in batches_of_layer[0]:
            # per head
            shares[i] = np.mean([layer["first_token_share"] for layer in batches_of_layer], axis=0)
    values = {}
    if shares:
        heads = np.stack(list(shares.values()))
        values = {
            "first_token_share": float(heads.mean()),
            "first_token_heads": float((heads > SINK_HEAD).mean()),
        }
    values |= {"activation_max": max(largest.values()), "activation_ratio": max(ratios)}
    values |= {f"first_token_share/layer {i}": float(share.mean()) for i, share in shares.items()}
    return values | {f"activation_max/layer {i}": value for i, value in largest.items()}
