"""The mixers beside Gated DeltaNet and gated attention: their lines of the table, and their
settings, the group `model.mixer`.
"""

import dataclasses
from typing import Literal

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """What single mixers read beside the sizes of `ModelConfig`. A setting that no layer of the
    model reads is refused.
    """

    # linear: of queries and keys; elu(x) + 1, the paper's
    feature_map: Literal["elu", "identity"] = "elu"
    # linear: divides by the sum of the weights; needs positive features
    normaliser: bool = True
    # attention: each head's queries and keys, or those of all heads together
    qk_norm_over: Literal["head", "layer"] = "head"
    # sliding_window, lambda_window, selected_tokens: keys that a query sees, its own among them;
    # rerope, leaky_rerope: distances that are the true ones; parallel_windows: tokens of each
    window: int = 1024
    # of those three: keys at the start of a document that stay visible beyond the window
    first_tokens: int = 0
    # sliding_window: a learned score per head that takes weight and gives nothing
    sink_logit: bool = False
    # mla: numbers a token keeps of its keys and values
    latent_rank: int = 512
    # mla: of the queries' latent; 0: queries straight from the input
    query_rank: int = 0
    # mla: numbers of each key that all heads share; 0: those that are rotated
    shared_key_width: int = 0
    # mla: of the latents' norms; 0: rms_norm_eps
    latent_norm_eps: float = 0.0
    # gsa: that keep keys and values
    slots: int = 64
    # mamba, s4d: numbers that a channel keeps
    state_size: int = 16
    # ttt, titans: tokens of a document whose gradients are taken at one state
    block: int = 16
    # masked_attention, alibi, t5_bias
    mask: Literal["causal", "prefix", "bidirectional"] = "causal"
    # of the mask "prefix": tokens at a document's start that see each other
    prefix_tokens: int = 0
    # t5_bias: of distances
    buckets: int = 32
    # t5_bias: from which on all fall into the last one
    max_distance: int = 128
    # leaky_rerope: how much slower distances grow beyond the window
    stretch: float = 16.0
    # parallel_windows: how many
    contexts: int = 1
    # selected_tokens: keys beyond the window, for each query and head
    selected: int = 64

    def __post_init__(self):
        check_bounds(
            self,
            "model.mixer",
            {
                "at least 1": "window latent_rank slots state_size block stretch contexts selected",
                "at least 4": "buckets",
                "0 or more": "first_tokens query_rank shared_key_width latent_norm_eps "
                "prefix_tokens",
            },
        )
        require(
            self.max_distance > self.buckets // 2,
            f"model.mixer.max_distance = {self.max_distance}: expected more than half of "
            f"model.mixer.buckets = {self.buckets}, which are exact",
        )
