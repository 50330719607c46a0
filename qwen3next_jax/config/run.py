"""The settings of a run, group by group, and `Config`, which holds all groups.

The architecture is in `config/model.py`. The comment beside a field is the setting's meaning;
`qwen3next train --help` prints it.
"""

import dataclasses
import math
import re
from typing import Any, Literal

from qwen3next_jax.common.errors import escape_lines, require, require_path, short_repr
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.model import ModelConfig
from qwen3next_jax.config.reading import to_dict
from qwen3next_jax.config.registry import DATA_SOURCES, OPTIMIZERS, check_name, is_import_string

MESH_AXES = ("data", "expert", "context", "tensor")
# What the forward pass saves for the backward pass, which computes the rest again. "none": nothing
# is computed again (in bfloat16, only cheap elementwise results are). "block": the input of each
# block. "dots": also the results of its projections. "offload": the input of each block, in the
# host's memory.
IndexerTraining = Literal["frozen", "dense", "sparse"]
Remat = Literal["none", "block", "dots", "offload"]
Schedule = Literal["cosine", "warmup_stable_decay", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Settings of the synthetic tasks (`data/synthetic.py`)."""

    # mqar: number of key-value pairs in a row
    pairs: int = 8
    # mqar: the distance d of a query from its pair has probability ∝ d^(gap_power - 1)
    gap_power: float = 0.01

    def __post_init__(self):
        check_bounds(
            self, "data.synthetic", {"at least 1": "pairs", "a positive number": "gap_power"}
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the run trains on, and how it becomes rows of `train.sequence_length` tokens."""

    # "text" reads the files of data.path; other sources, such as "mqar", are tasks that are made
    # from data.seed (config/registry.py)
    source: str = "text"
    synthetic: SyntheticConfig = SyntheticConfig()
    # comma-separated globs, local or gs://, of text files (.txt, .md, .py, …), .jsonl and .parquet
    # files, or of folders of these; "" reads the source of Python's standard library
    path: str = ""
    # share of the rows that comes from each glob of data.path; (): in proportion to their sizes
    weights: tuple[float, ...] = ()
    # the field of .jsonl records, and the column of .parquet files, that holds the text
    text_field: str = "text"
    # what to do with a document that is not UTF-8: end the run, skip the document, or replace each
    # wrong byte by U+FFFD
    on_bad_text: Literal["stop", "skip", "replace"] = "stop"
    # "bytes", or the path of a Hugging Face tokenizer.json; "": the tokenizer of the model in
    # train.init_from, or bytes if there is none
    tokenizer: str = ""
    # share of the documents that is held out for evaluation; a hash of the text decides
    heldout_fraction: float = 0.02
    # folder for the tokenized and packed rows; each data set has a subfolder named by its
    # fingerprint
    prepared_dir: str = "runs/prepared"
    # decides the order of the rows, and the rows of synthetic tasks
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))
        # Older run.json files say "bytes", which was the default, even for tasks without tokenizer.
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
    """One stage of a run: a number of steps, and settings of train, data and optimizer that hold
    during them. None leaves a setting as the run has it.
    """

    steps: int = 0
    # name in records and reports; "": the number of the stage
    name: str = ""
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    sequence_length: int | None = None
    remat: Remat | None = None
    indexer_training: IndexerTraining | None = None
    weights: tuple[float, ...] | None = None
    # A stage that sets one of the four below gets a learning-rate schedule of its own, over its own
    # steps and without warm-up. A stage that sets none continues the schedule of the stage before,
    # which then runs over the steps of both.
    learning_rate: float | None = None
    schedule: Schedule | None = None
    decay_fraction: float | None = None
    final_fraction: float | None = None

    def __post_init__(self):
        require(
            len(self.name) <= 100
            and escape_lines(self.name) == self.name
            and "\n" not in self.name,
            f"train.stages: name = {short_repr(self.name)}: expected at most 100 characters that a "
            "terminal can show",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long the run trains, on batches of what shape, from which weights, on which loss."""

    # optimizer steps of the whole run
    steps: int = 1000
    # stages of the run, such as a main phase, longer rows and an anneal; their steps must sum to
    # train.steps
    stages: tuple[Stage, ...] = ()
    # rows of a step, over all devices and micro-batches
    batch_size: int = 16
    # tokens of a row
    sequence_length: int = 2048
    # number of micro-batches that a step is split into
    gradient_accumulation: int = 1
    # decides the initial weights
    seed: int = 0
    # where the initial weights come from: a Hugging Face directory, or a run (RUN for its newest
    # checkpoint, RUN@STEP for another); "": random
    init_from: str = ""
    # what to take from a run in train.init_from: its weights, or also its optimizer state, step
    # and place in the data
    init_state: Literal["weights", "all"] = "weights"
    # rematerialisation: how much the backward pass computes again to save memory (model/remat.py)
    remat: Remat = "none"
    # weight of the experts' load-balancing loss, which is 1 when the load is balanced perfectly
    balance_loss_weight: float = 0.001
    # weight of the multi-token prediction loss, a mean over its depths
    mtp_loss_weight: float = 0.1
    # weight of the router z-loss
    router_z_loss_weight: float = 0.0
    # How the indexers of sparse attention train: not at all, on dense attention (a warm-up), or on
    # what they select. Their loss trains nothing else.
    indexer_training: IndexerTraining = "frozen"
    # weight of the indexers' loss, a mean over their layers
    indexer_loss_weight: float = 1.0
    # how far one step moves the bias of model.moe.router_bias
    router_bias_rate: float = 0.001
    # steps between two lines of metrics
    log_every: int = 10
    # functions of your own, 'my_package.module:function': each is called with the run's Trainer
    # before the first step, and may add hooks
    hooks: tuple[str, ...] = ()
    # what happens when a hook fails without which the run can train: an evaluation, a sample,
    # the diagnostics, one of your own
    on_hook_error: Literal["stop", "continue"] = "stop"
    # seconds after which a step that does not end makes the run write its stack traces and exit;
    # 0: never
    step_timeout: float = 1800.0
    # the same for the first step and for evaluations, which may have to compile
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
                "indexer_loss_weight "
                "router_bias_rate step_timeout compile_timeout",
            },
        )
        object.__setattr__(self, "hooks", tuple(self.hooks))
        for name in self.hooks:
            require(
                is_import_string(name),
                f"train.hooks: {name!r}: expected 'my_package.module:function'",
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
    """Settings that only Muon has. It shares the others with AdamW, which updates all parameters
    that are no matrices.
    """

    momentum: float = 0.95
    # number of Newton–Schulz iterations
    steps: int = 5
    # dtype of the Newton–Schulz iterations
    dtype: Literal["float32", "bfloat16"] = "float32"
    # whether each head's part of a projection is orthogonalised by itself
    per_head: bool = False

    def __post_init__(self):
        check_bounds(
            self, "optimizer.muon", {"0 or more, less than 1": "momentum", "at least 1": "steps"}
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, with decoupled weight decay and gradient clipping, and its learning rate: a
    warm-up, then the schedule.
    """

    # a name of OPTIMIZERS in config/registry.py; settings that only one optimizer has are a group
    # of its name
    name: str = "adamw"
    muon: MuonConfig = MuonConfig()
    # the highest learning rate, reached at the end of the warm-up
    learning_rate: float = 4e-4
    schedule: Schedule = "cosine"
    # steps over which the learning rate rises from 0; at most train.steps count
    warmup_steps: int = 100
    # warmup_stable_decay: the last share of the steps, during which the learning rate falls
    decay_fraction: float = 0.2
    # the learning rate at the last step as a share of the highest, for all schedules but "constant"
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    # whether weight decay acts on norm weights, as in the released model's training; it never acts
    # on A_log and dt_bias
    decay_norm_weights: bool = True
    # largest global norm of the gradients; 0: no clipping
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
    """What the train step does about bad updates. It never applies an update whose loss or gradient
    is not finite; these settings are about spikes, sudden jumps upwards.
    """

    # "continue" applies the update, "skip" does not, "rewind" returns to the last checkpoint and
    # passes over the data since, "stop" ends the run
    on_spike: Literal["continue", "skip", "rewind", "stop"] = "continue"
    # robust z-score, over the window, above which a loss or gradient norm is a spike
    spike_z: float = 10.0
    # number of steps that the z-score looks back; there are no spikes before so many steps
    window: int = 128
    # number of skipped updates in a row that ends the run
    max_skips: int = 10

    def __post_init__(self):
        check_bounds(
            self,
            "guards",
            {"a positive number": "spike_z", "at least 4": "window", "at least 1": "max_skips"},
        )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the run saves its state, and which checkpoints it keeps."""

    # steps between two checkpoints; the last step is always saved
    every: int = 500
    # how many of the newest whole checkpoints to keep
    keep_last: int = 3
    # also keep the checkpoints at multiples of so many steps; 0: none
    keep_every: int = 0

    def __post_init__(self):
        # With keep_last = 1 the older checkpoint would be deleted before the newer is complete.
        check_bounds(
            self,
            "checkpoint",
            {"0 or more": "keep_every", "at least 1": "every", "at least 2": "keep_last"},
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What the run evaluates, and when."""

    # steps between two evaluations; the last step is always evaluated
    every: int = 250
    # held-out rows of an evaluation during training; eval.py uses all rows
    rows: int = 64
    # text that the sample of an evaluation continues
    sample_prompt: str = "def "
    # tokens of the sample; 0: no sample
    sample_tokens: int = 96
    # more evaluations at the same steps: names of EVALUATIONS in config/registry.py
    suites: tuple[str, ...] = ()
    # rows of each suite
    suite_rows: int = 64
    # row lengths, in tokens, of the suites induction, copy and niah
    suite_lengths: tuple[int, ...] = (256,)
    # numbers of key-value pairs of the suite mqar
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
    """How many devices each axis of the mesh has; -1, once at most: all that are left."""

    # splits the rows of a batch, and the storage of parameters and optimizer state (FSDP)
    data: int = -1
    # splits the rows of a batch, and the experts
    expert: int = 1
    # splits the tokens of a row
    context: int = 1
    # splits heads, and the widths of MLPs
    tensor: int = 1

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
        """{axis: number of devices} of a mesh of `devices` devices in all.

        Raises:
          UserError: the sizes do not multiply to `devices`.
        """
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
    """How the run is spread over devices and processes."""

    mesh: MeshConfig = MeshConfig()
    # seconds that the processes of the run wait for each other at the start
    start_timeout: float = 300.0
    # seconds after which a silent process counts as dead and the others end
    heartbeat_timeout: float = 100.0
    # options of the XLA compiler, "NAME=VALUE,…"; they replace those that
    # sharding/compiler_options.py gives for the chip
    compiler_options: str = ""

    def __post_init__(self):
        check_bounds(self, "parallel", {"at least 1": "start_timeout heartbeat_timeout"})


@dataclasses.dataclass(frozen=True)
class TelemetryConfig:
    """What the run records besides metrics.jsonl, the live display and report.html, which every run
    has (docs/report.md).
    """

    # steps between two measurements of every layer, each of which costs a forward pass; 0: never
    diagnostics_every: int = 100
    # whether to write scalars and samples for TensorBoard into WORKDIR/tensorboard
    tensorboard: bool = False
    # project on Weights & Biases that gets the metrics; "": none
    wandb: str = ""

    def __post_init__(self):
        check_bounds(self, "telemetry", {"0 or more": "diagnostics_every"})


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Traces for xprof / TensorBoard's profiler, written to WORKDIR/profile."""

    # the steps to trace: "10:13" traces steps 10, 11 and 12; "": none
    steps: str = ""
    # whether to write, after these steps, what holds the device's memory (for pprof)
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
        """The steps to trace."""
        first, _, end = (self.steps or "0:0").partition(":")
        return range(int(first), int(end))


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    # name of the run; its folder is runs/<name> unless --workdir gives another
    name: str = "default"
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
            and escape_lines(self.name) == self.name
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
