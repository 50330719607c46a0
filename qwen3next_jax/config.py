"""Every setting of a run: frozen dataclasses, the only home of defaults and of validation.

Architecture fields carry the names of Hugging Face's `config.json` for `qwen3_next`, so a field means there what it
means here. A value of 0, "" or () means "derive it", and the field's comment says from what.
"""

import dataclasses
import math
import typing
from typing import Any, Literal

from qwen3next_jax.errors import UserError, did_you_mean

LINEAR, FULL = "linear_attention", "full_attention"
MESH_AXES = ("data", "expert", "context", "tensor")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Qwen3-Next model. The defaults are the released Qwen3-Next-80B-A3B."""

    vocab_size: int = 151_936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    full_attention_interval: int = 4  # layer i (0-based) is full attention iff (i + 1) % interval == 0; 0: none is
    layer_types: tuple[str, ...] = ()  # the explicit list; () derives it from full_attention_interval

    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    max_position_embeddings: int = 262_144

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    # Start values of A_log and dt_bias. "ones" (transformers, Megatron): A ~ U(0.01, 16), dt_bias = 1, median decay at
    # the start 3e-5. "log_uniform" (fla, OLMo-Hybrid): A ~ U(0, 16), dt log-uniform in [1e-3, 0.1], median decay 0.94.
    decay_init: Literal["ones", "log_uniform"] = "ones"

    num_experts: int = 512  # 0: dense MLPs everywhere
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512  # 0: no shared expert
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1  # layer i has experts iff (i + 1) % step == 0 and i is not in mlp_only_layers
    mlp_only_layers: tuple[int, ...] = ()
    intermediate_size: int = 5120  # width of dense MLP layers

    mtp_depth: int = 1  # tokens predicted beyond the next one; 0: no multi-token prediction module
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    bos_token_id: int = -1  # -1: none
    eos_token_id: int = -1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # matmul operands; norms, gates, router and states stay float32

    def __post_init__(self):
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or self._derived_layer_types())
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        self._check_sizes()
        self._check_layers()
        self._check_heads()
        self._check_experts()

    def _derived_layer_types(self) -> tuple[str, ...]:
        interval = self.full_attention_interval
        _require(interval >= 0, f"model.full_attention_interval = {interval}: expected 0 (no full attention) or more")
        return tuple(FULL if interval and (i + 1) % interval == 0 else LINEAR for i in range(self.num_hidden_layers))

    def _check_sizes(self):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                     "linear_value_head_dim", "linear_conv_kernel_dim", "decoder_sparse_step", "max_position_embeddings",
                     "rms_norm_eps", "initializer_range", "rope_theta"):
            _require(getattr(self, name) > 0, f"model.{name} = {getattr(self, name)}: expected a positive number")
        for name in ("num_experts", "mtp_depth", "shared_expert_intermediate_size"):
            _require(getattr(self, name) >= 0, f"model.{name} = {getattr(self, name)}: expected 0 or more")

    def _check_layers(self):
        _require(len(self.layer_types) == self.num_hidden_layers,
                 f"model.layer_types names {len(self.layer_types)} layers, model.num_hidden_layers = "
                 f"{self.num_hidden_layers}: expected as many; change one of the two")
        for i, kind in enumerate(self.layer_types):
            _require(kind in (LINEAR, FULL),
                     f"model.layer_types[{i}] = {kind!r}: expected {LINEAR!r} or {FULL!r}{did_you_mean(kind, (LINEAR, FULL))}")
        for i in self.mlp_only_layers:
            _require(0 <= i < self.num_hidden_layers,
                     f"model.mlp_only_layers names layer {i}: expected 0 … {self.num_hidden_layers - 1}")

    def _check_heads(self):
        n, m = self.num_attention_heads, self.num_key_value_heads
        _require(n % m == 0, f"model.num_attention_heads = {n} is not a multiple of model.num_key_value_heads = {m}")
        g, h = self.linear_num_key_heads, self.linear_num_value_heads
        _require(h % g == 0, f"model.linear_num_value_heads = {h} is not a multiple of model.linear_num_key_heads = {g}")
        _require(0 <= self.partial_rotary_factor <= 1,
                 f"model.partial_rotary_factor = {self.partial_rotary_factor}: expected 0 … 1")
        _require(self.rotary_dim % 2 == 0,
                 f"model.head_dim × model.partial_rotary_factor = {self.head_dim} × {self.partial_rotary_factor} gives "
                 f"{self.rotary_dim} rotated dimensions: expected an even number")

    def _check_experts(self):
        if self.num_experts and (self.mtp_depth or any(self.is_sparse(i) for i in range(self.num_hidden_layers))):
            k, e = self.num_experts_per_tok, self.num_experts
            _require(1 <= k <= e, f"model.num_experts_per_tok = {k}: expected 1 … model.num_experts = {e}")
            _require(self.moe_intermediate_size > 0,
                     f"model.moe_intermediate_size = {self.moe_intermediate_size}: expected a positive number")
        if not all(self.is_sparse(i) for i in range(self.num_hidden_layers)):
            _require(self.intermediate_size > 0,
                     f"model.intermediate_size = {self.intermediate_size}: expected a positive number")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_sparse(self, layer: int) -> bool:
        """Whether 0-based `layer` has experts (else one dense MLP)."""
        return (self.num_experts > 0 and layer not in self.mlp_only_layers
                and (layer + 1) % self.decoder_sparse_step == 0)

    @property
    def layer_kinds(self) -> tuple[tuple[str, bool], ...]:
        """`(mixer kind, has experts)` of every layer."""
        return tuple((kind, self.is_sparse(i)) for i, kind in enumerate(self.layer_types))

    @property
    def period(self) -> int:
        """Length of the shortest repeating run of layers that tiles the model; `num_hidden_layers` when none does."""
        kinds, n = self.layer_kinds, self.num_hidden_layers
        return next(p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p))


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Of the tasks that `data.source` may name (see `data/synthetic.py`)."""

    pairs: int = 8  # key-value pairs of a row of mqar
    gap_power: float = 0.01  # mqar: a query's distance d has probability ∝ d^(gap_power - 1)

    def __post_init__(self):
        _require(self.pairs >= 1, f"data.synthetic.pairs = {self.pairs}: expected at least 1")
        _require(self.gap_power > 0, f"data.synthetic.gap_power = {self.gap_power}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how it becomes rows of `train.sequence_length` tokens."""

    source: Literal["text", "mqar", "induction", "copy", "backcopy"] = "text"  # the files of `path`, or a task made from the seed
    synthetic: SyntheticConfig = SyntheticConfig()
    path: str = ""  # comma-separated globs (local or gs://) of .txt/.md/.py/…, .jsonl, .parquet; "": Python's standard library
    weights: tuple[float, ...] = ()  # share of rows drawn from each glob of `path`; () = in proportion to their size
    text_field: str = "text"  # field of .jsonl records and column of .parquet files that holds the text
    tokenizer: str = "bytes"  # "bytes", or the path of a Hugging Face tokenizer.json
    heldout_fraction: float = 0.02  # share of documents (by hash of their text) kept for evaluation
    prepared_dir: str = "runs/prepared"  # where the tokenized, packed rows are kept, by fingerprint
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))
        _require(0 < self.heldout_fraction < 1, f"data.heldout_fraction = {self.heldout_fraction}: expected between 0 and 1")
        _require(all(w > 0 for w in self.weights), f"data.weights = {self.weights}: expected positive numbers")
        globs = len(self.globs)
        _require(not self.weights or len(self.weights) == max(globs, 1),
                 f"data.weights has {len(self.weights)} numbers for {globs} globs in data.path: expected one each")

    @property
    def globs(self) -> tuple[str, ...]:
        return tuple(g.strip() for g in self.path.split(",") if g.strip())


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    batch_size: int = 16  # rows per step, over all devices and micro-batches
    sequence_length: int = 2048
    gradient_accumulation: int = 1  # micro-batches per step
    seed: int = 0  # initial weights
    init_from: str = ""  # a Hugging Face directory whose weights the run starts from; "": random
    remat: Literal["none", "block"] = "none"  # "block": keep each block's input only and recompute the rest backward
    balance_loss_weight: float = 0.001  # perfect balance gives a loss of 1 before this weight
    mtp_loss_weight: float = 0.1  # on the mean over depths
    router_z_loss_weight: float = 0.0
    log_every: int = 10
    step_timeout: float = 1800.0  # seconds; a run in which no step ends for so long dumps its stacks and exits; 0: never
    compile_timeout: float = 7200.0  # seconds for what may compile: the first step and evaluations

    def __post_init__(self):
        for name in ("steps", "batch_size", "gradient_accumulation", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)}: expected at least 1")
        _require(self.sequence_length >= 2, f"train.sequence_length = {self.sequence_length}: expected at least 2")
        _require(self.batch_size % self.gradient_accumulation == 0,
                 f"train.batch_size = {self.batch_size} is not a multiple of train.gradient_accumulation = "
                 f"{self.gradient_accumulation}")
        for name in ("balance_loss_weight", "mtp_loss_weight", "router_z_loss_weight", "step_timeout", "compile_timeout"):
            _require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)}: expected 0 or more")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (decoupled weight decay) with warm-up."""

    learning_rate: float = 4e-4
    schedule: Literal["cosine", "warmup_stable_decay"] = "cosine"
    warmup_steps: int = 100  # at most train.steps of them
    decay_fraction: float = 0.2  # last share of the steps over which warmup_stable_decay falls
    final_fraction: float = 0.1  # of learning_rate, reached at the last step
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norm_weights: bool = True  # as the released model trained; A_log and dt_bias never decay
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            _require(getattr(self, name) > 0, f"optimizer.{name} = {getattr(self, name)}: expected a positive number")
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps = {self.warmup_steps}: expected 0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} = {getattr(self, name)}: expected 0 ≤ {name} < 1")
        for name in ("decay_fraction", "final_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name} = {getattr(self, name)}: expected 0 … 1")
        for name in ("weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} = {getattr(self, name)}: expected 0 or more")


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Of the compiled step. A non-finite loss or gradient is never applied; the rest is about sudden jumps upwards."""

    on_spike: Literal["continue", "skip", "rewind", "stop"] = "continue"  # rewind: last checkpoint, without the data since
    spike_z: float = 10.0  # robust z-score of loss or gradient norm over the window from which it is a spike
    window: int = 128  # steps; nothing counts as a spike before as many were seen
    max_skips: int = 10  # skipped updates in a row after which the run stops

    def __post_init__(self):
        _require(self.spike_z > 0, f"guards.spike_z = {self.spike_z}: expected a positive number")
        _require(self.window >= 4, f"guards.window = {self.window}: expected at least 4")
        _require(self.max_skips >= 1, f"guards.max_skips = {self.max_skips}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps; the last step is always saved
    keep_last: int = 3  # newest whole checkpoints that are kept
    keep_every: int = 0  # steps; those at multiples of it are kept, too; 0: none

    def __post_init__(self):
        _require(self.keep_every >= 0, f"checkpoint.keep_every = {self.keep_every}: expected 0 or more")
        _require(self.every >= 1, f"checkpoint.every = {self.every}: expected at least 1")
        # With 1 the older one would be gone before the newer one is sealed.
        _require(self.keep_last >= 2, f"checkpoint.keep_last = {self.keep_last}: expected at least 2")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = 250  # steps between held-out evaluations; the last step is always evaluated
    rows: int = 64  # held-out rows per evaluation during training; eval.py uses all
    sample_prompt: str = "def "
    sample_tokens: int = 96  # generated at every evaluation; 0: none

    def __post_init__(self):
        for name in ("every", "rows"):
            _require(getattr(self, name) >= 1, f"eval.{name} = {getattr(self, name)}: expected at least 1")
        _require(self.sample_tokens >= 0, f"eval.sample_tokens = {self.sample_tokens}: expected 0 or more")
        _require(bool(self.sample_prompt) or not self.sample_tokens,
                 "eval.sample_prompt is empty: expected text, or eval.sample_tokens = 0")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 (at most once): as many as are left over."""

    data: int = -1  # rows of a batch; parameters and optimizer state are split over it, too
    expert: int = 1  # rows, and experts
    context: int = 1  # tokens of a row
    tensor: int = 1  # heads, and widths of MLPs

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            _require(size >= 1 or size == -1, f"parallel.mesh.{axis} = {size}: expected at least 1, or -1 for what is left over")
        _require([getattr(self, axis) for axis in MESH_AXES].count(-1) <= 1, "parallel.mesh: expected -1 for one axis at most")

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis of a mesh of `devices`, -1 worked out."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        given = math.prod(size for size in sizes.values() if size != -1)
        text = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        _require(devices % given == 0 and (given == devices or -1 in sizes.values()),
                 f"parallel.mesh: {text} = {given}, but there are {devices} devices: change an axis so that they multiply to "
                 f"{devices}" + (", or set one to -1" if -1 not in sizes.values() else ""))
        return {axis: devices // given if size == -1 else size for axis, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the run is spread over its devices."""

    mesh: MeshConfig = MeshConfig()
    start_timeout: float = 300.0  # seconds for all processes of the run to find each other
    heartbeat_timeout: float = 100.0  # seconds after which a silent process counts as dead, and the others end

    def __post_init__(self):
        for name in ("start_timeout", "heartbeat_timeout"):
            _require(getattr(self, name) >= 1, f"parallel.{name} = {getattr(self, name)}: expected at least 1 second")


@dataclasses.dataclass(frozen=True)
class TelemetryConfig:
    """metrics.jsonl, the live display and report.html are always there; docs/report.md explains them."""

    diagnostics_every: int = 100  # steps between measurements of every layer (one forward pass each); 0: never
    tensorboard: bool = False  # scalars and samples for TensorBoard in WORKDIR/tensorboard
    wandb: str = ""  # Weights & Biases project; "": none

    def __post_init__(self):
        _require(self.diagnostics_every >= 0, f"telemetry.diagnostics_every = {self.diagnostics_every}: expected 0 or more")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Traces for xprof / TensorBoard's profiler, written to WORKDIR/profile."""

    steps: str = ""  # "10:13" traces steps 10, 11 and 12; "": none
    memory: bool = False  # at the end of those steps also writes what holds the device's memory, for pprof

    def __post_init__(self):
        _require(not self.memory or bool(self.steps), "profile.memory is set without profile.steps: expected steps such as 10:13")
        if self.steps:
            first, _, end = self.steps.partition(":")
            _require(first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end),
                     f"profile.steps = {self.steps!r}: expected FIRST:END with 1 ≤ FIRST < END, such as 10:13 for steps 10, 11 and 12")

    @property
    def range(self) -> range:
        """The steps that are traced."""
        first, _, end = (self.steps or "0:0").partition(":")
        return range(int(first), int(end))


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str = "default"  # the workdir defaults to runs/<name>
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    guards: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    parallel: ParallelConfig = ParallelConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    profile: ProfileConfig = ProfileConfig()

    def __post_init__(self):
        _require(self.train.sequence_length <= self.model.max_position_embeddings,
                 f"train.sequence_length = {self.train.sequence_length}: expected at most "
                 f"model.max_position_embeddings = {self.model.max_position_embeddings}")
        _require(self.train.sequence_length > self.model.mtp_depth + 1,
                 f"train.sequence_length = {self.train.sequence_length}: expected more than model.mtp_depth + 1")
        _require(self.data.source == "text" or not self.eval.sample_tokens,
                 f"eval.sample_tokens = {self.eval.sample_tokens}: data.source = {self.data.source!r} has no text to sample; set it to 0")


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested plain dicts (JSON-ready; tuples stay tuples)."""
    return dataclasses.asdict(config)


def default_config() -> dict[str, Any]:
    """Nested dict of every default, from which the files in `configs/` start.

    `layer_types` is left underived, so that a file may change the number of layers or the interval alone.
    """
    config = to_dict(Config())
    config["model"]["layer_types"] = ()
    return config


def from_dict(cls: type, values: dict[str, Any], path: str = "config") -> Any:
    """Builds the config dataclass `cls` from a nested dict, checking names and types.

    Raises:
      UserError: an unknown key (the nearest known one is suggested), a value of the wrong type, or one that `cls` refuses.
    """
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        where = f"{path}.{key}"
        if key not in hints:
            hint = did_you_mean(key, hints) or f"; known here: {', '.join(hints)}"
            raise UserError(f"{where}: no such setting{hint}")
        arguments[key] = _checked(value, hints[key], where)
    return cls(**arguments)


def _checked(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        _require(isinstance(value, dict), f"{where} = {value!r}: expected a group of settings")
        return from_dict(hint, value, where)
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        _require(value in choices, f"{where} = {value!r}: expected one of {', '.join(map(repr, choices))}"
                                   f"{did_you_mean(str(value), choices)}")
        return value
    if origin is tuple:
        _require(isinstance(value, (tuple, list)), f"{where} = {value!r}: expected a list")
        return tuple(_checked(v, typing.get_args(hint)[0], f"{where}[{i}]") for i, v in enumerate(value))
    return _checked_scalar(value, hint, where)


def _checked_scalar(value: Any, hint: type, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right_type = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    _require(right_type, f"{where} = {value!r} is of type {type(value).__name__}: expected {hint.__name__}")
    _require(hint is not float or math.isfinite(value), f"{where} = {value}: expected a finite number")
    return value
