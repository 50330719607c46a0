"""The settings of a run, group by group, and `Config`, which holds all groups.

The settings of the architecture are in `config/model.py`. The comment above a field gives the
meaning of the setting; `qwen3next train --help` prints these comments.
"""

import dataclasses
import datetime
import math
import re
from typing import Any, Literal

from qwen3next_jax.common.errors import escape_control_in_lines, require, require_path, short_repr
from qwen3next_jax.common.storage import is_bucket
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.model import ModelConfig
from qwen3next_jax.config.reading import to_dict
from qwen3next_jax.config.registry import (
    DATA_SOURCES,
    OPTIMIZERS,
    check_name,
    is_import_string,
)
from qwen3next_jax.config.remat import parse_remat
from qwen3next_jax.config.sources import SourceConfig, parse_sources, parse_weights

MESH_AXES = ("slice", "data", "expert", "context", "tensor")
IndexerTraining = Literal["frozen", "dense", "sparse"]
SliceState = Literal["replicated", "sharded"]
Schedule = Literal["cosine", "warmup_stable_decay", "linear", "inverse_sqrt", "constant"]


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Settings of the synthetic tasks (`data/synthetic.py`, `data/state_tasks.py`)."""

    # mqar: number of key-value pairs at the start of a row; state_recall: number of keys there
    pairs: int = 8
    # modular_addition: the number modulo which the inputs are added
    modulus: int = 5
    # s3, a5, s5: the inputs are the permutations that move at most this many things; 2: exchanges
    # of two things; 3: also cycles of three; 5: all permutations
    max_moved: int = 5
    # mqar: a query stands at the d-th place after the pairs with a probability ∝ d^(gap_power - 1)
    gap_power: float = 0.01

    def __post_init__(self):
        check_bounds(
            self,
            "data.synthetic",
            {
                "at least 1": "pairs",
                "at least 2": "modulus max_moved",
                "a positive number": "gap_power",
            },
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the run trains on, and how documents become rows of `train.sequence_length` tokens."""

    # "text": the files of data.path. "recorded": the files of data.path, as qwen3next generate
    # --record_routing writes them (docs/routing.md). Other names, such as "mqar": synthetic tasks,
    # generated from data.seed (DATA_SOURCES in config/registry.py lists all)
    source: str = "text"
    synthetic: SyntheticConfig = SyntheticConfig()
    # the sources, separated by commas: globs or folders of text, each with a name or without, such
    # as web=data/web/*.jsonl. A glob is local or remote (gs://, s3://, …) and matches text files
    # (.txt, .md, .py, …), .jsonl, .json, .parquet and .arrow files, or files of tokens
    # (docs/data.md); "": the source code of Python's standard library
    path: str = ""
    # the weight of each source of data.path, in their order (3,1) or by name (web=3,code=1): the
    # shares of the rows that training reads from the sources are in proportion to these numbers;
    # "": in proportion to the sizes of the sources
    weights: str = ""
    # the name of the field (of JSON records) or column (of .parquet and .arrow files) that holds
    # the text; "content.text" is the field text in the object content; one name for all sources
    # of data.path, or one for each, as in data.weights
    text_field: str = "text"
    # the name of the field of JSON records that holds the messages of a conversation, such as
    # "messages": the tokenizer's chat template writes them, and the loss counts what the assistant
    # says (docs/data.md); one name for all sources of data.path, or one for each, as in
    # data.weights, empty for a source of texts; "": all sources are texts
    messages_field: str = ""
    # the day that a chat template writes if it asks for the date, such as "2026-01-31"; "": such a
    # template is refused. The day on which data are prepared has no effect
    template_date: str = ""
    # what to do with a document that is not UTF-8: end the run, skip the document, or replace each
    # wrong byte by U+FFFD
    on_bad_text: Literal["stop", "skip", "replace"] = "stop"
    # what to do with a record without valid text (broken JSON, no such field, null, NUL, damaged
    # compression, or not UTF-8 while data.on_bad_text is "stop"): end the run, or skip the record
    bad_records: Literal["stop", "skip"] = "stop"
    # with bad_records = "skip", the share of a source's records that may be skipped; if more are
    # bad, the run ends
    bad_records_limit: float = 0.01
    # "bytes", or the path of a Hugging Face tokenizer.json; "": the tokenizer of the model in
    # train.init_from, or bytes if there is none
    tokenizer: str = ""
    # special tokens of the tokenizer, such as <|im_end|>, that are encoded as their own id where
    # their text occurs in a document; all other special tokens are encoded as ordinary text
    parse_tokens: tuple[str, ...] = ()
    # share of the documents that are held out for evaluation; a hash of a document's text, which
    # white space does not change, decides whether the document is held out
    heldout_fraction: float = 0.02
    # folder for prepared data: tokens, and rows packed from them (data/preparation.py); several
    # runs may share it
    prepared_dir: str = "runs/prepared"
    # seed of the order of the rows, and of the rows of synthetic tasks
    seed: int = 0

    def __post_init__(self):
        check_name(DATA_SOURCES, self.source, "data.source")
        check_bounds(
            self,
            "data",
            {
                "0 … 2^32 - 1": "seed",
                "between 0 and 1": "heldout_fraction",
                "0 … 1": "bad_records_limit",
            },
        )
        paths = {
            "path": [source.glob for source in self.sources],
            "tokenizer": [self.tokenizer],
            "prepared_dir": [self.prepared_dir],
        }
        for name, values in paths.items():
            for value in values:
                require_path(f"data.{name} = {value!r}", value)
        require(
            is_bucket(self.prepared_dir) or "://" not in self.prepared_dir,
            f"data.prepared_dir = {self.prepared_dir!r}: expected a local directory, "
            "gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
        )
        parse_weights(self.weights, self.path)
        reads_messages = any(source.messages_field for source in self.sources)
        require(
            bool(self.path) or not reads_messages,
            f"data.messages_field = {self.messages_field!r} without data.path: expected the files "
            "that hold the conversations",
        )
        require(
            not self.template_date or reads_messages,
            f"data.template_date = {self.template_date!r} without data.messages_field: only "
            "conversations have a chat template that may write it",
        )
        require(
            not self.template_date or _is_day(self.template_date),
            f"data.template_date = {short_repr(self.template_date)}: expected a day as YYYY-MM-DD",
        )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources that `path` lists; () if `path` consists of commas."""
        return parse_sources(self.path, self.text_field, self.messages_field)

    @property
    def source_weights(self) -> tuple[float, ...]:
        """The weight of each source; () if the setting `weights` is empty."""
        return parse_weights(self.weights, self.path)


def _is_day(text: str) -> bool:
    """Whether `text` is a day, written as YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run: a number of steps, and settings of the groups train, data and optimizer
    that apply during these steps. If a setting of the stage is None, the stage uses the run's
    value.
    """

    # number of optimizer steps of the stage
    steps: int = 0
    # the stage's name in records and reports; "": its number, from 1
    name: str = ""
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    sequence_length: int | None = None
    remat: str | None = None
    indexer_training: IndexerTraining | None = None
    weights: str | None = None
    # A stage that sets one of the four settings below has its own learning-rate schedule, over its
    # own steps and without warm-up. A stage that sets none of them continues the schedule of the
    # stage before it; that schedule then covers the steps of both.
    learning_rate: float | None = None
    schedule: Schedule | None = None
    decay_fraction: float | None = None
    final_fraction: float | None = None

    def __post_init__(self):
        require(
            len(self.name) <= 100
            and escape_control_in_lines(self.name) == self.name
            and "\n" not in self.name,
            f"train.stages: name = {short_repr(self.name)}: expected at most 100 characters that a "
            "terminal can show",
        )
        if self.remat is not None:
            parse_remat(self.remat)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of the run, the shape of its batches, its initial weights, and its loss."""

    # number of optimizer steps of the whole run
    steps: int = 1000
    # stages of the run, such as a main phase, longer rows and an anneal; their steps must sum to
    # train.steps
    stages: tuple[Stage, ...] = ()
    # number of rows per step, over all devices and micro-batches
    batch_size: int = 16
    # number of tokens per row
    sequence_length: int = 2048
    # number of micro-batches that a step is split into
    gradient_accumulation: int = 1
    # seed of the random initial weights
    seed: int = 0
    # source of the initial weights: a Hugging Face directory, or the folder of a run (RUN for its
    # newest checkpoint, RUN@STEP for another one); "": random weights
    init_from: str = ""
    # what to load from a run in train.init_from: "weights", or "all": also its optimizer state, its
    # step and its position in the data
    init_state: Literal["weights", "all"] = "weights"
    # which results of the forward pass the backward pass computes again, to save memory
    # (model/remat.py). "none": none, or in bfloat16 cheap elementwise operations. "block": all
    # inside a block but the output of attention and the router's choices. "full": all inside a
    # block. "dots": the same as "block", but the results of projections are saved. "offload": the
    # same as "full", and the inputs of blocks are kept in the host's memory. Or what is saved, part
    # by part: "keep=queries,keys offload=input,mixer" saves two parts of each block on the device
    # and two in the host's memory; "dots keep=experts" saves a part beside what "dots" saves
    # (config/remat.py names the parts)
    remat: str = "none"
    # weight of the experts' load-balancing loss, which is 1 if all experts get equally many tokens
    balance_loss_weight: float = 0.001
    # weight of the multi-token prediction loss, which is the mean of the losses of its depths
    mtp_loss_weight: float = 0.1
    # weight of the router z-loss
    router_z_loss_weight: float = 0.0
    # weight of the z-loss of the next token's logits, the mean of their squared logsumexp (PaLM,
    # 2204.02311, has 1e-4)
    output_z_loss_weight: float = 0.0
    # how the indexers of sparse attention (the mixer qsa) are trained. "frozen": not at all.
    # "dense": attention sees all keys, and the indexers learn its probabilities over all blocks of
    # keys, as a warm-up. "sparse": attention sees the selected blocks, and the indexers learn its
    # probabilities over these. The indexers' loss changes no other parameters
    indexer_training: IndexerTraining = "frozen"
    # weight of the indexers' loss, which is the mean over the layers that have an indexer
    indexer_loss_weight: float = 1.0
    # how a step changes the biases of model.moe.router_bias. "sign": by train.router_bias_rate, up
    # or down (2408.15664). "quantile": to the biases with which each expert would have got its
    # share of this step's tokens (Kimi K3's report, section 2.3.3)
    router_bias_update: Literal["sign", "quantile"] = "sign"
    # router_bias_update = "sign": how much one step adds to, or subtracts from, a bias
    router_bias_rate: float = 0.001
    # decay rate, per step, of an exponential moving average of the parameters, which is evaluated
    # and saved beside them (docs/adapting.md); 0: no average
    ema: float = 0.0
    # update rules of your own, each as 'my_package.module:function', which the run calls with its
    # Config and its ParameterGroups (docs/extending.md)
    update_rules: tuple[str, ...] = ()
    # number of steps between two lines of metrics
    log_every: int = 10
    # functions of your own, each as 'my_package.module:function': the run calls each of them with
    # its Trainer before the first step, so that it can add hooks
    hooks: tuple[str, ...] = ()
    # whether the run ends or continues after an error in a hook that training does not need: an
    # evaluation, a sample, the diagnostics, a hook of your own
    on_hook_error: Literal["stop", "continue"] = "stop"
    # parameters that training leaves as they are, each entry as conditions such as "kind=norm" or
    # "name=*/mixer/* layer=0-3" (docs/adapting.md)
    freeze: tuple[str, ...] = ()
    # seconds that a step may take; after this time the process writes the stacks of its threads to
    # a file and exits; 0: no limit
    step_timeout: float = 1800.0
    # the same limit for the first step of each stage, which includes compilation, and for
    # evaluations and saves; 0: no limit
    compile_timeout: float = 7200.0

    def __post_init__(self):
        check_bounds(
            self,
            "train",
            {
                "at least 1": "steps batch_size gradient_accumulation log_every",
                "at least 2": "sequence_length",
                "0 or more, less than 1": "ema",
                "0 … 2^32 - 1": "seed",
                "0 or more": "balance_loss_weight mtp_loss_weight router_z_loss_weight "
                "output_z_loss_weight "
                "indexer_loss_weight "
                "router_bias_rate step_timeout compile_timeout",
            },
        )
        object.__setattr__(self, "update_rules", tuple(self.update_rules))
        object.__setattr__(self, "hooks", tuple(self.hooks))
        object.__setattr__(self, "freeze", tuple(self.freeze))
        for setting in ("update_rules", "hooks"):
            for name in getattr(self, setting):
                require(
                    is_import_string(name),
                    f"train.{setting}: {name!r}: expected 'my_package.module:function'",
                )
        parse_remat(self.remat)
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
    """Settings that only Muon has. Muon updates the matrices inside layers. AdamW, with the
    settings of the group `optimizer`, updates all parameters that Muon does not update.
    """

    # decay rate per step of the running mean of the gradients
    momentum: float = 0.95
    # number of Newton–Schulz iterations
    steps: int = 5
    # dtype of the Newton–Schulz iterations
    dtype: Literal["float32", "bfloat16"] = "float32"
    # whether each head's part of a projection is orthogonalised separately
    per_head: bool = False

    def __post_init__(self):
        check_bounds(
            self, "optimizer.muon", {"0 or more, less than 1": "momentum", "at least 1": "steps"}
        )


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own."""

    # the parameters of the group, as conditions such as "kind=norm" or "layer=0-3"
    # (docs/adapting.md)
    parameters: str = ""
    # the group's learning rate, as a multiple of the run's
    learning_rate_factor: float = 1.0
    # the group's weight decay, in place of optimizer.weight_decay; None: the same. It never applies
    # to parameters that never decay, such as A_log and dt_bias
    weight_decay: float | None = None

    def __post_init__(self):
        check_bounds(self, "optimizer.groups", {"a positive number": "learning_rate_factor"})
        require(
            self.weight_decay is None or self.weight_decay >= 0,
            f"optimizer.groups: weight_decay = {self.weight_decay}: expected 0 or more",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, gradient clipping, decoupled weight decay, and the learning rate. The learning
    rate first rises linearly over `warmup_steps` steps and then follows `schedule`.
    """

    # a name of OPTIMIZERS in config/registry.py; the settings that only one optimizer has are in a
    # group with its name
    name: str = "adamw"
    muon: MuonConfig = MuonConfig()
    # the highest learning rate, reached at the end of the warm-up
    learning_rate: float = 4e-4
    # how the learning rate falls after the warm-up. "cosine": along a cosine.
    # "warmup_stable_decay": linearly over the last decay_fraction of the steps. "linear": linearly
    # over all steps. "inverse_sqrt": as the square root of warmup_steps over the step. "constant":
    # not at all
    schedule: Schedule = "cosine"
    # number of steps over which the learning rate rises linearly
    warmup_steps: int = 100
    # warmup_stable_decay: the share of the steps, at the end, over which the learning rate falls
    decay_fraction: float = 0.2
    # the learning rate of the last step as a share of the highest; "constant" and "inverse_sqrt" do
    # not read it
    final_fraction: float = 0.1
    # Adam's decay rate, per step, of the mean of the gradients
    beta1: float = 0.9
    # Adam's decay rate, per step, of the mean of the squared gradients
    beta2: float = 0.95
    # dtype in which AdamW and Muon keep the mean of the gradients between steps. "bfloat16" saves
    # 2 bytes a parameter; lazy_adamw does not read it
    mean_dtype: Literal["float32", "bfloat16"] = "float32"
    # Adam divides by √v + eps, where v is the mean of the squared gradients
    eps: float = 1e-8
    # each step subtracts learning rate × weight_decay × parameter
    weight_decay: float = 0.1
    # whether weight decay applies to norm weights, as in the training of the released model; it
    # never applies to A_log and dt_bias
    decay_norm_weights: bool = True
    # the largest global norm of the gradients; larger gradients are scaled down to this norm; 0: no
    # clipping
    clip_norm: float = 1.0
    # how the tables of n-gram embeddings (model.ple) are updated. "adamw": AdamW updates all rows
    # in every step. "lazy_adamw": only the rows that the batch uses change, and a row that it does
    # not use keeps its means of gradients. It is for tables much larger than a batch
    ngram_table: Literal["adamw", "lazy_adamw"] = "adamw"
    # groups of parameters with a learning rate or a weight decay of their own; no parameter may
    # belong to two of them
    groups: tuple[ParameterGroup, ...] = ()
    # how start values and learning rates follow the width and depth of the model (docs/widths.md).
    # "none": not at all. "mup": the width. "completep": the width and the depth
    scaling: Literal["none", "mup", "completep"] = "none"
    # model.hidden_size of the model whose start values and learning rates scaling leaves alone
    base_width: int = 0
    # completep: model.num_hidden_layers of that model
    base_depth: int = 0

    def __post_init__(self):
        check_name(OPTIMIZERS, self.name, "optimizer.name")
        self._check_scaling()
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
        require(
            self.schedule != "inverse_sqrt" or self.warmup_steps > 0,
            "optimizer.schedule = 'inverse_sqrt' with warmup_steps = 0: expected a warm-up, by "
            "whose length the rate falls (a later stage of train.stages has none)",
        )

    def _check_scaling(self) -> None:
        needed = {"none": (), "mup": ("base_width",), "completep": ("base_width", "base_depth")}
        for name in ("base_width", "base_depth"):
            value = getattr(self, name)
            if name in needed.get(self.scaling, (name,)):
                require(
                    value >= 1,
                    f"optimizer.{name} = {value}: optimizer.scaling = {self.scaling!r} needs the "
                    f"{name.removeprefix('base_')} of the model for which the learning rate was "
                    "chosen: expected a positive number",
                )
            else:
                require(
                    value == 0,
                    f"optimizer.{name} = {value}: optimizer.scaling = {self.scaling!r} does not "
                    "read it: leave it out, or set optimizer.scaling",
                )


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """What the train step does when the loss or the gradient norm has a spike, which is a sudden
    jump upwards. The train step never applies an update whose loss or gradient is not finite.
    """

    # what a spike does. "continue": the update is applied. "skip": the update is not applied.
    # "rewind": the run returns to the last checkpoint and skips the data that it has read since
    # then. "stop": the run ends
    on_spike: Literal["continue", "skip", "rewind", "stop"] = "continue"
    # a loss or gradient norm is a spike if it lies more than this many standard deviations above
    # the median of the window; the median absolute deviation gives the standard deviation
    spike_z: float = 10.0
    # number of past steps in the window; until the window is full, nothing counts as a spike
    window: int = 128
    # the run ends after this many skipped updates in a row
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

    # number of steps between two checkpoints; the state after the last step is always saved
    every: int = 500
    # number of the newest complete checkpoints to keep
    keep_last: int = 3
    # also keep all checkpoints whose step is a multiple of this number; 0: none
    keep_every: int = 0
    # also keep the checkpoint with the lowest held-out loss; a checkpoint that was not evaluated
    # (eval.every) has none. `eval`, `generate` and `export` read it with --step=best
    keep_best: bool = False
    # a workdir in a bucket: number of seconds for which the bucket may take nothing before the run
    # ends; meanwhile the run trains on, and saves and metrics wait
    patience: float = 600.0

    def __post_init__(self):
        # With keep_last = 1 no checkpoint would be left if the newest one is damaged.
        check_bounds(
            self,
            "checkpoint",
            {
                "0 or more": "keep_every",
                "at least 1": "every patience",
                "at least 2": "keep_last",
            },
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What the run evaluates, and when."""

    # number of steps between two evaluations; there is always one after the last step
    every: int = 250
    # number of held-out rows of an evaluation during training; eval.py uses all rows by default
    rows: int = 64
    # text that the model continues at each evaluation, as a sample. In place of the default, a run
    # on conversations continues their first turn
    sample_prompt: str = "def "
    # number of tokens of the sample; 0: no sample
    sample_tokens: int = 96
    # names of further evaluations at the same steps (EVALUATIONS in config/registry.py)
    suites: tuple[str, ...] = ()
    # number of rows of each of these evaluations
    suite_rows: int = 64
    # row lengths, in tokens, of the evaluations induction, copy, niah and state
    suite_lengths: tuple[int, ...] = (256,)
    # numbers of key-value pairs of the evaluation mqar
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
    """The number of devices along each axis of the mesh. One axis may be -1, which stands for all
    remaining devices.
    """

    # number of groups of devices that each have all parameters; the groups share the rows of a
    # batch, and add up their gradients once a step. 0: one group for each TPU slice, and a single
    # group on other devices
    slice: int = 0
    # number of devices over which the rows of a batch are split, and also the stored parameters and
    # optimizer state (FSDP)
    data: int = -1
    # number of devices over which the experts are split, and also the rows of a batch
    expert: int = 1
    # number of devices over which the tokens of a row are split
    context: int = 1
    # number of devices over which attention heads and the hidden widths of MLPs are split
    tensor: int = 1

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if axis == "slice" and size == 0:
                continue
            require(
                size >= 1 or size == -1,
                f"parallel.mesh.{axis} = {size}: expected at least 1, or -1 for what is left over",
            )
        require(
            [getattr(self, axis) for axis in MESH_AXES].count(-1) <= 1,
            "parallel.mesh: expected -1 for one axis at most",
        )

    def axis_sizes(self, devices: int, slices: int = 1) -> dict[str, int]:
        """Returns name of an axis → number of devices along it, for a mesh of `devices` devices.

        Args:
          slices: the size of the axis `slice` if its setting is 0.

        Raises:
          UserError: the sizes do not multiply to `devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        sizes["slice"] = sizes["slice"] or slices
        product = math.prod(size for size in sizes.values() if size != -1)
        text = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        require(
            devices % product == 0 and (product == devices or -1 in sizes.values()),
            f"parallel.mesh: {text} = {product}, but there are {devices} devices: change an axis "
            "so that they multiply to "
            f"{devices}" + (", or set one to -1" if -1 not in sizes.values() else ""),
        )
        return {axis: devices // product if size == -1 else size for axis, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the devices and processes share the run."""

    mesh: MeshConfig = MeshConfig()
    # dtype in which gradients cross the network between slices; they are added up in float32 within
    # a slice, whatever this says
    slice_gradients: Literal["float32", "bfloat16"] = "float32"
    # whether every slice has the whole state of the optimizer, or the slices share it. If they
    # share it, each computes a part of every update, and the parts cross the network in float32
    slice_state: SliceState = "replicated"
    # seconds that the processes of the run wait for each other when they start
    start_timeout: float = 300.0
    # seconds without a heartbeat after which a process counts as dead and the others exit
    heartbeat_timeout: float = 100.0
    # options of the XLA compiler, as "NAME=VALUE,…"; they replace the options that
    # sharding/compiler_options.py has for the chip
    compiler_options: str = ""

    def __post_init__(self):
        check_bounds(self, "parallel", {"at least 1": "start_timeout heartbeat_timeout"})


@dataclasses.dataclass(frozen=True)
class TelemetryConfig:
    """What a run records in addition to metrics.jsonl, the live display and report.html, which
    every run has (docs/report.md).
    """

    # number of steps between two measurements of all layers; each measurement costs a forward pass;
    # 0: none
    diagnostics_every: int = 100
    # whether to write scalars and samples for TensorBoard into WORKDIR/tensorboard
    tensorboard: bool = False
    # name of the project on Weights & Biases to which the metrics are sent; "": none
    wandb: str = ""

    def __post_init__(self):
        check_bounds(self, "telemetry", {"0 or more": "diagnostics_every"})


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Traces for xprof / TensorBoard's profiler, written to WORKDIR/profile."""

    # the steps to trace: "10:13" traces steps 10, 11 and 12; "": none
    steps: str = ""
    # whether to write a profile of the devices' memory, for pprof, after the traced steps
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
    def traced_steps(self) -> range:
        """The steps that the profiler traces; an empty range if no steps are traced."""
        first, _, end = (self.steps or "0:0").partition(":")
        return range(int(first), int(end))


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    # name of the run; the folder of the run is runs/<name>, unless the flag --workdir names another
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
            and escape_control_in_lines(self.name) == self.name
            and self.name not in (".", ".."),
            f"name = {self.name[:120]!r}: expected the name of a folder, without '/' and control "
            "characters: the workdir defaults to runs/<name>",
        )
        length, rate = self.train.sequence_length, self.train.router_bias_rate
        update, model = self.train.router_bias_update, self.model
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
        self._check_keep_best()
        if update == "sign":
            return
        where = f"train.router_bias_update = {update!r}"
        require(
            model.moe.router_bias,
            f"{where}: the routers of this model have no bias: expected 'sign', or "
            "model.moe.router_bias = True",
        )
        require(
            rate == TrainConfig.router_bias_rate,
            f"{where} does not read train.router_bias_rate = {rate}: expected "
            f"{TrainConfig.router_bias_rate}, or train.router_bias_update = 'sign'",
        )
        require(
            model.moe.n_group == 1,
            f"{where} with model.moe.n_group = {model.moe.n_group}: a group that is left out says "
            "nothing about the bias that its experts need: expected model.moe.n_group = 1",
        )
        require(
            model.num_experts_per_tok < model.num_experts,
            f"{where} with model.num_experts_per_tok = {model.num_experts_per_tok} of "
            f"model.num_experts = {model.num_experts}: every token chooses every expert: expected "
            "fewer experts per token",
        )

    def _check_keep_best(self) -> None:
        every, evaluated = self.checkpoint.every, self.eval.every
        require(
            not self.checkpoint.keep_best or max(every, evaluated) % min(every, evaluated) == 0,
            f"checkpoint.keep_best with checkpoint.every = {every} and eval.every = {evaluated}: "
            "the best is chosen among the checkpoints that were also evaluated: make one of the "
            "two numbers a multiple of the other",
        )


def default_config() -> dict[str, Any]:
    """Returns the defaults of all settings as a nested dict. The files in `configs/` start from the
    result of this function.
    """
    return to_dict(Config())
