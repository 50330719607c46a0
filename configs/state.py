"""Tasks that need a state (`data/state_tasks.py`): a model of one recurrent layer of width 64
trains on rows of 32 tokens and is evaluated on rows of 256. Rows are generated during training.

    uv run train.py --config=configs/state.py

Time: about 30 CPU seconds.
Result: on the task "parity", an accuracy of 1.0 at all positions up to 256 with each of three seeds
(docs/state.md).

Other tasks: --config.data.source=modular_addition, s3, a5 or s5. The task state_recall needs other
stages (configs/sweeps/state.py), because its rows begin with a table of keys, which does not fit
into 8 tokens.

Three choices decide whether a recurrent layer learns a task that needs a state, and how far beyond
the trained length the layer still solves the task:

* Training begins on rows of 8 tokens. The model learns the answer at a token only when the answers
  before this token are right, so most of a long row teaches nothing at first.
* The layer has no decay. A layer with a decay learns short rows, which do not show that the state
  must never shrink, and fails on long rows.
* The layer has no short convolution. With a convolution, the key of a token depends on earlier
  tokens, so equal tokens do not change the state in the same way.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "state"

    model = config.model
    model.vocab_size = 128
    model.hidden_size = 64
    model.num_hidden_layers = 1
    model.layer_types = ("linear_attention",)
    model.num_attention_heads = 2
    model.num_key_value_heads = 2
    model.head_dim = 32
    model.linear_num_key_heads = 4
    model.linear_num_value_heads = 4
    model.linear_key_head_dim = 16
    model.linear_value_head_dim = 16
    model.beta_range = 2
    model.decay_gate = False
    model.short_convolution = False
    model.num_experts = 0
    model.intermediate_size = 128
    model.mtp_depth = 0
    model.rope_theta = 10_000.0
    model.max_position_embeddings = 256
    model.dtype = "float32"

    config.data.source = "parity"

    config.train.steps = 400
    config.train.batch_size = 32
    config.train.sequence_length = 32
    config.train.stages = (
        dict(name="short", steps=100, sequence_length=8, batch_size=128),  # as many tokens a step
        dict(name="long", steps=300),
    )
    config.train.log_every = 50
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.0
    config.checkpoint.every = 400
    config.eval.every = 400
    config.eval.sample_tokens = 0
    config.eval.suites = ("state",)
    config.eval.suite_lengths = (32, 64, 128, 256)
    return config
