"""The settings of the architecture. The settings that are also in Hugging Face's `config.json` for
`qwen3_next` have the names and meanings of that file. The comment above a field says what the
setting means, and what a special value such as 0, () or -1 means.
"""

import dataclasses
import functools
from typing import Any, Literal

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.lora import LoRAConfig
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.config.ngram import PLEConfig
from qwen3next_jax.config.registry import MIXERS, check_name, resolve
from qwen3next_jax.config.streams import StreamsConfig

# The names in `layer_types` that stand for `linear_mixer` and `full_mixer`.
LINEAR, FULL = "linear_attention", "full_attention"
ABLATIONS = (
    "short_convolution",
    "decay_gate",
    "delta_term",
    "beta_gate",
    "linear_output_gate",
    "attention_output_gate",
    "qk_norm",
    "zero_centered_norm",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a model. The defaults give the released Qwen3-Next-80B-A3B."""

    # number of token ids; 0: as many as the tokenizer has
    vocab_size: int = 151_936
    # width of the residual stream
    hidden_size: int = 2048
    # number of layers, without the layer of the multi-token prediction module
    num_hidden_layers: int = 48
    # one layer in every full_attention_interval layers has full attention; 0: no layer has
    full_attention_interval: int = 4
    # which layer of each interval has full attention
    full_attention_placement: Literal["last", "middle", "first"] = "last"
    # for each layer, "linear_attention", "full_attention" or the name of a mixer; (): the layers
    # are "linear_attention" and "full_attention" layers, in the order that
    # full_attention_interval and full_attention_placement give
    layer_types: tuple[str, ...] = ()
    # the mixer of "linear_attention" layers: a name of MIXERS in config/registry.py
    # (docs/mixers.md)
    linear_mixer: str = "gated_deltanet"
    # the mixer of "full_attention" layers and of the multi-token prediction module
    full_mixer: str = "gated_attention"
    # settings that only some mixers have; docs/mixers.md says what each means
    mixer: MixerConfig = MixerConfig()
    # the parts of a block other than its mixer
    block: BlockConfig = BlockConfig()
    # settings of a residual stream that is wider than the model (model.block.placement)
    streams: StreamsConfig = StreamsConfig()
    # settings of the n-gram embeddings that some layers add to their input (model.ple.layer_ids)
    ple: PLEConfig = PLEConfig()

    # number of query heads of an attention layer
    num_attention_heads: int = 16
    # number of key and value heads of an attention layer (grouped-query attention)
    num_key_value_heads: int = 2
    # width of each query, key and value head of an attention layer
    head_dim: int = 256
    # share of the dimensions of a query and key head that rotary position embedding rotates
    partial_rotary_factor: float = 0.25
    # base θ of the rotary frequencies θ^(-2i/R) of the R rotated dimensions
    rope_theta: float = 10_000_000.0
    # length in tokens of the longest text, before yarn_factor extends it
    max_position_embeddings: int = 262_144
    # the longest text has max_position_embeddings × yarn_factor tokens. With a factor above 1, YaRN
    # (2309.00071), or another method in block.rope_scaling, scales the rotary frequencies for that
    # length; 1: off
    yarn_factor: float = 1.0

    # number of query heads and of key heads of a recurrent layer
    linear_num_key_heads: int = 16
    # number of value heads of a recurrent layer
    linear_num_value_heads: int = 32
    # width of a query head and of a key head of a recurrent layer
    linear_key_head_dim: int = 128
    # width of a value head of a recurrent layer
    linear_value_head_dim: int = 128
    # number of tokens that the short convolution of a recurrent layer spans
    linear_conv_kernel_dim: int = 4
    # initial values of A_log and dt_bias, which set the decay of the recurrent state per token.
    # "ones" (as in transformers, Megatron): A ~ U(0.01, 16), dt_bias = 1; the median decay factor
    # is 3e-5 at the start. "log_uniform" (as in fla, OLMo-Hybrid): A ~ U(0, 16), dt log-uniform in
    # [1e-3, 0.1]; the median decay factor is 0.94 at the start
    decay_init: Literal["ones", "log_uniform"] = "ones"
    # the write strength is β = beta_range · σ(w x), between 0 and beta_range. With 2, a write may
    # reverse the part of the state that the key reads (β = 2 gives the factor 1 − β = −1), so that
    # the state can count modulo 2 (2411.12537); with 1, the factor is never negative
    beta_range: int = 1
    # implementation of the delta rule (docs/delta_rule.md); "auto": the best one for the platform
    delta_rule: Literal[
        "auto", "recurrent", "chunked", "associative", "pallas_tpu", "pallas_gpu"
    ] = "auto"

    # number of routed experts of a layer; 0: all layers have dense MLPs
    num_experts: int = 512
    # number of routed experts that the router chooses for each token
    num_experts_per_tok: int = 10
    # hidden width of a routed expert
    moe_intermediate_size: int = 512
    # hidden width of the shared expert, which every token uses; 0: no shared expert
    shared_expert_intermediate_size: int = 512
    # whether the router's weights of a token's chosen experts are divided by their sum
    norm_topk_prob: bool = True
    # layer i has experts iff (i + 1) % decoder_sparse_step == 0 and i is not in mlp_only_layers
    decoder_sparse_step: int = 1
    # indices (from 0) of layers that have a dense MLP in place of experts
    mlp_only_layers: tuple[int, ...] = ()
    # settings of routers and experts that the released model's config.json does not have
    moe: MoEConfig = MoEConfig()
    # hidden width of dense MLPs
    intermediate_size: int = 5120

    # number of tokens after the next one that the multi-token prediction module also predicts; 0:
    # the model has no such module
    mtp_depth: int = 1
    # whether the output projection is the transposed embedding matrix
    tie_word_embeddings: bool = False
    # the output logits l become c · tanh(l / c) with this c, such as 30 (Gemma 2, 2408.00118); 0:
    # they stay as they are
    logit_softcap: float = 0.0

    # Ablations. The released model has all of these parts. A model without one of them cannot be
    # exported to the Hugging Face format qwen3_next.

    # whether recurrent layers apply a short convolution and a SiLU to queries, keys and values;
    # off: only the SiLU
    short_convolution: bool = True
    # whether the recurrent state S decays by e^g per token; off: g = 0, which is DeltaNet
    decay_gate: bool = True
    # whether an update subtracts the value that the state holds for the key k before it adds the
    # new value v (the delta rule); off: S ← e^g S + β k vᵀ, which is gated linear attention with a
    # scalar decay
    delta_term: bool = True
    # whether the write strength β is computed from the token; off: β = 1
    beta_gate: bool = True
    # whether a gate scales the output of recurrent layers
    linear_output_gate: bool = True
    # the activation function of the output gate of recurrent layers
    output_gate_type: Literal["silu", "sigmoid"] = "silu"
    # whether a sigmoid gate scales the output of attention layers
    attention_output_gate: bool = True
    # whether attention normalises its queries and keys
    qk_norm: bool = True
    # whether norms scale by 1 + w, with w = 0 at the start; off: by w, with w = 1 at the start
    zero_centered_norm: bool = True

    # number that norms add to the mean square before they take its root
    rms_norm_eps: float = 1e-6
    # standard deviation of the random initial weights
    initializer_range: float = 0.02
    # whether the last matrix of each mixer and MLP starts 1 / √(2 · num_hidden_layers) times as
    # large, so that the residual stream does not grow with the depth (GPT-2, Megatron-LM)
    depth_scaled_init: bool = False
    # id of the token that begins a text; -1: none
    bos_token_id: int = -1
    # id of the token that ends a text; -1: none
    eos_token_id: int = -1
    # dtype of the operands of matrix products; norms, gates, router and states are always float32
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # the Hugging Face format in which the model is exported (docs/families.md); it does not change
    # what the model computes
    hf_form: Literal[
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5",
        "kimi_linear",
        "olmo_hybrid",
        "qwen4_exp_text",
        "qwen4_exp",
    ] = "qwen3_next"
    # the parts of the model in which the exported files store all experts of a layer as one tensor,
    # not one tensor per expert: "trunk" (all layers), "mtp" (the multi-token prediction module)
    hf_fused_experts: tuple[Literal["trunk", "mtp"], ...] = ()
    # low-rank adapters beside the matrices; with them, training changes nothing else
    lora: LoRAConfig = LoRAConfig()

    def __post_init__(self):
        for name in ("layer_types", "mlp_only_layers", "hf_fused_experts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_bounds(
            self,
            "model",
            {
                "a positive number": "vocab_size hidden_size num_attention_heads "
                "num_key_value_heads head_dim linear_num_key_heads "
                "linear_num_value_heads linear_key_head_dim linear_value_head_dim "
                "linear_conv_kernel_dim decoder_sparse_step "
                "max_position_embeddings rms_norm_eps initializer_range",
                # Deeper models have not been trained, and every layer is listed and traced.
                "1 … 4096": "num_hidden_layers",
                "1 or 2": "beta_range",
                "0 or more": "num_experts mtp_depth shared_expert_intermediate_size "
                "full_attention_interval logit_softcap",
                "at least 1": "yarn_factor",
                "at least 2": "rope_theta",
                "0 … 1": "partial_rotary_factor",
            },
        )
        self._check_layers()
        self._check_heads()
        self._check_mlps()
        self.block.check_fits_model(self)
        self.ple.check_fits_model(self)
        checked_mixer = MixerConfig(**self.mixer).checked_for_mixers(
            name for name, _ in self.mixers_and_sparsity
        )
        object.__setattr__(self, "mixer", checked_mixer)

    def _check_layers(self):
        require(
            not self.layer_types or len(self.layer_types) == self.num_hidden_layers,
            f"model.layer_types names {len(self.layer_types)} layers, model.num_hidden_layers = "
            f"{self.num_hidden_layers}: expected as many; change one of the two",
        )
        for setting in ("linear_mixer", "full_mixer"):
            check_name(MIXERS, getattr(self, setting), f"model.{setting}")
        for i, kind in enumerate(self.layer_types):
            check_name((LINEAR, FULL, *MIXERS), kind, f"model.layer_types[{i}]")
        for i in self.mlp_only_layers:
            require(
                0 <= i < self.num_hidden_layers,
                f"model.mlp_only_layers names layer {i}: expected 0 … {self.num_hidden_layers - 1}",
            )

    def _check_heads(self):
        n, m = self.num_attention_heads, self.num_key_value_heads
        require(
            n % m == 0,
            f"model.num_attention_heads = {n} is not a multiple of model.num_key_value_heads = {m}",
        )
        g, h = self.linear_num_key_heads, self.linear_num_value_heads
        require(
            h % g == 0,
            f"model.linear_num_value_heads = {h} is not a multiple of model.linear_num_key_heads "
            f"= {g}",
        )
        require(
            self.rotary_dim % 2 == 0,
            f"model.head_dim × model.partial_rotary_factor = {self.head_dim} × "
            f"{self.partial_rotary_factor} "
            f"gives {self.rotary_dim} rotated dimensions: expected an even number",
        )

    def _check_mlps(self):
        k, e = self.num_experts_per_tok, self.num_experts
        require(
            1 <= k <= e or not self.has_experts,
            f"model.num_experts_per_tok = {k}: expected 1 … model.num_experts = {e}",
        )
        if self.has_experts:
            check_bounds(self, "model", {"a positive number": "moe_intermediate_size"})
        if self.has_dense_mlps:
            check_bounds(self, "model", {"a positive number": "intermediate_size"})
        self.moe.check_fits_model(self)

    def settings_of_mixer(self, mixer: str) -> Any:
        """Returns the settings in the group `model.mixer` that one mixer has.

        Args:
          mixer: the name of the mixer, or an import string.

        Returns:
          An instance of the mixer's dataclass `Settings`.

        Raises:
          UserError: there is no such mixer, or a value has the wrong type or is out of bounds.
        """
        return self.mixer.settings_for(resolve(MIXERS, mixer, "mixer").Settings)

    @property
    def ablated(self) -> tuple[str, ...]:
        """The names of the ablation switches that are off."""
        return tuple(name for name in ABLATIONS if not getattr(self, name))

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions that RoPE rotates in each query head and key head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """The length of the longest text, in tokens."""
        return int(self.max_position_embeddings * self.yarn_factor)

    @property
    def delta_rule_implementation(self) -> str | None:
        """The name of the implementation of the delta rule; None if `delta_rule` is "auto"."""
        return None if self.delta_rule == "auto" else self.delta_rule

    @property
    def resolved_layer_types(self) -> tuple[str, ...]:
        """The kind of every layer: LINEAR, FULL, or the name of a mixer. If the setting
        `layer_types` is empty, the kinds follow from `full_attention_interval` and
        `full_attention_placement`.
        """
        interval = self.full_attention_interval
        place = {"last": interval - 1, "middle": interval // 2, "first": 0}[
            self.full_attention_placement
        ]
        return self.layer_types or tuple(
            FULL if interval and i % interval == place else LINEAR
            for i in range(self.num_hidden_layers)
        )

    @property
    def mixers(self) -> tuple[str, ...]:
        """The name of every layer's mixer, in MIXERS of `config/registry.py` or as an import
        string.
        """
        return tuple(
            {LINEAR: self.linear_mixer, FULL: self.full_mixer}.get(kind, kind)
            for kind in self.resolved_layer_types
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer with the index `layer` (from 0) has experts, instead of a dense MLP."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def mixers_and_sparsity(self) -> tuple[tuple[str, bool], ...]:
        """For every layer, the pair (name of its mixer, whether the layer has experts). The layer
        of the multi-token prediction module, if there is one, is last.
        """
        trunk = tuple((mixer, self.is_sparse(i)) for i, mixer in enumerate(self.mixers))
        if not self.mtp_depth:
            return trunk
        return (*trunk, (self.full_mixer, self.num_experts > 0))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts, including the layer of the multi-token prediction
        module.
        """
        return any(sparse for _, sparse in self.mixers_and_sparsity)

    @property
    def has_dense_mlps(self) -> bool:
        """Whether any layer has a dense MLP, including the layer of the multi-token prediction
        module.
        """
        return not all(sparse for _, sparse in self.mixers_and_sparsity)

    @property
    def layer_stacks(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the layers, in groups. The layers of a group have the same structure, and
        their parameters are stacked, so that a scan can compute these layers.

        The list of layers is divided into a prefix and a period that repeats up to the last layer.
        The released model has no prefix; its period is 3 recurrent layers and 1 attention layer,
        with 12 repeats. Each layer of the prefix is a group of its own. The layers at the same
        place in all repeats of the period form a group. A list of layers that does not repeat has
        one group per layer. A layer with an n-gram embedding (`ple`) is always a group of its own.
        """
        embeddings = map(self.ple.embedding_index, range(self.num_hidden_layers))
        return _group_repeating_layers(tuple(zip(self.mixers_and_sparsity, embeddings)))

    def differing_settings(self, other: "ModelConfig") -> tuple[str, ...]:
        """Returns the names of the settings in which the two models differ. If the mixers of the
        layers differ, the result contains "layer_types" in place of the settings from which the
        mixers follow, such as "full_attention_interval".
        """
        spelled = {
            "layer_types",
            "linear_mixer",
            "full_mixer",
            "full_attention_interval",
            "full_attention_placement",
        }
        names = [field.name for field in dataclasses.fields(self) if field.name not in spelled]
        same_layers = self.mixers == other.mixers and (
            not self.mtp_depth or self.full_mixer == other.full_mixer
        )
        return (() if same_layers else ("layer_types",)) + tuple(
            n for n in names if getattr(self, n) != getattr(other, n)
        )


@functools.lru_cache(maxsize=64)
def _group_repeating_layers(kinds: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups the indices of layers of these kinds as `ModelConfig.layer_stacks` describes. Of all
    possible divisions of the layers, the function takes the one in which prefix and period together
    have the fewest layers.
    """
    n = len(kinds)
    first, period = min(
        (
            (first, period)
            for period in range(1, n + 1)
            for first in range(n - period, -1, -period)
            if kinds[first:] == kinds[first : first + period] * ((n - first) // period)
        ),
        key=lambda split: (sum(split), split[0]),
    )
    return tuple((i,) for i in range(first)) + tuple(
        tuple(range(first + i, n, period)) for i in range(period)
    )
