"""The settings of a run besides its architecture, and `Config`, which holds them all."""

import dataclasses
import math
import re
from typing import Any, Literal

from qwen3next_jax.common.errors import escaped, require, require_path, short
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.model import ModelConfig
from qwen3next_jax.config.reading import to_dict
from qwen3next_jax.config.registry import DATA_SOURCES, OPTIMIZERS, check_name

MESH_AXES = ("data", "expert", "context", "tensor")
# Kept for the backward: "none" everything, in bfloat16 what took work; "block" each block's input;
# "dots" also what its projections gave; "offload" each block's input, in host memory. The rest is
# computed again.
Remat = Literal["none", "block", "dots", "offload"]
Schedule = Literal["cosine", "warmup_stable_decay", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Of the tasks that `data.source` may name (see `data/synthetic.py`)."""

    pairs: int = 8  # key-value pairs of a row of mqar
    gap_power: float = 0.01  # mqar: a query's distance d has probability ∝ d^(gap_power - 1)

    def __post_init__(self):
        check_bounds(
            self, "data.synthetic", {"at least 1": "pairs", "a positive number": "gap_power"}
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how it becomes rows of `train.sequence_length` tokens."""

    # the files of `path`, or a name of `config.registry`, such as a task made from the seed
    source: str = "text"
    synthetic: SyntheticConfig = SyntheticConfig()
    # comma-separated globs (local or gs://) of .txt/.md/.py/…, .jsonl, .parquet, or folders; "":
    # Python's standard library
    path: str = ""
    # share of rows drawn from each glob of `path`, 0 for none; () = in proportion to their size
    weights: tuple[float, ...] = ()
    # field of .jsonl records and column of .parquet files that holds the text
    text_field: str = "text"
    # documents that are not UTF-8: left out, or U+FFFD for each such byte
    on_bad_text: Literal["stop", "skip", "replace"] = "stop"
    # "bytes", or the path of a Hugging Face tokenizer.json; "": that of the model in
    # train.init_from, else bytes
    tokenizer: str = ""
    # share of documents (by hash of their text) kept for evaluation
    heldout_fraction: float = 0.02
    # where the tokenized, packed rows are kept, by fingerprint
    prepared_dir: str = "runs/prepared"
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))
        # Run.json files from before "" say "bytes", the default then, of tasks, which read none.
        if self.source != "text" and self.tokenizer == "bytes":
            object.__setattr__(self, "tokenizer", "")
        check_name(DATA_SOURCES, self.source, "data.source")
        check_bounds(self, "data", {"0 … 2^32 - 1": "seed", "between 0 and 1": "heldout_fraction"})
        paths = {
            "path": self.globs,
            "tokenizer": [self.tokenizer],
            "prepared_dir": [self.prepared_dir],
        }
        for name, values in paths.items():
            for value in values:
                require_path(f"data.{name} = {value!r}", value)
        require(
            "://" not in self.prepared_dir,
            f"data.prepared_dir = {self.prepared_dir!r}: expected a local directory, as rows are "
            "read from it at random; data.path may be remote",
        )
        require(
            min(self.weights, default=0) >= 0 < max(self.weights, default=1),
            f"data.weights = {self.weights}: expected numbers of 0 or more, one at least above it",
        )
        globs = len(self.globs)
        require(
            not self.weights or len(self.weights) == max(globs, 1),
            f"data.weights has {len(self.weights)} numbers for {globs} globs in data.path: "
            "expected one each",
        )

    @property
    def globs(self) -> tuple[str, ...]:
        return tuple(g.strip() for g in self.path.split(",") if g.strip())


@dataclasses.dataclass(frozen=True)
class Stage:
    """So many steps, and settings of train, data and optimizer for them; None: as the run has it
    (`training.stages`).
    """

    steps: int = 0
    name: str = ""  # in records and reports; "": its number
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    sequence_length: int | None = None
    remat: Remat | None = None
    weights: tuple[float, ...] | None = None
    # A stage that sets one of these has a learning-rate schedule of its own, over its steps and
    # without warm-up. One that sets none goes on with the schedule of the stage before, which then
    # runs over the steps of both.
    learning_rate: float | None = None
    schedule: Schedule | None = None
    decay_fraction: float | None = None
    final_fraction: float | None = None

    def __post_init__(self):
        require(
            len(self.name) <= 100 and escaped(self.name) == self.name and "\n" not in self.name,
            f"train.stages: name = {short(self.name)}: expected at most 100 characters that a "
            "terminal can show",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    # such as main phase, longer rows, anneal; their steps come to `steps`
    stages: tuple[Stage, ...] = ()
    # rows per step, over all devices and micro-batches
    batch_size: int = 16
    sequence_length: int = 2048
    # micro-batches per step
    gradient_accumulation: int = 1
    # initial weights
    seed: int = 0
    # a Hugging Face directory or a run (RUN, RUN@STEP) whose weights this one starts from; "":
    # random
    init_from: str = ""
    # all: of a run also optimizer state, step and place in the data
    init_state: Literal["weights", "all"] = "weights"
    remat: Remat = "none"
    # perfect balance gives a loss of 1 before this weight
    balance_loss_weight: float = 0.001
    # on the mean over depths
    mtp_loss_weight: float = 0.1
    router_z_loss_weight: float = 0.0
    # of model.moe.router_bias, by which a step moves it
    router_bias_rate: float = 0.001
    log_every: int = 10
    # seconds; a run in which no step ends for so long dumps its stacks and exits; 0: never
    step_timeout: float = 1800.0
    # seconds for what may compile: the first step and evaluations
    compile_timeout: float = 7200.0

    def __post_init__(self):
        check_bounds(
            self,
            "train",
            {
                "at least 1": "steps batch_size gradient_accumulation log_every",
                "at least 2": "sequence_length",
                "0 … 2^32 - 1": "seed",
                "0 or more": "balance_loss_weight mtp_loss_weight router_z_loss_weight "
                "router_bias_rate step_timeout compile_timeout",
            },
        )
        require_path(f"train.init_from = {self.init_from!r}", self.init_from)
        require(
            self.init_state == "weights" or bool(self.init_from),
            "train.init_state = 'all': expected a run in train.init_from",
        )
        require(
            self.batch_size % self.gradient_accumulation == 0,
            f"train.batch_size = {self.batch_size} is not a multiple of "
            f"train.gradient_accumulation = {self.gradient_accumulation}",
        )


@dataclasses.dataclass(frozen=True)
class MuonConfig:
    """Of Muon alone; it shares everything else with AdamW, which updates what is no matrix."""

    momentum: float = 0.95
    # Newton–Schulz iterations
    steps: int = 5
    # that they are taken in
    dtype: Literal["float32", "bfloat16"] = "float32"
    # orthogonalises each head's rows or columns alone, not a projection's of all heads together
    per_head: bool = False

    def __post_init__(self):
        check_bounds(
            self, "optimizer.muon", {"0 or more, less than 1": "momentum", "at least 1": "steps"}
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer (decoupled weight decay, clipping) and its learning rate: warm-up, then the
    schedule.
    """

    # a line of config/registry.py; a group of that name, below, has settings that are its alone
    name: str = "adamw"
    muon: MuonConfig = MuonConfig()
    learning_rate: float = 4e-4
    schedule: Schedule = "cosine"
    # at most train.steps of them
    warmup_steps: int = 100
    # last share of the steps over which warmup_stable_decay falls
    decay_fraction: float = 0.2
    # of learning_rate, reached at the last step unless it is constant
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    # as the released model trained; A_log and dt_bias never decay
    decay_norm_weights: bool = True
    # global gradient norm; 0: no clipping
    clip_norm: float = 1.0

    def __post_init__(self):
        check_name(OPTIMIZERS, self.name, "optimizer.name")
        for field in dataclasses.fields(self):
            if field.name in OPTIMIZERS and field.name != self.name:
                require(
                    getattr(self, field.name) == field.default,
                    f"optimizer.{field.name} is set, but optimizer.name = {self.name!r} "
                    f"does not read it: set optimizer.name = {field.name!r}, or leave it out",
                )
        check_bounds(
            self,
            "optimizer",
            {
                "a positive number": "learning_rate eps",
                "0 or more": "warmup_steps weight_decay clip_norm",
                "0 or more, less than 1": "beta1 beta2",
                "0 … 1": "decay_fraction final_fraction",
            },
        )


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Of the compiled step. A non-finite loss or gradient is never applied; the rest is about
    sudden jumps upwards.
    """

    # rewind: last checkpoint, without the data since
    on_spike: Literal["continue", "skip", "rewind", "stop"] = "continue"
    # robust z-score of loss or gradient norm over the window from which it is a spike
    spike_z: float = 10.0
    # steps; nothing counts as a spike before as many were seen
    window: int = 128
    # skipped updates in a row after which the run stops
    max_skips: int = 10

    def __post_init__(self):
        check_bounds(
            self,
            "guards",
            {"a positive number": "spike_z", "at least 4": "window", "at least 1": "max_skips"},
        )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps; the last step is always saved
    keep_last: int = 3  # newest whole checkpoints that are kept
    keep_every: int = 0  # steps; those at multiples of it are kept, too; 0: none

    def __post_init__(self):
        # If one alone were kept, the older would be gone before the newer is sealed.
        check_bounds(
            self,
            "checkpoint",
            {"0 or more": "keep_every", "at least 1": "every", "at least 2": "keep_last"},
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    # steps between held-out evaluations; the last step is always evaluated
    every: int = 250
    # held-out rows per evaluation during training; eval.py uses all
    rows: int = 64
    sample_prompt: str = "def "
    # generated at every evaluation; 0: none
    sample_tokens: int = 96
    # further evaluations at the same steps: names of `config.registry`
    suites: tuple[str, ...] = ()
    # rows of each
    suite_rows: int = 64
    # tokens per row of induction, copy and niah
    suite_lengths: tuple[int, ...] = (256,)
    # of mqar
    suite_pairs: tuple[int, ...] = (4, 8, 16)

    def __post_init__(self):
        for name in ("suites", "suite_lengths", "suite_pairs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("suite_lengths", "suite_pairs"):
            require(
                bool(getattr(self, name)) and min(getattr(self, name)) >= 1,
                f"eval.{name} = {getattr(self, name)}: expected positive numbers",
            )
        check_bounds(
            self, "eval", {"at least 1": "every rows suite_rows", "0 or more": "sample_tokens"}
        )
        require(
            bool(self.sample_prompt) or not self.sample_tokens,
            "eval.sample_prompt is empty: expected text, or eval.sample_tokens = 0",
        )


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
            require(
                size >= 1 or size == -1,
                f"parallel.mesh.{axis} = {size}: expected at least 1, or -1 for what is left over",
            )
        require(
            [getattr(self, axis) for axis in MESH_AXES].count(-1) <= 1,
            "parallel.mesh: expected -1 for one axis at most",
        )

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis of a mesh of `devices`, -1 worked out."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        given = math.prod(size for size in sizes.values() if size != -1)
        text = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        require(
            devices % given == 0 and (given == devices or -1 in sizes.values()),
            f"parallel.mesh: {text} = {given}, but there are {devices} devices: change an axis so "
            "that they multiply to "
            f"{devices}" + (", or set one to -1" if -1 not in sizes.values() else ""),
        )
        return {axis: devices // given if size == -1 else size for axis, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the run is spread over its devices."""

    mesh: MeshConfig = MeshConfig()
    # seconds for all processes of the run to find each other
    start_timeout: float = 300.0
    # seconds after which a silent process counts as dead, and the others end
    heartbeat_timeout: float = 100.0
    # of XLA, "NAME=VALUE,…", in place of those that sharding/compiler_options.py has for the chip
    compiler_options: str = ""

    def __post_init__(self):
        check_bounds(self, "parallel", {"at least 1": "start_timeout heartbeat_timeout"})


@dataclasses.dataclass(frozen=True)
class TelemetryConfig:
    """metrics.jsonl, the live display and report.html are always there; docs/report.md explains
    them.
    """

    # steps between measurements of every layer (one forward pass each); 0: never
    diagnostics_every: int = 100
    # scalars and samples for TensorBoard in WORKDIR/tensorboard
    tensorboard: bool = False
    # Weights & Biases project; "": none
    wandb: str = ""

    def __post_init__(self):
        check_bounds(self, "telemetry", {"0 or more": "diagnostics_every"})


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Traces for xprof / TensorBoard's profiler, written to WORKDIR/profile."""

    # "10:13" traces steps 10, 11 and 12; "": none
    steps: str = ""
    # at the end of those steps also writes what holds the device's memory, for pprof
    memory: bool = False

    def __post_init__(self):
        require(
            not self.memory or bool(self.steps),
            "profile.memory is set without profile.steps: expected steps such as 10:13",
        )
        if self.steps:
            first, _, end = self.steps.partition(":")
            require(
                first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end),
                f"profile.steps = {self.steps!r}: expected FIRST:END with 1 ≤ FIRST < END, such "
                "as 10:13 for steps 10, 11 and 12",
            )

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
        require(
            bool(re.fullmatch(r"[^/\n]{1,100}", self.name))
            and escaped(self.name) == self.name
            and self.name not in (".", ".."),
            f"name = {self.name[:120]!r}: expected the name of a folder, without '/' and control "
            "characters: the workdir defaults to runs/<name>",
        )
        length, rate = self.train.sequence_length, self.train.router_bias_rate
        require(
            length <= self.model.context_length,
            f"train.sequence_length = {length}: expected at most "
            f"model.max_position_embeddings × model.yarn_factor = {self.model.context_length}",
        )
        require(
            length > self.model.mtp_depth + 1,
            f"train.sequence_length = {length}: expected more than model.mtp_depth + 1",
        )
        require(
            self.model.moe.router_bias or rate == TrainConfig.router_bias_rate,
            f"train.router_bias_rate = {rate}: no router of this "
            f"model reads it: expected {TrainConfig.router_bias_rate}, or model.moe.router_bias = "
            "True",
        )


def default_config() -> dict[str, Any]:
    """Nested dict of every default, from which the files in `configs/` start."""
    return to_dict(Config())
