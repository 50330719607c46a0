"""Linear attention (2006.16236, equations 16–20): softmax's exponential replaced by a product of
features.
"""

import jax

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.mixers.recurrent import Additive, Inputs

EPSILON = 1e-6  # added to the sum of the weights


class Linear(Additive):
    """o = Sᵀφ(q) / (zᵀφ(q) + ε), S += φ(k) vᵀ, z += φ(k), φ = elu + 1. `mixer.feature_map`
    "identity" and `mixer.normaliser` off: the plain sum Σ v (k·q).
    """

    settings = (*Additive.settings, "mixer.feature_map", "mixer.normaliser")

    def __init__(self, config, make, layers):
        self.config = config
        self.make_projection(make, gate=False)
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        return Inputs(self.project(x_BTD, context)[0])

    def recurrence(self, heads, state):
        feature = (
            (lambda x: jax.nn.elu(x) + 1) if self.config.mixer.feature_map == "elu" else lambda x: x
        )
        heads = heads._replace(q=feature(heads.q), k=feature(heads.k))
        if not self.config.mixer.normaliser:
            return super().recurrence(heads, state)
        o, weight, states = self.weighted(heads, state)
        return (o / (weight[..., None] + EPSILON)).astype(heads.v.dtype), states

    @classmethod
    def normalises(cls, config):
        return config.mixer.normaliser

    @classmethod
    def check(cls, config):
        settings = config.mixer
        require(
            settings.feature_map == "elu" or not settings.normaliser,
            "model.mixer.normaliser = True with model.mixer.feature_map = "
            "'identity': the sum of the weights may vanish; set model.mixer.normaliser = False, "
            "or the feature map to 'elu'",
        )
