"""What a model says of given tokens: per position the loss of the next token and the best guess for it.

Every evaluation but free generation is one of these. Letters: B batch, T time, D model.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.ops import linear_cross_entropy


class Scorer:
    """Compiles once per shape of the rows it is given."""

    def __init__(self, model: Qwen3Next):
        self.config = model.config
        graphdef, params = nnx.split(model, nnx.Param)
        self._params = nnx.to_pure_dict(params)

        @jax.jit
        def score(params, tokens_BT, segment_ids_BT):
            model: Qwen3Next = nnx.merge(graphdef, params)
            hidden_BTD = model.features(tokens_BT, segment_ids_BT).hidden
            target_BT = jnp.roll(tokens_BT, -1, axis=1)
            _, rows = linear_cross_entropy(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), model.head_weight(),
                                           target_BT.reshape(-1), jnp.ones(target_BT.size, jnp.float32))
            return rows.nll.reshape(target_BT.shape), rows.argmax.reshape(target_BT.shape)

        self._score = score

    def __call__(self, tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """tokens [B, T] → (nll [B, T-1] in nats, guess [B, T-1]) of tokens 1 … T-1, each given those before it in its
        document. `segment_ids` [B, T] as in `Qwen3Next`; None: every row is one document."""
        if segment_ids is None:
            segment_ids = np.ones_like(tokens)
        nll_BT, guess_BT = jax.device_get(self._score(self._params, tokens, segment_ids))
        return nll_BT[:, :-1], guess_BT[:, :-1]
