"""Figures of the parts of a model as data flows through them: Gated DeltaNet, gated attention, the
mixture of experts and multi-token prediction. All sizes come from the model's settings.
`benchmarks/reporting/pictures.py` writes the figures.
"""

import html
from collections.abc import Mapping
from typing import NamedTuple

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.reporting.architecture import STYLE

# Sizes in SVG units.
WIDTH, MARGIN, TOP = 600, 12, 66
ROW, BOX, LINE = 66, 44, 15
GAP = 10  # between boxes of a row
COLUMNS = 24  # the places of boxes are given in these units

STYLES = """
  .weights { fill: #2f6fb3 }
  .operator { fill: none; stroke: var(--soft) }
  .flow { fill: none; stroke: var(--soft); stroke-width: 1.2 }
  .head { fill: var(--soft) }
  .light { fill: #ffffff }
"""


class Box(NamedTuple):
    """A box of a figure.

    Attributes:
      row: its row, from the top.
      left, right: where it begins and ends, in columns from 0 to COLUMNS.
      text: what it does.
      shape: the shape of its result for one token, or another short note.
      weights: whether it has weight matrices or a kernel. Such boxes are filled.
    """

    row: int
    left: float
    right: float
    text: str
    shape: str = ""
    weights: bool = False


def draw_parts(model: ModelConfig) -> dict[str, str]:
    """Returns name of the file → SVG, for the parts of a model with the released model's mixers."""
    return {
        "gated_deltanet.svg": draw_gated_deltanet(model),
        "gated_attention.svg": draw_gated_attention(model),
        "mixture_of_experts.svg": draw_mixture_of_experts(model),
        "multi_token_prediction.svg": draw_multi_token_prediction(model),
    }


def draw_gated_deltanet(c: ModelConfig) -> str:
    keys = f"{c.linear_num_key_heads} × {c.linear_key_head_dim}"
    values = f"{c.linear_num_value_heads} × {c.linear_value_head_dim}"
    heads = f"{c.linear_num_value_heads}"
    boxes = {
        "x": Box(0, 0, 24, "input x", f"{c.hidden_size:,}"),
        "q": Box(1, 0, 4, "query", keys, weights=True),
        "k": Box(1, 4, 8, "key", keys, weights=True),
        "v": Box(1, 8, 12, "value", values, weights=True),
        "b": Box(1, 12, 16.4, "b", heads, weights=True),
        "a": Box(1, 16.4, 20, "a", heads, weights=True),
        "z": Box(1, 20, 24, "gate z", values, weights=True),
        "conv": Box(
            2, 0, 12, f"causal convolution over {c.linear_conv_kernel_dim} tokens, then SiLU",
            weights=True,
        ),
        "beta": Box(2, 12, 16.4, "β = σ(b)", "write strength"),
        "g": Box(2, 16.4, 20, "g ≤ 0", "log decay"),
        "unit": Box(3, 0, 8, "scale to length 1", "query and key"),
        "rule": Box(
            4, 0, 20, "gated delta rule: decay S by eᵍ, write β k (v − Sᵀk)ᵀ, read o = Sᵀq",
            f"state S: {heads} × {c.linear_key_head_dim} × {c.linear_value_head_dim}, float32",
        ),
        "norm": Box(5, 0, 20, "RMSNorm of each head", values),
        "gate": Box(6, 0, 24, f"× {'SiLU' if c.output_gate_type == 'silu' else 'σ'}(z)", values),
        "out": Box(7, 0, 24, "output projection", f"{c.hidden_size:,}", weights=True),
    }  # fmt: skip
    flow = (
        "x>q x>k x>v x>b x>a x>z q>conv k>conv v>conv b>beta a>g q:conv>unit k:conv>unit "
        "v:conv>rule q:unit>rule k:unit>rule beta>rule g>rule rule>norm norm>gate z>gate gate>out"
    )
    return _draw("Gated DeltaNet: one token of a layer", boxes, flow)


def draw_gated_attention(c: ModelConfig) -> str:
    queries = f"{c.num_attention_heads} × {c.head_dim}"
    keys = f"{c.num_key_value_heads} × {c.head_dim}"
    sharing = c.num_attention_heads // c.num_key_value_heads
    boxes = {
        "x": Box(0, 0, 24, "input x", f"{c.hidden_size:,}"),
        "q": Box(1, 0, 6, "query", queries, weights=True),
        "k": Box(1, 6, 12, "key", keys, weights=True),
        "v": Box(1, 12, 18, "value", keys, weights=True),
        "z": Box(1, 18, 24, "gate z", queries, weights=True),
        "qn": Box(2, 0, 6, "RMSNorm per head"),
        "kn": Box(2, 6, 12, "RMSNorm per head"),
        "rope": Box(
            3, 0, 12, f"RoPE rotates {c.rotary_dim} of {c.head_dim} dimensions",
            "positions count from the document's start",
        ),
        "attention": Box(
            4, 0, 18, "softmax attention to the document so far",
            f"{sharing} query heads read one key head and one value head",
        ),
        "gate": Box(5, 0, 24, "× σ(z)", queries),
        "out": Box(6, 0, 24, "output projection", f"{c.hidden_size:,}", weights=True),
    }  # fmt: skip
    flow = (
        "x>q x>k x>v x>z q>qn k>kn qn>rope kn>rope q:rope>attention k:rope>attention v>attention "
        "attention>gate z>gate gate>out"
    )
    return _draw("Gated attention: one token of a layer", boxes, flow)


def draw_mixture_of_experts(c: ModelConfig) -> str:
    chosen, width = c.num_experts_per_tok, f"{c.hidden_size:,}"
    boxes = {
        "x": Box(0, 0, 24, "input x", width),
        "router": Box(1, 0, 7, "router", f"{c.num_experts} logits, float32", weights=True),
        "top": Box(2, 0, 7, f"softmax, the {chosen} largest", "divided by their sum"),
        "experts": Box(
            3, 0, 15, f"{chosen} of {c.num_experts} experts: down(SiLU(gate x) · up x)",
            f"each of width {c.moe_intermediate_size}", weights=True,
        ),
        "shared": Box(
            3, 15, 20, "shared expert", f"width {c.shared_expert_intermediate_size}", weights=True
        ),
        "gate": Box(3, 20, 24, "σ(w · x)", "one number", weights=True),
        "sum": Box(4, 0, 15, "sum, weighted by the router", width),
        "scaled": Box(4, 15, 24, "product", width),
        "y": Box(5, 0, 24, "sum", width),
    }  # fmt: skip
    flow = (
        "x>router router>top top>experts x@11>experts x@17.5>shared x@22>gate experts>sum "
        "shared>scaled gate>scaled sum>y scaled>y"
    )
    return _draw("Mixture of experts: one token of a layer", boxes, flow)


def draw_multi_token_prediction(c: ModelConfig) -> str:
    width = f"{c.hidden_size:,}"
    boxes = {
        "token": Box(0, 0, 12, "embedding of token t + 1", width),
        "state": Box(0, 12, 24, "the last layer's state at t, after its norm", width),
        "tn": Box(1, 0, 12, "RMSNorm", width),
        "sn": Box(1, 12, 24, "RMSNorm", width),
        "fc": Box(2, 0, 24, "projection of both, side by side", f"{2 * c.hidden_size:,} → {width}",
                  weights=True),
        "block": Box(3, 0, 24, "one decoder layer: gated attention and a mixture of experts", width,
                     weights=True),
        "norm": Box(4, 0, 24, "RMSNorm", width),
        "head": Box(5, 0, 24, "the model's own output head: token t + 2",
                    f"{c.vocab_size:,} logits", weights=True),
    }  # fmt: skip
    flow = "token>tn state>sn tn>fc sn>fc fc>block block>norm norm>head"
    return _draw("Multi-token prediction of token t + 2", boxes, flow)


def _draw(title: str, boxes: Mapping[str, Box], flow: str) -> str:
    """Returns a figure as the text of an SVG file.

    Args:
      title: its title.
      boxes: name → box.
      flow: the arrows, "a>b" each. An arrow leaves box a at its middle; "a@column>b" leaves it at a
        column, and "other:a>b" below the middle of the box `other`.
    """
    height = TOP + ROW * max(box.row for box in boxes.values()) + BOX + 14
    drawn = [_arrow(arrow, boxes) for arrow in flow.split()]
    drawn += [_box(box) for box in boxes.values()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{html.escape(title)}">\n'
        f"<style>{STYLE}{STYLES}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
        f'<text x="{MARGIN}" y="28" class="title">{html.escape(title)}</text>\n'
        f'<text x="{MARGIN}" y="48" class="soft">Filled boxes hold weight matrices or kernels. '
        "Numbers are sizes for one token.</text>\n" + "\n".join(drawn) + "\n</svg>\n"
    )


def _x(column: float) -> float:
    return MARGIN + column / COLUMNS * (WIDTH - 2 * MARGIN)


def _y(row: int) -> float:
    return TOP + ROW * row


def _box(box: Box) -> str:
    left, width = _x(box.left) + GAP / 2, _x(box.right) - _x(box.left) - GAP
    middle, top = left + width / 2, _y(box.row)
    kind, light = ("weights", " light") if box.weights else ("operator", "")
    lines = [line for line in (box.text, box.shape) if line]
    first = top + BOX / 2 + 4 - LINE * (len(lines) - 1) / 2
    texts = "".join(
        f'<text x="{middle:.0f}" y="{first + LINE * i:.0f}" text-anchor="middle" '
        f'class="{"soft" if i and not box.weights else ""}{light}">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect class="{kind}" x="{left:.0f}" y="{top}" width="{width:.0f}" height="{BOX}" '
        f'rx="5"/>{texts}'
    )


def _arrow(arrow: str, boxes: Mapping[str, Box]) -> str:
    """Returns the arrow "a>b" from the bottom of a box straight down to the top of another one."""
    start, _, end = arrow.partition(">")
    place, _, name = start.rpartition(":")
    name, _, column = name.partition("@")
    source, target = boxes[name], boxes[end]
    over = boxes[place] if place else min(source, target, key=lambda box: box.right - box.left)
    x = _x(float(column)) if column else _x((over.left + over.right) / 2)
    top, bottom = _y(source.row) + BOX, _y(target.row)
    return (
        f'<path class="flow" d="M{x:.0f} {top}V{bottom - 5}"/>'
        f'<path class="head" d="M{x - 4:.0f} {bottom - 7}h8l-4 7z"/>'
    )
