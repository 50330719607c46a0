"""The architecture's settings. They carry the names of Hugging Face's `config.json` for
`qwen3_next`, so a setting means there what it means here. A value of 0, "" or () means "derive
it", and the comment says from what.
"""

import dataclasses
import functools
from typing import Any, Literal

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.config.ngram import PLEConfig
from qwen3next_jax.config.registry import MIXERS, check_name, resolve
from qwen3next_jax.config.streams import StreamsConfig

# in `layer_types`: what `linear_mixer` and `full_mixer` name
LINEAR, FULL = "linear_attention", "full_attention"
ABLATIONS = (
    "short_convolution",
    "decay_gate",
    "erase",
    "beta_gate",
    "linear_output_gate",
    "attention_output_gate",
    "qk_norm",
    "zero_centered_norm",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Qwen3-Next model. The defaults are the released Qwen3-Next-80B-A3B."""

    vocab_size: int = 151_936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    # one layer of every interval is full attention; 0: none is
    full_attention_interval: int = 4
    # which layer of the interval that is; in the released model the last
    full_attention_placement: Literal["last", "middle", "first"] = "last"
    # every layer's mixer by name, "linear_attention" or "full_attention"; (): by the interval
    layer_types: tuple[str, ...] = ()
    # the mixer of "linear_attention" layers, a name of config/registry.py (docs/mixers.md)
    linear_mixer: str = "gated_deltanet"
    # the mixer of "full_attention" layers and of the multi-token prediction module
    full_mixer: str = "gated_attention"
    # settings of the mixers that the layers name; docs/mixers.md says what each means
    mixer: MixerConfig = MixerConfig()
    # what else a block may be made of
    block: BlockConfig = BlockConfig()
    # several residual streams
    streams: StreamsConfig = StreamsConfig()
    # embeddings of n-grams that layers add
    ple: PLEConfig = PLEConfig()

    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    max_position_embeddings: int = 262_144
    # how many times max_position_embeddings texts may be, by YaRN (2309.00071) or as
    # block.rope_scaling names; 1: off
    yarn_factor: float = 1.0

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    # Start values of A_log and dt_bias. "ones" (transformers, Megatron): A ~ U(0.01, 16),
    # dt_bias = 1; the median decay is 3e-5 at the start. "log_uniform" (fla, OLMo-Hybrid):
    # A ~ U(0, 16), dt log-uniform in [1e-3, 0.1]; the median decay is 0.94.
    decay_init: Literal["ones", "log_uniform"] = "ones"
    # implementation of the delta rule (docs/delta_rule.md); auto: the platform's best
    delta_rule: Literal[
        "auto", "recurrent", "chunked", "associative", "pallas_tpu", "pallas_gpu"
    ] = "auto"

    # 0: dense MLPs everywhere
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    # 0: no shared expert
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    # layer i has experts iff (i + 1) % decoder_sparse_step == 0 and i is not in mlp_only_layers
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    # other routers and other experts than the released model's
    moe: MoEConfig = MoEConfig()
    # width of dense MLP layers
    intermediate_size: int = 5120

    # tokens predicted beyond the next one; 0: no multi-token prediction module
    mtp_depth: int = 1
    tie_word_embeddings: bool = False

    # Ablations. The released model has all of these; a model without one of them has no Hugging
    # Face form.

    # of recurrent layers; off: SiLU alone
    short_convolution: bool = True
    # off: the state is never forgotten (g = 0), DeltaNet
    decay_gate: bool = True
    # off: S ← e^g S + β k vᵀ, gated linear attention with scalar decay
    erase: bool = True
    # off: β = 1
    beta_gate: bool = True
    # of recurrent layers
    linear_output_gate: bool = True
    # the function of that gate
    output_gate_type: Literal["silu", "sigmoid"] = "silu"
    attention_output_gate: bool = True
    # of attention
    qk_norm: bool = True
    # norms scale by 1 + w, w from 0; off: by w, from 1
    zero_centered_norm: bool = True

    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    # -1: none
    bos_token_id: int = -1
    eos_token_id: int = -1
    # matmul operands; norms, gates, router and states stay float32
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # which Hugging Face format exports of the model have (docs/families.md); nothing that is
    # computed depends on it
    hf_form: Literal[
        "qwen3_next", "qwen3_5_text", "qwen3_5", "kimi_linear", "qwen4_exp_text", "qwen4_exp"
    ] = "qwen3_next"
    # where the experts of a layer are one tensor in that format: in the trunk, in multi-token
    # prediction
    hf_fused_experts: tuple[Literal["trunk", "mtp"], ...] = ()

    def __post_init__(self):
        for name in ("layer_types", "mlp_only_layers", "hf_fused_experts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_bounds(
            self,
            "model",
            {
                "a positive number": "vocab_size hidden_size num_hidden_layers num_attention_heads "
                "num_key_value_heads head_dim linear_num_key_heads "
                "linear_num_value_heads linear_key_head_dim linear_value_head_dim "
                "linear_conv_kernel_dim decoder_sparse_step "
                "max_position_embeddings rms_norm_eps initializer_range",
                "0 or more": "num_experts mtp_depth shared_expert_intermediate_size "
                "full_attention_interval",
                "at least 1": "yarn_factor",
                "at least 2": "rope_theta",
                "0 … 1": "partial_rotary_factor",
            },
        )
        self._check_layers()
        self._check_heads()
        self._check_mlps()
        self.block.check(self)
        self.ple.check(self)
        given = MixerConfig(**self.mixer).checked(name for name, _ in self.layer_kinds)
        object.__setattr__(self, "mixer", given)

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
        widths = (
            "moe_intermediate_size " * self.has_experts + "intermediate_size" * self.has_dense_mlps
        )
        check_bounds(self, "model", {"a positive number": widths})
        self.moe.check(self)

    def settings_of(self, mixer: str) -> Any:
        """The settings of the group `mixer` that the mixer of that name reads, as the dataclass
        that it declares.
        """
        return self.mixer.read(resolve(MIXERS, mixer, "mixer").Settings)

    @property
    def ablated(self) -> tuple[str, ...]:
        """The names of the ablation switches that are off."""
        return tuple(name for name in ABLATIONS if not getattr(self, name))

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """The longest text, in tokens."""
        return int(self.max_position_embeddings * self.yarn_factor)

    @property
    def named_delta_rule(self) -> str | None:
        return None if self.delta_rule == "auto" else self.delta_rule

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kind of every layer, as `layer_types` would name it."""
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
        """The mixer of every layer, a name of `config/registry.py`."""
        return tuple(
            {LINEAR: self.linear_mixer, FULL: self.full_mixer}.get(kind, kind)
            for kind in self.pattern
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether 0-based `layer` has experts (else one dense MLP)."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def layer_kinds(self) -> tuple[tuple[str, bool], ...]:
        """`(mixer, has experts)` of every layer, the multi-token prediction module's last where
        there is one.
        """
        trunk = tuple((mixer, self.is_sparse(i)) for i, mixer in enumerate(self.mixers))
        return trunk + ((self.full_mixer, self.num_experts > 0),) * (self.mtp_depth > 0)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts, the multi-token prediction module's included."""
        return any(sparse for _, sparse in self.layer_kinds)

    @property
    def has_dense_mlps(self) -> bool:
        """Whether any layer has no experts, the multi-token prediction module's included."""
        return not all(sparse for _, sparse in self.layer_kinds)

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block that is traced. The first blocks are one layer each. Each of
        the others is one layer of the period that follows (3 recurrent + 1 attention in the
        released model), stacked over the period's repeats (12). A pattern without a period is
        traced layer by layer.
        A layer with an embedding of its own (`ple`) stands alone.
        """
        embeddings = map(self.ple.number, range(self.num_hidden_layers))
        return _stacks(tuple(zip(self.layer_kinds, embeddings)))

    def differs(self, other: "ModelConfig") -> tuple[str, ...]:
        """The names of the settings in which the two models differ. How a config spells its
        layers (by interval, or by `layer_types`) makes no difference.
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
def _stacks(kinds: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
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
