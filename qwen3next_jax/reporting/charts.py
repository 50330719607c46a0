"""Charts as strings of HTML: data in, one <figure> with inline SVG out. page.css colours them,
page.js shows values on hover.

Any report can use them: a figure needs nothing but those two files in its page (`page.document`).
"""

import base64
import dataclasses
import html
import json
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 600, 250  # of the drawing, in its own units; it scales to the width of its column
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 34
COLOURS = 8  # of page.css: --series-0 …, and as many of --depth-0 …
DASHES = ("", "6 3", "2 3", "9 3 2 3")
LARGEST = 1e100  # of a drawn number: beyond it differences overflow, as they do below its inverse


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart: x increasing, y with NaN for gaps, low and high the range around y
    (None: none).

    colour: index of a series colour. shade: 0 … 1 colours by depth instead. dash: index into
    DASHES. dots: marks the points.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int = 0
    shade: float | None = None
    dash: int = 0
    dots: bool = False

    @property
    def stroke(self) -> str:
        return (
            f"var(--series-{self.colour % COLOURS})"
            if self.shade is None
            else f"var(--depth-{round(7 * self.shade)})"
        )


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to drawing units."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value):
        low, high, value = (
            np.log10(np.maximum(v, 1e-30)) if self.log else np.asarray(v, float)
            for v in (self.low, self.high, value)
        )
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        if self.log:
            return _log_ticks(self.low, self.high, count)
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        return [
            round(i * step, 12)
            for i in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    log: bool = False,
    from_zero: bool = False,
    late: bool = False,
    references: Sequence[tuple[str, float]] = (),
    marks: Sequence[tuple[float, str, str]] = (),
    note: str = "",
    x_names: Sequence[str] = (),
) -> str:
    """A chart of lines over a common x.

    Args:
      log: logarithmic y. from_zero: y starts at 0. late: y fits what comes after the first 3 %
      of x; what lies above is
        left out, and said to be.
      references: (label, y) of dashed horizontal lines, such as published values.
      marks: (x, text, "fault" or "stage") of vertical lines.
      note: a sentence under the title. x_names: names of x = 0, 1, … instead of numbers.
    """
    lines = [
        dataclasses.replace(
            line, **{name: _drawable_values(getattr(line, name)) for name in ("y", "low", "high")}
        )
        for line in lines
    ]
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return figure_html(title, note, '<p class="empty">nothing recorded yet</p>')
    xs = np.concatenate([np.asarray(line.x, float) for line in lines])
    ends = (
        (-0.5, len(x_names) - 0.5) if x_names else _nonempty_range(float(xs.min()), float(xs.max()))
    )
    x = Axis(*ends, LEFT, WIDTH - RIGHT)
    low, high, hidden = _y_range(lines, references, log, from_zero, late)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    if hidden is not None:
        note = " ".join(filter(None, (note, f"Begins above the frame, at {short_number(hidden)}.")))
    parts = [_axes_svg(x, y, x_label, x_names)]
    for position, text, kind in marks:
        if x.low <= position <= x.high:
            parts.append(
                f'<line class="mark {kind}" x1="{x(position):.1f}" x2="{x(position):.1f}" '
                f'y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{_escape(text)}</title></line>"
            )
    # What lies above the frame is cut off there; dots at the ends stay whole.
    clip = (
        f'<svg y="{TOP - 2}" width="{WIDTH}" height="{HEIGHT - TOP - BOTTOM + 5}" '
        f'viewBox="0 {TOP - 2} {WIDTH} {HEIGHT - TOP - BOTTOM + 5}">'
    )
    parts.append(clip + "".join(_line_svg(line, x, y) for line in lines) + "</svg>")
    # readable over the lines
    parts += [
        _reference_line(label, value, y, [r for _, r in references]) for label, value in references
    ]
    data = {
        "x": [x.low, x.high, x.begin, x.end],
        "y": [y.low, y.high, y.begin, y.end],
        "log": log,
        "names": list(x_names),
        "label": x_label,
        "lines": [[line.label, line.stroke, _rounded(line.x), _rounded(line.y)] for line in lines],
    }
    legend = (
        ""
        if len(lines) == 1 and not lines[0].label
        else "".join(_legend_entry(line) for line in lines)
    )
    return figure_html(
        title, note, _svg("".join(parts), title) + _hover_data(data), legend, "lines"
    )


def heatmap(
    title: str,
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str] | np.ndarray,
    row_label: str,
    column_label: str,
    diverging: bool = False,
    log: bool = False,
    note: str = "",
) -> str:
    """A matrix [rows, columns] as colours, row 0 at the top, NaN transparent. `columns` are
    names or increasing numbers. `diverging`: shares around 1, drawn by their logarithm from 1/4
    to 4, zeros marked. `log`: colours by the logarithm.
    """
    values = _drawable_values(values)
    if not np.isfinite(values).any():
        return figure_html(title, note, '<p class="empty">nothing recorded yet</p>')
    if diverging:
        low, high = 0.25, 4.0
        level = (np.log2(np.maximum(values, 1e-9)) + 2) / 4
    else:
        kept = values[np.isfinite(values) & ((values > 0) | (not log))]
        low, high = (
            _nonempty_range(float(kept.min()), float(kept.max())) if kept.size else (0.0, 1.0)
        )
        a, b, v = (
            np.log(np.maximum(t, 1e-30)) if log else np.asarray(t, float)
            for t in (low, high, values)
        )
        level = (v - a) / (b - a)
    index = np.where(np.isfinite(values), 2 + np.clip(np.nan_to_num(level), 0, 1) * 253, 0).astype(
        np.uint8
    )
    if diverging:
        index[values == 0] = 1
    image = _png(index, _diverging if diverging else _viridis)
    right, left = 74, 54
    x0, x1, y0, y1 = left, WIDTH - right, TOP, HEIGHT - BOTTOM
    parts = [
        f'<image href="{image}" x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" '
        'preserveAspectRatio="none"/>'
    ]
    for i in _evenly_spaced(len(rows), 10):
        parts.append(
            f'<text x="{x0 - 6}" y="{y0 + (i + 0.5) / len(rows) * (y1 - y0) + 3.5:.1f}" '
            f'text-anchor="end">{_escape(rows[i])}</text>'
        )
    half = (x1 - x0) / len(columns) / 2
    if isinstance(columns, np.ndarray):
        scale = Axis(*_nonempty_range(float(columns[0]), float(columns[-1])), x0 + half, x1 - half)
        ticks = [(float(scale(tick)), short_number(tick)) for tick in scale.ticks(6)]
        columns = [short_number(column) for column in columns]
    else:
        ticks = [(x0 + half + 2 * half * i, columns[i]) for i in _evenly_spaced(len(columns), 8)]
    parts += [
        f'<text x="{at:.1f}" y="{y1 + 13}" text-anchor="middle">{_escape(name)}</text>'
        for at, name in ticks
    ]
    parts.append(_x_axis_label(column_label, (x0 + x1) / 2) + _y_axis_label(row_label))
    ramp = _png(np.arange(255, 1, -1, np.uint8)[:, None], _diverging if diverging else _viridis)
    parts.append(
        f'<image href="{ramp}" x="{x1 + 14}" y="{y0}" width="10" height="{y1 - y0}" '
        'preserveAspectRatio="none"/>'
    )
    middle = math.sqrt(low * high) if log or diverging else (low + high) / 2
    for value, at in ((high, y0 + 8), (middle, (y0 + y1) / 2 + 3), (low, y1)):
        beyond = "≥" if diverging and value == high else "≤" if diverging and value == low else ""
        parts.append(
            f'<text x="{x1 + 28}" y="{at:.1f}">{beyond}{short_number(float(f"{value:.3g}"))}</text>'
        )
    data = {
        "box": [x0, x1, y0, y1],
        "rows": list(rows),
        "columns": list(columns),
        "names": [row_label, column_label],
        "values": [_rounded(row, 3) for row in values],
    }
    return figure_html(title, note, _svg("".join(parts), title) + _hover_data(data), kind="heat")


def stacked_columns(
    title: str,
    shares: np.ndarray,
    *,
    width: float,
    names: Sequence[str],
    colours: Sequence[str],
    marks: Sequence[tuple[float, str]] = (),
    note: str = "",
) -> str:
    """Columns of `shares` [columns, names], each up to 1, over wall time; a column stands for
    `width` seconds, `colours` are CSS colours, `marks` (seconds, text).
    """
    unit, scale = next(
        (u, s)
        for u, s in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        if width * len(shares) >= 3 * s or s == 1
    )
    x = Axis(0.0, max(width * len(shares) / scale, 1e-9), LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    edges = x(np.arange(len(shares) + 1) * width / scale)
    top = np.clip(np.cumsum(shares, axis=1), 0, 1)
    parts = [_axes_svg(x, y, f"{unit} since the start", (), percent=True)]
    for i, name in enumerate(names):
        base = top[:, i - 1] if i else np.zeros(len(shares))
        boxes = "".join(
            f"M{edges[c]:.2f} "
            f"{y(base[c]):.1f}H{edges[c + 1]:.2f}V{y(top[c, i]):.1f}H{edges[c]:.2f}Z"
            for c in range(len(shares))
            if top[c, i] - base[c] > 1e-3
        )
        parts.append(
            f'<path d="{boxes}" fill="{colours[i]}"><title>{_escape(name)}</title></path>'
            if boxes
            else ""
        )
    for second, text in marks:
        at = float(x(second / scale))
        parts.append(
            f'<path class="fault" d="M{at:.1f} {TOP - 1}l-4 '
            f'-7h8Z"><title>{_escape(text)}</title></path>'
        )
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{_escape(name)}</span>'
        for i, (name, colour) in enumerate(zip(names, colours, strict=True))
        if shares[:, i].any()
    )
    return figure_html(title, note, _svg("".join(parts), title), legend)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: bool = False) -> str:
    """A table of plain text."""
    cells = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table{" class=numeric" if numeric else ""}><thead><tr>'
        + "".join(f"<th>{_escape(name)}</th>" for name in head)
        + f"</tr></thead><tbody>{cells}</tbody></table></div>"
    )


def figure_html(title: str, note: str, body: str, legend: str = "", kind: str = "") -> str:
    return (
        f'<figure data-kind="{kind}"><figcaption>{_escape(title)}</figcaption>'
        + (f'<p class="note">{_escape(note)}</p>' if note else "")
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + f"{body}</figure>"
    )


def short_number(value: float) -> str:
    """A number in few characters: 1.5M, 0.012, 3e-05."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.4g}{unit}"
    return (
        f"{value:.0e}".replace("e-0", "e-")
        if 0 < size < 1e-3 and f"{value:.0e}" == f"{value:.1e}".replace(".0", "")
        else f"{value:.4g}"
    )


def _drawable_values(values: Sequence[float] | np.ndarray | None) -> np.ndarray | None:
    """`values` as an array: NaN where they are beyond LARGEST, 0 where they are that near to it."""
    if values is None:
        return None
    values = np.asarray(values, float)
    size = np.abs(values)
    return np.where(size <= LARGEST, np.where(size < 1 / LARGEST, 0.0, values), np.nan)


def _y_range(lines, references, log, from_zero, late) -> tuple[float, float, float | None]:
    """(lowest, highest, the first value where it lies above the frame) of the y axis."""
    xs = [np.asarray(line.x, float) for line in lines]
    begin = min(x[0] for x in xs) + 0.03 * (max(x[-1] for x in xs) - min(x[0] for x in xs))

    def bounds(after):
        kept = [
            np.asarray(v, float)[x >= after]
            for line, x in zip(lines, xs)
            for v in (line.y, line.low, line.high)
            if v is not None
        ]
        kept = np.concatenate(kept)
        kept = kept[np.isfinite(kept) & ((kept > 0) | (not log))]
        return (float(kept.min()), float(kept.max())) if kept.size else None

    whole = bounds(-np.inf) or (1e-3, 1.0)
    late = late and max(map(len, xs)) >= 30  # of fewer points the first ones are no small part
    low, high = (late and bounds(begin)) or whole
    hidden = whole[1] if whole[1] > high + 0.25 * (high - low) else None
    if hidden is None:
        high = whole[1]
    values = [value for _, value in references if value > 0 or not log]
    low, high = min([low, *values]), max([high, *values])
    if log:
        low, high = _nonempty_range(math.log10(low), math.log10(high))
        margin = 0.04 * (high - low)
        return 10 ** (low - margin), 10 ** (high + margin), hidden
    low, high = _nonempty_range(low, high)
    margin = 0.05 * (high - low)
    if low < 0:
        return low - margin, max(high + margin, 0.0) if from_zero else high + margin, hidden
    return 0.0 if from_zero else max(low - margin, 0.0), high + margin, hidden


def _nonempty_range(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    pad = 0.1 * abs(high) or 0.1
    return low - pad, high + pad


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for multiples in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [
            m * 10.0**p
            for p in range(begin, end + 1)
            for m in multiples
            if low <= m * 10.0**p <= high
        ]
        if len(ticks) <= count + 1:
            break
    ticks = ticks[:: max(1, -(-len(ticks) // (count + 1)))]
    if len(ticks) >= 2:
        return ticks
    return Axis(low, high, 0, 1).ticks(count - 1)


def _axes_svg(x: Axis, y: Axis, x_label: str, x_names: Sequence[str], percent: bool = False) -> str:
    parts = []
    for tick in y.ticks(5):
        at = float(y(tick))
        text = f"{tick:.0%}" if percent else short_number(tick)
        parts.append(
            f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/><text '
            f'x="{x.begin - 6}" '
            f'y="{at + 3.5:.1f}" text-anchor="end">{text}</text>'
        )
    ticks = _evenly_spaced(len(x_names), 12) if x_names else x.ticks(6)
    for tick in ticks:
        at = float(x(tick))
        # The last label is kept inside the drawing.
        anchor = "end" if at > WIDTH - 24 else "middle"
        parts.append(
            f'<text x="{min(at, WIDTH - 2):.1f}" y="{y.begin + 14}" text-anchor="{anchor}">'
            f"{_escape(x_names[tick]) if x_names else short_number(tick)}</text>"
        )
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{y.begin}" y2="{y.begin}"/>')
    return "".join(parts) + _x_axis_label(x_label, (x.begin + x.end) / 2)


def _x_axis_label(text: str, at: float) -> str:
    return (
        f'<text class="axis-label" x="{at:.1f}" y="{HEIGHT - 5}" '
        f'text-anchor="middle">{_escape(text)}</text>'
    )


def _y_axis_label(text: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="axis-label" x="12" y="{middle}" transform="rotate(-90 12 {middle})" '
        f'text-anchor="middle">{_escape(text)}</text>'
    )


def _reference_line(label: str, value: float, y: Axis, others: Sequence[float]) -> str:
    at = float(y(value))
    # Below the line where another one is too close above it, or the frame is.
    below = at - TOP < 12 or any(0 < at - float(y(other)) < 13 for other in others)
    return (
        f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" '
        f'y2="{at:.1f}"/><text class="reference" '
        f'x="{WIDTH - RIGHT - 2}" y="{at + (11 if below else -4):.1f}" '
        f'text-anchor="end">{_escape(label)}</text>'
    )


def _line_svg(line: Line, x: Axis, y: Axis) -> str:
    px, py = x(line.x), y(np.asarray(line.y, float))
    style = f'stroke="{line.stroke}"' + (
        f' stroke-dasharray="{DASHES[line.dash % len(DASHES)]}"' if line.dash % len(DASHES) else ""
    )
    parts = []
    if (
        line.low is not None
        and line.high is not None
        and np.nanmax(np.asarray(line.high) - np.asarray(line.low), initial=0) > 0
    ):
        up, down = (
            _path(px, y(np.asarray(line.high, float))),
            _path(px[::-1], y(np.asarray(line.low, float))[::-1]),
        )
        if up.count("M") == down.count("M") == 1:
            parts.append(f'<path class="band" d="{up}L{down[1:]}Z" fill="{line.stroke}"/>')
    parts.append(f'<path class="line" d="{_path(px, py)}" {style}/>')
    single = len(px) == 1 or np.isfinite(py).sum() == 1
    if line.dots and len(px) <= 60 or single:
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{line.stroke}"/>'
            for a, b in zip(px, py)
            if np.isfinite(b)
        ]
    return "".join(parts)


def _path(px: np.ndarray, py: np.ndarray) -> str:
    """Pen down between neighbouring finite points."""
    parts, down = [], False
    for a, b in zip(px, np.clip(py, -1e5, 1e5)):
        if np.isfinite(b):
            parts.append(f"{'L' if down else 'M'}{a:.1f} {b:.1f}")
        down = bool(np.isfinite(b))
    return "".join(parts)


def _legend_entry(line: Line) -> str:
    dash = (
        f' stroke-dasharray="{DASHES[line.dash % len(DASHES)]}"' if line.dash % len(DASHES) else ""
    )
    return (
        f'<span><svg width="18" height="8"><path d="M0 4H18" stroke="{line.stroke}" '
        f'stroke-width="2.5"{dash}/></svg>'
        f"{_escape(line.label)}</span>"
    )


def _svg(body: str, title: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_escape(title)}">{body}</svg>'
    )


def _hover_data(data: dict) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _rounded(values, digits: int = 5) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in map(float, values)]


def _evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` indices at equal distances, from 0."""
    return list(range(0, count, max(1, -(-count // most))))


def _escape(text: str) -> str:
    return html.escape(str(text))


def _interpolate_colour(anchors: Sequence[str], at: float) -> tuple[int, int, int]:
    place = min(max(at, 0.0), 1.0) * (len(anchors) - 1)
    i = min(int(place), len(anchors) - 2)
    a, b = (bytes.fromhex(anchors[j]) for j in (i, i + 1))
    return tuple(round(p + (q - p) * (place - i)) for p, q in zip(a, b))


def _viridis(at: float) -> tuple[int, int, int]:
    """Five points of matplotlib's viridis (public domain)."""
    return _interpolate_colour(("440154", "3b528b", "21918c", "5ec962", "fde725"), at)


def _diverging(at: float) -> tuple[int, int, int]:
    return _interpolate_colour(("2166ac", "92c5de", "f0efeb", "f4a582", "b2182b"), at)


def _png(index: np.ndarray, colours) -> str:
    """A data URI of palette indices [rows, columns]: 0 is transparent, 1 black, 2 … 255 the
    range of `colours`.
    """
    palette = bytes(6) + b"".join(bytes(colours(i / 253)) for i in range(254))

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    rows = b"".join(b"\0" + row.tobytes() for row in index)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", index.shape[1], index.shape[0], 8, 3, 0, 0, 0))
        + chunk(b"PLTE", palette)
        + chunk(b"tRNS", b"\0")
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()
