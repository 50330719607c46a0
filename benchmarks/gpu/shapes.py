"""The training steps that are compared on one GPU: models and batches, for this project
(`step.py`) and for its peer (`peer.py`).

The settings of a model have the names of transformers' configs, which are also the names of this
project's `ModelConfig`, so both sides build the same model from the same table. The file imports
nothing but the standard library: the peer's interpreter need not have JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

FAMILIES = "qwen3_next", "qwen3_5"  # transformers' names


@dataclasses.dataclass(frozen=True)
class Shape:
    """One training step.

    Attributes:
      title: what it is, in a few words.
      model: settings of the model.
      rows: rows of a step.
      length: tokens of a row.
      documents: documents of a row; they have different lengths (`document_lengths`).
      micro_batches: parts of a step, computed one after the other.
      family: the peer's family of transformers; "" if there is no peer.
      ours: settings that only this project has, "model.mtp_depth" → value.
      published: seconds of a step that others published for the whole step, by source.
      goal: what this project aims at, for the table.
    """

    title: str
    model: Mapping[str, Any]
    rows: int
    length: int
    documents: int = 1
    micro_batches: int = 1
    family: str = "qwen3_next"
    ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    goal: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length

    @property
    def document_lengths(self) -> list[int]:
        """Tokens of the documents of every row: the i-th of n has some i shares of n (n + 1) / 2,
        in multiples of 2 tokens, so that no boundary falls on a power of two.
        """
        shares = range(1, self.documents + 1)
        lengths = [2 * (self.length * i // (2 * sum(shares))) for i in shares]
        lengths[-1] += self.length - sum(lengths)
        return lengths


# The model of configs/small.py.
_SMALL = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
# One period of Qwen3-Next-80B-A3B with 64 of its 512 experts and a smaller vocabulary.
_PERIOD = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The text model of Qwen3.5-0.8B, as configs/qwen3_5_0p8b.py has it.
_QWEN3_5_0P8B = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "intermediate_size": 3584,
    "tie_word_embeddings": True,
}
# The hybrid of openai/parameter-golf, records/track_non_record_16mb/
# 2026-04-04_GDN_Hybrid_LongContext (train_gpt_gdn.py at 4908dc46): 448 wide, attention in layers 3
# and 7, an MLP of squared ReLUs. It adds skips between the halves of the model, gains of q and
# scales of the branches, which have no matrix product and are not here.
_GOLF = {
    "vocab_size": 1024,
    "hidden_size": 448,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 56,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 42,
    "linear_value_head_dim": 84,
    "num_experts": 0,
    "intermediate_size": 896,
    "tie_word_embeddings": True,
}
_OF_GOLF = {
    "model.layer_types": tuple(
        "full_attention" if i in (3, 7) else "linear_attention" for i in range(9)
    ),
    "model.block.mlp": "relu2",
    "model.attention_output_gate": False,
    "model.partial_rotary_factor": 1.0,
    "model.rope_theta": 10_000.0,
    "optimizer.name": "muon",
    "optimizer.muon.dtype": "bfloat16",
}


def _golf(length: int, rows: int, milliseconds: int) -> Shape:
    """The published run has 8 micro-batches a step."""
    return Shape(
        f"the 17 M hybrid of parameter-golf, {rows} × {length:,}",
        _GOLF,
        rows,
        length,
        micro_batches=8,
        family="",
        ours=_OF_GOLF,
        published={"openai/parameter-golf, one H100": milliseconds / 1e3},
        goal=f"< {milliseconds} ms",
    )


SHAPES: dict[str, Shape] = {
    "small": Shape("104 M, 512 wide, 32 × 2,048", _SMALL, 32, 2048, goal="MFU ≥ 20 %"),
    "period": Shape(
        "one period of the released model, 64 experts, 8 × 4,096",
        _PERIOD,
        8,
        4096,
        goal="MFU ≥ 38 %, ≥ 1.7 × the eager and ≥ 1.2 × the compiled peer, ≤ 30 GiB",
    ),
    "period_long": Shape("the same, 1 × 32,768", _PERIOD, 1, 32_768, goal="MFU ≥ 33 %"),
    "packed": Shape(
        "`period` with six documents a row", _PERIOD, 8, 4096, 6, goal="no slower than `period`"
    ),
    "qwen3_5_0p8b": Shape(
        "Qwen3.5-0.8B, 4 × 8,192",
        _QWEN3_5_0P8B,
        4,
        8192,
        family="qwen3_5",
        goal="MFU ≥ 45 %, ≥ 1.3 × the peer",
    ),
    "golf_8k": _golf(8192, 48, 757),
    "golf_16k": _golf(16_384, 24, 847),
    "golf_32k": _golf(32_768, 16, 1361),
}


def tiny(shape: Shape) -> Shape:
    """The same kind of step, small enough for a CPU; its times say nothing."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": min(shape.model["num_experts"], 4),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "intermediate_size": 96,
    }
    if not shape.model["num_experts"]:
        for name in (
            "num_experts_per_tok",
            *(n for n in sizes if n.endswith("expert_intermediate_size")),
        ):
            sizes.pop(name)
    layers = min(shape.model["num_hidden_layers"], 9 if shape.ours else 4)
    model = dict(shape.model) | sizes | {"num_hidden_layers": layers}
    micro_batches = min(shape.micro_batches, 2)
    return dataclasses.replace(
        shape,
        title=f"{shape.title}; tiny",
        model=model,
        rows=2 * micro_batches,
        length=128,
        micro_batches=micro_batches,
        goal="",
        published={},
    )
