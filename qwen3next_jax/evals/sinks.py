"""Measures attention sinks and massive activations.

An attention sink is a head that gives much of its attention to the first token of the document. A
massive activation is an entry of the residual stream whose magnitude is far above the median. A
gate on the output of attention removes attention sinks and massive activations: "Gated Attention
for Large Language Models" (arXiv 2505.06708) reports that the share of attention on the first token
falls from .467 to .048, and the largest activation from 1053 to 94.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.evals.evaluation import EvalContext, Evaluation
from qwen3next_jax.evals.scoring import place_on_mesh, replicated_sharding
from qwen3next_jax.model.layers import SINK_HEAD, ForwardOptions

_ROWS = 32  # held-out rows, if the user chooses no other number


class AttentionSinks(Evaluation):
    """The evaluation "sinks": attention sinks and massive activations on held-out rows."""

    metrics = {
        "first_token_share": Metric("attention on the first token", "share", "lower", main=True),
        "first_token_heads": Metric(
            f"heads with more than {SINK_HEAD} on the first token", "share", "lower", main=True
        ),
        "activation_max": Metric("largest activation", "", "lower", main=True),
        "activation_ratio": Metric("largest over median activation", "", "lower", main=True),
    }

    settings_read = ()

    def __init__(self, eval_context: EvalContext):
        super().__init__(eval_context)
        self._step = make_layer_stats_step(eval_context.graphdef, eval_context.mesh)

    def run(self, params: dict) -> dict[str, float]:
        mesh, config = self.eval_context.mesh, self.eval_context.model_config
        batches = (place_on_mesh(batch, mesh) for batch in self.eval_context.heldout_batches(_ROWS))
        return measure_sinks(self._step, params, batches, config.num_hidden_layers)


def make_layer_stats_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[..., tuple[tuple[dict[str, jax.Array], ...], dict[str, jax.Array]]]:
    """Returns a jitted function (params, tokens [B, T], segment_ids [B, T]) → (diagnostics,
    counts).

    diagnostics has one dict of statistics per layer, which are means over the batch; the dict of
    the multi-token prediction module, if there is one, is last. counts["tokens"] is the number of
    tokens of the batch, counts["later_tokens"] the number of those that are not the first of their
    document.
    """

    def step(params, tokens_BT, segment_ids_BT):
        model = nnx.merge(graphdef, params)
        options = ForwardOptions(collect_stats=True)
        features = model.features(tokens_BT, segment_ids_BT, mesh=mesh, options=options)
        is_token_BT = segment_ids_BT > 0
        same_document_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
        counts = {
            "tokens": jnp.sum(is_token_BT),
            "later_tokens": jnp.sum(is_token_BT[:, 1:] & same_document_BT),
        }
        return features.diagnostics, counts

    return jax.jit(step, out_shardings=replicated_sharding(mesh))


def measure_sinks(
    step: Callable, params: dict, batches: Iterable[dict[str, np.ndarray]], layers: int
) -> dict[str, float]:
    """Runs `step` over the batches and summarises the statistics of the first `layers` layers. Each
    token counts equally; the last batch may have fewer than the others.

    Returns:
      first_token_share: the attention probability on the first token of the document, averaged
        over attention layers, heads, and all queries after the first token;
        first_token_share/layer I: the mean over the queries and heads of layer I.
      first_token_heads: the share of heads whose first_token_share exceeds SINK_HEAD.
      activation_max/layer I: the largest |x| of the residual stream after the layer;
        activation_max: the largest over all layers.
      activation_ratio: activation_max of a layer divided by the median |x| after the layer; the
        largest over all layers.
    """
    measured: list[Any] = [
        jax.device_get(step(params, batch["tokens"], batch["segment_ids"])) for batch in batches
    ]
    diagnostics_of_layers = zip(*(found[:layers] for found, _ in measured), strict=True)
    tokens, later_tokens = (
        [max(int(counts[name]), 1) for _, counts in measured] for name in ("tokens", "later_tokens")
    )
    shares: dict[int, np.ndarray] = {}  # layer → [heads]
    largest, ratios = {}, []
    for i, diagnostics in enumerate(diagnostics_of_layers):
        largest[i] = max(float(batch["activation_max"]) for batch in diagnostics)
        medians = [batch["activation_median"] for batch in diagnostics]
        median = float(np.average(medians, weights=tokens))
        ratios.append(largest[i] / max(median, 1e-12))
        if "first_token_share" in diagnostics[0]:
            of_batches = [batch["first_token_share"] for batch in diagnostics]
            shares[i] = np.average(of_batches, axis=0, weights=later_tokens)
    values = {}
    if shares:
        share_of_heads = np.stack(list(shares.values()))
        values["first_token_share"] = float(share_of_heads.mean())
        values["first_token_heads"] = float((share_of_heads > SINK_HEAD).mean())
    values |= {"activation_max": max(largest.values()), "activation_ratio": max(ratios)}
    values |= {f"first_token_share/layer {i}": float(share.mean()) for i, share in shares.items()}
    return values | {f"activation_max/layer {i}": value for i, value in largest.items()}
