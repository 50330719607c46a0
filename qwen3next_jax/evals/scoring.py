"""What a model says of given tokens: per position the loss of the next token and the best guess for it.

Every evaluation but free generation is one of these. Letters: B batch, T time, D model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.ops import linear_cross_entropy

# tokens [B, T], segment_ids [B, T] or None → (nll [B, T-1] in nats, guess [B, T-1]) of tokens 1 … T-1, each given those before
# it in its document.
Scorer = Callable[..., tuple[np.ndarray, np.ndarray]]


def make_score_step(graphdef: nnx.GraphDef) -> Callable[[dict, np.ndarray, np.ndarray], tuple[jax.Array, jax.Array]]:
    """→ jitted `step(params, tokens, segment_ids)` → (nll [B, T], guess [B, T]); the last position means nothing."""
    @jax.jit
    def step(params, tokens_BT, segment_ids_BT):
        model: Qwen3Next = nnx.merge(graphdef, params)
        hidden_BTD = model.features(tokens_BT, segment_ids_BT).hidden
        _, rows = linear_cross_entropy(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), model.head_weight(),
                                       jnp.roll(tokens_BT, -1, axis=1).reshape(-1), jnp.ones(tokens_BT.size, jnp.float32))
        return rows.nll.reshape(tokens_BT.shape), rows.argmax.reshape(tokens_BT.shape)
    return step


def make_scorer(step: Callable, params: dict) -> Scorer:
    """The scorer of one set of parameters; compiles once per shape of the rows it is given."""
    def score(tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        if segment_ids is None:
            segment_ids = np.ones_like(tokens)
        nll_BT, guess_BT = jax.device_get(step(params, tokens, segment_ids))
        return nll_BT[:, :-1], guess_BT[:, :-1]
    return score
