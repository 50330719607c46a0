"""Scores given tokens: computes the loss of each token, and the token that the model finds most
likely in its place.

This module also has the functions with which all evaluations place batches on the mesh.

Letters: B batch, T time, D model.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.visible_targets import check_causal_for_scoring
from qwen3next_jax.sharding.batch_layout import BatchLayout
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, batch_sharding, num_shards

# A scorer maps tokens [B, T] and segment_ids [B, T] (or None: every row is one document) to
# (nll [B, T-1] in nats, guess [B, T-1]): for tokens 1 … T-1, the negative log-likelihood given the
# tokens before it in its document, and the most likely token. Guesses are token ids.
Scorer = Callable[..., tuple[np.ndarray, np.ndarray]]


def make_score_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a jitted function (params, tokens [B, T], segment_ids [B, T]) → (nll [B, T],
    guess [B, T]).

    Position t of nll holds the loss (nats) of token t + 1; position t of guess holds the token that
    the model finds most likely in the place of token t + 1. The values at the last position have no
    meaning.

    Args:
      graphdef: the graph definition of the `Qwen3Next`.
      mesh: the mesh on which the parameters lie; None for a single device.
    """

    def step(params, tokens_BT, segment_ids_BT):
        model: Qwen3Next = nnx.merge(graphdef, params)
        check_causal_for_scoring(model.config)
        hidden_BTD = model.features(tokens_BT, segment_ids_BT, mesh=mesh).hidden
        weights_BT = jnp.ones(tokens_BT.shape, jnp.float32)
        found = model.cross_entropy(hidden_BTD, jnp.roll(tokens_BT, -1, axis=1), weights_BT, mesh)
        return found.nll, found.best_token

    return jax.jit(step, out_shardings=replicated_sharding(mesh))


def make_scorer(step: Callable, params: dict, mesh: Mesh | None = None) -> Scorer:
    """Returns a scorer (see `Scorer`) of the model with the parameters `params`. The scorer is
    compiled once for every shape of rows.

    Args:
      step: the function that `make_score_step` returned for the same mesh.
      params: the model's parameters, on the mesh.
      mesh: the mesh on which the parameters lie; None for a single device. If several processes
        share the mesh, all of them must call the scorer with the same rows.
    """

    def score(
        tokens: np.ndarray, segment_ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        batch = {
            "tokens": tokens,
            "segment_ids": np.ones_like(tokens) if segment_ids is None else segment_ids,
        }
        rows, length = tokens.shape
        nll_BT, guess_BT = jax.device_get(step(params, *place_on_mesh(batch, mesh).values()))
        return nll_BT[:rows, : length - 1], guess_BT[:rows, : length - 1]

    return score


def place_on_mesh(
    batch: dict[str, np.ndarray], mesh: Mesh | None
) -> dict[str, jax.Array | np.ndarray]:
    """Shards arrays [B, T] over the mesh as `Qwen3Next.features` expects them.

    The function first pads the batch with empty rows to a number of rows that the mesh divides. If
    the mesh axis `context` splits rows, the function also pads each row with padding tokens to a
    multiple of 16 tokens per device. Without a mesh it returns the batch unchanged.

    Args:
      batch: host arrays with all rows, the same in every process.
    """
    if mesh is None:
        return batch
    rows, length = next(iter(batch.values())).shape
    context = num_shards(mesh, CONTEXT)
    # With context parallelism every device gets a multiple of 16 tokens. That is more tokens than a
    # convolution reads from the neighbouring device. The number is even, because attention divides
    # a device's tokens into two halves.
    empty_rows = -rows % num_shards(mesh, *ROWS)
    padding = -length % (16 * context) if context > 1 else 0
    batch = {name: np.pad(x, ((0, empty_rows), (0, padding))) for name, x in batch.items()}
    layout = _batch_layout(mesh, rows + empty_rows)
    return layout.to_global({name: x[layout.rows] for name, x in batch.items()})


@functools.lru_cache(maxsize=64)
def _batch_layout(mesh: Mesh, rows: int) -> BatchLayout:
    return BatchLayout(batch_sharding(mesh), rows)


def replicated_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of an array that every device holds completely; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
