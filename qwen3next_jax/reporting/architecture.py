"""Draws the architecture of a model as an SVG file. The left column shows all layers. Beside this
column, each kind of layer has a panel, which lists the parameters of one layer of the kind. The
colours adapt to a light or dark page.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

# Sizes in SVG units.
STACK_WIDTH, LAYER_HEIGHT, LAYER_GAP = 190, 15, 3
KIND_LEFT, KIND_WIDTH, LINE = 250, 440, 17
TOP = 74
MOST_LAYERS = 24  # a deeper stack is drawn with a gap in its middle

STYLE = """
  svg { --text: #1b1f24; --soft: #59636e; --paper: #ffffff; --line: #d0d7de }
  @media (prefers-color-scheme: dark) {
    svg { --text: #e6edf3; --soft: #9198a1; --paper: #0d1117; --line: #3d444d }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--text) }
  .title { font-size: 18px; font-weight: 600 }
  .soft { fill: var(--soft) }
  .mono { font-family: ui-monospace, monospace; font-size: 11px }
  .paper { fill: var(--paper) }
  .panel { fill: none; stroke: var(--line) }
"""
# One colour for each kind of layer; white text is readable on all of them.
COLOURS = ("#2f6fb3", "#b4530f", "#2b7a4b", "#8a3d86", "#7a6410", "#116f7d")


class LayerKindPanel(NamedTuple):
    """The texts that the drawing shows about one kind of layer.

    Attributes:
      mixer_name: the name of the mixer.
      layer_indices: the indices of the layers of this kind; () for the layer of the multi-token
        prediction module.
      mlp_text: a description of the MLP.
      parameter_shapes: (path, shape as text) of each parameter.
      subtitle: a line of text below the name of the mixer.
    """

    mixer_name: str
    layer_indices: Sequence[int]
    mlp_text: str
    parameter_shapes: Sequence[tuple[str, str]]
    subtitle: str


def draw_model(title: str, subtitle: str, kinds: Sequence[LayerKindPanel]) -> str:
    """Returns the drawing of a model as the text of an SVG file.

    Args:
      title: the title of the drawing.
      subtitle: a line of text below the title.
      kinds: the kinds of the model's layers. Kinds with the same `parameter_shapes` share a panel.
    """
    stack, stack_height = _draw_layer_column(kinds)
    panels, bottom = [], TOP
    for colour, kind in enumerate(kinds):
        if any(kind.parameter_shapes == earlier.parameter_shapes for earlier in kinds[:colour]):
            continue
        panel, bottom = _draw_layer_kind_panel(kind, COLOURS[colour % len(COLOURS)], bottom)
        panels.append(panel)
    width = KIND_LEFT + KIND_WIDTH + 20
    height = max(TOP + stack_height, bottom) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label="{html.escape(f"{title}: {subtitle}", quote=True)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        + _svg_text(20, 30, title, "title")
        + _svg_text(20, 52, subtitle, "soft")
        + stack
        + "".join(panels)
        + "</svg>\n"
    )


def _draw_layer_column(kinds: Sequence[LayerKindPanel]) -> tuple[str, int]:
    """Returns the SVG of the column of layers, with the first layer at the bottom, and the height
    of the column.
    """
    colour_of = {
        layer: (COLOURS[number % len(COLOURS)], kind.mixer_name)
        for number, kind in enumerate(kinds)
        for layer in kind.layer_indices
    }
    layers = sorted(colour_of)
    if len(layers) > MOST_LAYERS:
        half = MOST_LAYERS // 2
        shown = [*layers[:half], None, *layers[-half:]]
    else:
        shown = list(layers)
    rows: list[tuple[str, str, str]] = [("embedding", "", "#59636e")]
    for layer in shown:
        if layer is None:
            left_out = len(layers) - MOST_LAYERS
            rows.append((f"… {left_out} more layers in the same order …", "", ""))
        else:
            colour, name = colour_of[layer]
            rows.append((name, str(layer), colour))
    rows.append(("head", "", "#59636e"))
    for number, kind in enumerate(kinds):
        if not kind.layer_indices:
            rows.append(("multi-token prediction", "", COLOURS[number % len(COLOURS)]))
    drawn = []
    for place, (name, index, colour) in enumerate(reversed(rows)):
        y = TOP + place * (LAYER_HEIGHT + LAYER_GAP)
        middle = y + LAYER_HEIGHT - 4
        if not colour:
            drawn.append(_svg_text(20, middle, name, "soft", 11))
            continue
        drawn.append(
            f'<rect x="20" y="{y}" width="{STACK_WIDTH}" height="{LAYER_HEIGHT}" rx="3" '
            f'fill="{colour}"/>\n'
            + _svg_text(28, middle, name, "", 10, "#ffffff")
            + _svg_text(20 + STACK_WIDTH - 22, middle, index, "", 10, "#ffffff")
        )
    return "".join(drawn), len(rows) * (LAYER_HEIGHT + LAYER_GAP)


def _draw_layer_kind_panel(kind: LayerKindPanel, colour: str, top: int) -> tuple[str, int]:
    """Returns the SVG of the panel of one kind of layer, and the y coordinate below the panel.

    Args:
      colour: the colour of this kind of layer in the column of layers.
      top: the y coordinate of the top of the panel.
    """
    height = LINE * (len(kind.parameter_shapes) + 4) + 10
    title = kind.mixer_name if kind.layer_indices else f"{kind.mixer_name} (multi-token prediction)"
    lines = [
        f'<rect class="panel" x="{KIND_LEFT}" y="{top}" width="{KIND_WIDTH}" height="{height}" '
        'rx="6"/>\n'
        f'<rect x="{KIND_LEFT}" y="{top}" width="6" height="{height}" rx="3" fill="{colour}"/>\n',
        _svg_text(KIND_LEFT + 18, top + LINE + 2, title, "title", 14),
        _svg_text(KIND_LEFT + 18, top + 2 * LINE + 4, kind.subtitle, "soft"),
        _svg_text(KIND_LEFT + 18, top + 3 * LINE + 4, kind.mlp_text, "soft"),
    ]
    for number, (path, shape) in enumerate(kind.parameter_shapes):
        y = top + (number + 4) * LINE + 8
        lines.append(_svg_text(KIND_LEFT + 18, y, path, "mono"))
        lines.append(_svg_text(KIND_LEFT + KIND_WIDTH - 190, y, shape, "mono soft"))
    return "".join(lines), top + height + 12


def _svg_text(x: int, y: int, text: str, css: str, size: int = 0, fill: str = "") -> str:
    style = (f"font-size:{size}px;" if size else "") + (f"fill:{fill}" if fill else "")
    return (
        f'<text x="{x}" y="{y}" class="{css}"'
        + (f' style="{style}"' if style else "")
        + f">{html.escape(text)}</text>\n"
    )
