"""Linear attention (2006.16236, equations 16–20): softmax's exponential replaced by a product of
features.
"""

import dataclasses
from typing import Literal

import jax

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.mixers.recurrent import Additive, Inputs

EPSILON = 1e-6  # added to the sum of the weights


class Linear(Additive):
    """o = Sᵀφ(q) / (zᵀφ(q) + ε), S += φ(k) vᵀ, z += φ(k), φ = elu + 1. `mixer.feature_map`
    "identity" and `mixer.normaliser` off: the plain sum Σ v (k·q).
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # of queries and keys; elu(x) + 1 is the paper's
        feature_map: Literal["elu", "identity"] = "elu"
        # whether the sum of the weights divides the output; needs positive features
        normaliser: bool = True

        def __post_init__(self):
            require(
                self.feature_map == "elu" or not self.normaliser,
                "model.mixer.normaliser = True with model.mixer.feature_map = "
                "'identity': the sum of the weights may vanish: expected "
                "model.mixer.normaliser = False, or the feature map 'elu'",
            )

    def __init__(self, config, make, layers):
        self.config = config
        self.make_projection(make, gate=False)
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        return Inputs(self.project(x_BTD, context)[0])

    def recurrence(self, heads, state):
        feature = (
            (lambda x: jax.nn.elu(x) + 1)
            if self.settings(self.config).feature_map == "elu"
            else lambda x: x
        )
        heads = heads._replace(q=feature(heads.q), k=feature(heads.k))
        if not self.settings(self.config).normaliser:
            return super().recurrence(heads, state)
        o, weight, states = self.weighted(heads, state)
        return (o / (weight[..., None] + EPSILON)).astype(heads.v.dtype), states

    @classmethod
    def normalises(cls, config):
        return cls.settings(config).normaliser
