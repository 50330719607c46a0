"""What a model says of given tokens: per position the loss of the next token and the best guess
for it.

Every evaluation but free generation is one of these. Letters: B batch, T time, D model.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.visible_targets import check_scoring
from qwen3next_jax.sharding.batch_layout import BatchLayout
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, batch_sharding, num_shards

# tokens [B, T], segment_ids [B, T] or None → (nll [B, T-1] in nats, guess [B, T-1]) of tokens 1 …
# T-1, each given those before it in its document.
Scorer = Callable[..., tuple[np.ndarray, np.ndarray]]


def make_score_step(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """→ jitted `step(params, tokens, segment_ids)` → (nll [B, T], guess [B, T]); the last
    position means nothing.
    """

    def step(params, tokens_BT, segment_ids_BT):
        model: Qwen3Next = nnx.merge(graphdef, params)
        check_scoring(model.config)
        hidden_BTD = model.features(tokens_BT, segment_ids_BT, mesh=mesh).hidden
        weights_BT = jnp.ones(tokens_BT.shape, jnp.float32)
        _, _, guess_BT, nll_BT = model.cross_entropy(
            hidden_BTD, jnp.roll(tokens_BT, -1, axis=1), weights_BT, mesh
        )
        return nll_BT, guess_BT

    return jax.jit(step, out_shardings=everywhere(mesh))


def make_scorer(step: Callable, params: dict, mesh: Mesh | None = None) -> Scorer:
    """The scorer of one set of parameters; compiles once per shape of the rows it is given. On a
    mesh of several processes all of them give it the same rows.
    """

    def score(
        tokens: np.ndarray, segment_ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        batch = {
            "tokens": tokens,
            "segment_ids": np.ones_like(tokens) if segment_ids is None else segment_ids,
        }
        rows, length = tokens.shape
        nll_BT, guess_BT = jax.device_get(step(params, *place(batch, mesh).values()))
        return nll_BT[:rows, : length - 1], guess_BT[:rows, : length - 1]

    return score


def place(batch: dict[str, np.ndarray], mesh: Mesh | None) -> dict[str, jax.Array | np.ndarray]:
    """Whole rows [B, T] on the host, the same in every process → where `Qwen3Next.features`
    wants them on the mesh, filled up with empty rows and with padding to what its axes divide.
    """
    if mesh is None:
        return batch
    rows, length = next(iter(batch.values())).shape
    context = num_shards(mesh, CONTEXT)
    # 16 tokens on every device are more than a convolution reads of its neighbour, and divide into
    # attention's half blocks.
    more = -rows % num_shards(mesh, *ROWS), -length % (16 * context if context > 1 else 1)
    batch = {name: np.pad(x, ((0, more[0]), (0, more[1]))) for name, x in batch.items()}
    layout = _layout(mesh, rows + more[0])
    return layout.to_global({name: x[layout.rows] for name, x in batch.items()})


@functools.lru_cache(maxsize=64)
def _layout(mesh: Mesh, rows: int) -> BatchLayout:
    return BatchLayout(batch_sharding(mesh), rows)


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Of what every process of the run reads whole."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
