"""Functions that draw charts. Each function takes data and returns HTML: one <figure> with an
inline SVG.

A page with charts must include page.css, which colours the charts, and page.js. The script page.js
shows the values of a chart under the pointer, offers them as CSV, and draws a line chart again when
the reader asks for a logarithmic axis, smoothing or other runs. `page.html_document` makes a page
that includes both files.
"""

import base64
import dataclasses
import html
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# The size of a chart and its margins, in SVG units. The page scales a chart to the width of its
# column.
WIDTH, HEIGHT = 600, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 34
COLOURS = 8  # page.css defines --series-0 … --series-7, and --depth-0 … --depth-7
DASHES = ("", "6 3", "2 3", "9 3 2 3")
# Numbers of larger magnitude than this are not drawn, and numbers of smaller magnitude than its
# inverse are drawn as 0, because arithmetic with them could overflow.
LARGEST = 1e100
LEGEND_LINES = 12  # with more named lines there is no legend: the table of runs names them
EMPTY = '<p class="empty">nothing recorded yet</p>'


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
      label: the name of the line in the legend; "": the legend does not list the line.
      x: increasing numbers.
      y: a number for each x; NaN leaves a gap.
      band_low, band_high: the edges of a band around y, or None for no band.
      colour_index: the index of one of the colours --series-0 … of page.css.
      gradient_position: a number from 0 to 1, such as the relative depth of a layer, which chooses
        one of the colours --depth-0 … of page.css; None: `colour_index` chooses the colour.
      dash_index: the index of the line's dash pattern in DASHES.
      dots: whether the points are marked.
      joined: whether a line joins the points.
      run_index: the index of the line's run, on a page of several runs on which the reader can hide
        runs; None: the line belongs to no run.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band_low: Sequence[float] | None = None
    band_high: Sequence[float] | None = None
    colour_index: int = 0
    gradient_position: float | None = None
    dash_index: int = 0
    dots: bool = False
    joined: bool = True
    run_index: int | None = None

    @property
    def css_colour(self) -> str:
        """The line's colour in CSS."""
        if self.gradient_position is None:
            return series_colour(self.colour_index)
        return f"var(--depth-{round((COLOURS - 1) * self.gradient_position)})"

    @property
    def dash_attribute(self) -> str:
        """The SVG attribute with the line's dash pattern; "" for a solid line."""
        pattern = DASHES[self.dash_index % len(DASHES)]
        return f' stroke-dasharray="{pattern}"' if pattern else ""

    @property
    def run_attribute(self) -> str:
        """The SVG attribute with the index of the line's run; "" if it belongs to none."""
        return "" if self.run_index is None else f' data-run="{self.run_index}"'


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale, which maps the values from `low` to `high` to the coordinates
    from `svg_begin` to `svg_end`, in SVG units. If `whole_ticks` is true, all ticks are whole
    numbers.
    """

    low: float
    high: float
    svg_begin: float
    svg_end: float
    log: bool = False
    whole_ticks: bool = False

    def __call__(self, value):
        low, high, value = (
            np.log10(np.maximum(v, 1e-30)) if self.log else np.asarray(v, float)
            for v in (self.low, self.high, value)
        )
        return self.svg_begin + (value - low) / (high - low) * (self.svg_end - self.svg_begin)

    def tick_values(self, count: int) -> list[float]:
        """Returns about `count` round values on the axis."""
        if self.log:
            return _log_ticks(self.low, self.high, count)
        rough = max((self.high - self.low) / count, 1.0 if self.whole_ticks else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(
            m * power
            for m in (1, 2, 2.5, 5, 10)
            if m * power >= rough * 0.999 and not (self.whole_ticks and m * power % 1)
        )
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    log_y: bool = False,
    log_x: bool = False,
    from_zero: bool = False,
    fit_y_to_late_values: bool = False,
    reference_lines: Sequence[tuple[str, float]] = (),
    marks: Sequence[tuple[float, str, str]] = (),
    note: str = "",
    warning: str = "",
    x_names: Sequence[str] = (),
) -> str:
    """Draws lines over a common x axis. Returns the figure as HTML.

    Args:
      log_y: whether the y axis is logarithmic.
      log_x: whether the x axis is logarithmic; every x is then positive.
      from_zero: whether the y axis starts at 0.
      fit_y_to_late_values: whether the y axis fits only the values after the first 3 % of x. If
        earlier values lie above the axis, they are cut off, and the note says so.
      reference_lines: (label, y) of dashed horizontal lines, such as published values.
      marks: (x, text, kind) of vertical lines; the kind, "fault" or "stage", gives their colour.
      note: a sentence under the title.
      warning: a sentence that says why lines of the chart cannot be compared.
      x_names: names of x = 0, 1, …, shown instead of numbers.
    """
    lines = [
        dataclasses.replace(
            line,
            y=_without_extreme_values(line.y),
            band_low=_without_extreme_values(line.band_low),
            band_high=_without_extreme_values(line.band_high),
        )
        for line in lines
    ]
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return figure_html(title, note, EMPTY, warning=warning)
    xs = np.concatenate([np.asarray(line.x, float) for line in lines])
    if x_names:
        x_range = -0.5, len(x_names) - 0.5
    else:
        x_range = _widen_empty_range(float(xs.min()), float(xs.max()))
    ends = np.array([float(line.x[i]) for line in lines for i in (0, -1)])
    x = Axis(*x_range, LEFT, WIDTH - RIGHT, log_x, whole_ticks=bool((ends == ends.round()).all()))
    low, high, cut_off = _y_range_and_cut_off(
        lines, reference_lines, log_y, from_zero, fit_y_to_late_values
    )
    y = Axis(low, high, HEIGHT - BOTTOM, TOP, log_y)
    parts = [_axes_svg(x, y, x_label, x_names)]
    for position, text, kind in marks:
        if x.low <= position <= x.high:
            parts.append(
                f'<line class="mark {kind}" x1="{x(position):.1f}" x2="{x(position):.1f}" '
                f'y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{_escape_html(text)}</title></line>"
            )
    # A nested <svg> cuts the lines off at the frame, but not the dots at the ends of the x axis.
    clip = (
        f'<svg y="{TOP - 2}" width="{WIDTH}" height="{HEIGHT - TOP - BOTTOM + 5}" '
        f'viewBox="0 {TOP - 2} {WIDTH} {HEIGHT - TOP - BOTTOM + 5}">'
    )
    parts.append(clip + "".join(_line_svg(line, x, y) for line in lines) + "</svg>")
    # The reference lines come last, so that their labels are not under the lines.
    parts += [
        _reference_line(label, value, y, [r for _, r in reference_lines])
        for label, value in reference_lines
    ]
    data = {
        "names": list(x_names),
        "label": x_label,
        "log": log_y,
        "logX": log_x,
        "whole": x.whole_ticks,
        "zero": from_zero,
        "late": cut_off is not None,
        "references": [list(reference) for reference in reference_lines],
        "marks": [list(mark) for mark in marks],
        "lines": [_line_for_page_script(line) for line in lines],
    }
    named = [line for line in lines if line.label]
    legend = "".join(map(_legend_entry, named)) if len(named) <= LEGEND_LINES else ""
    body = _chart_svg("".join(parts), title) + _json_script(data)
    if cut_off is not None:  # page.js hides this where it draws the whole line
        body += f'<p class="note cut">Begins above the frame, at {short_number(cut_off)}.</p>'
    return figure_html(title, note, body, legend, "lines", warning=warning)


def _line_for_page_script(line: Line) -> dict:
    """Returns the data with which page.js shows the values of a line and draws the line again."""
    data = {"label": line.label, "colour": line.css_colour, "x": _rounded_for_json(line.x, 9)}
    data["y"] = _rounded_for_json(line.y)
    if _largest_band_height(line) > 0:
        data |= {"low": _rounded_for_json(line.band_low), "high": _rounded_for_json(line.band_high)}
    if pattern := DASHES[line.dash_index % len(DASHES)]:
        data["dash"] = pattern
    if line.dots:
        data["dots"] = True
    if not line.joined:
        data["joined"] = False
    if line.run_index is not None:
        data["run"] = line.run_index
    return data


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
    run: int | None = None,
) -> str:
    """Draws a matrix [rows, columns] as colours, with row 0 at the top. NaN is transparent. Returns
    the figure as HTML.

    Args:
      rows: the names of the rows.
      columns: the names of the columns, or increasing whole numbers.
      diverging: whether the values are ratios. The colour scale of ratios is logarithmic from 1/4
        to 4 with 1 in the middle, and zeros are black.
      log: whether the colour scale is logarithmic, for values that are not ratios.
      run: the index of the run that the figure is about, on a page of several runs; None: no run.
    """
    values = _without_extreme_values(values)
    if not np.isfinite(values).any():
        return figure_html(title, note, EMPTY, run=run)
    index, low, high = _palette_indices(values, diverging, log)
    colour_map = _diverging_colour if diverging else _viridis_colour
    box = _Box(LEFT, WIDTH - 74, TOP, HEIGHT - BOTTOM)
    half = box.width / len(columns) / 2  # half the width of a column
    if isinstance(columns, np.ndarray):
        column_range = _widen_empty_range(float(columns[0]), float(columns[-1]))
        scale = Axis(*column_range, box.left + half, box.right - half, whole_ticks=True)
        values_of_ticks = scale.tick_values(6)
        ticks = list(zip(map(float, map(scale, values_of_ticks)), tick_labels(values_of_ticks)))
        columns = [str(int(column)) for column in columns]
    else:
        shown = _evenly_spaced_indices(len(columns), 8)
        ticks = [(box.left + half + 2 * half * i, columns[i]) for i in shown]
    parts = [
        _svg_image(_png_uri(index, colour_map), box),
        *(
            f'<text x="{box.left - 6}" '
            f'y="{box.top + (i + 0.5) / len(rows) * box.height + 3.5:.1f}" '
            f'text-anchor="end">{_escape_html(rows[i])}</text>'
            for i in _evenly_spaced_indices(len(rows), 10)
        ),
        *(
            f'<text x="{x:.1f}" y="{box.bottom + 13}" text-anchor="middle">'
            f"{_escape_html(name)}</text>"
            for x, name in ticks
        ),
        _x_axis_label(column_label, (box.left + box.right) / 2),
        _y_axis_label(row_label),
        _colour_bar(box, colour_map, low, high, diverging, log),
    ]
    hover_data = {
        "box": list(box),
        "rows": list(rows),
        "columns": list(columns),
        "names": [row_label, column_label],
        "values": [_rounded_for_json(row, 3) for row in values],
    }
    body = _chart_svg("".join(parts), title) + _json_script(hover_data)
    return figure_html(title, note, body, kind="heat", run=run)


class _Box(NamedTuple):
    """A rectangle in SVG units."""

    left: int
    right: int
    top: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top


def _palette_indices(
    values: np.ndarray, diverging: bool, log: bool
) -> tuple[np.ndarray, float, float]:
    """Maps values to the palette indices that `_png_uri` encodes.

    Returns:
      The indices, uint8, in the shape of `values`; the smallest value of the colour scale; and its
      largest value.
    """
    if diverging:
        low, high = 0.25, 4.0
        level = (np.log2(np.maximum(values, 1e-9)) + 2) / 4
    else:
        on_scale = values[np.isfinite(values) & ((values > 0) | (not log))]
        low, high = 0.0, 1.0
        if on_scale.size:
            low, high = _widen_empty_range(float(on_scale.min()), float(on_scale.max()))
        a, b, v = (
            np.log(np.maximum(x, 1e-30)) if log else np.asarray(x, float)
            for x in (low, high, values)
        )
        level = (v - a) / (b - a)
    colour = 2 + np.clip(np.nan_to_num(level), 0, 1) * 253
    index = np.where(np.isfinite(values), colour, 0).astype(np.uint8)
    if diverging:
        index[values == 0] = 1
    return index, low, high


def _colour_bar(
    box: _Box, colour_map: Callable, low: float, high: float, diverging: bool, log: bool
) -> str:
    """Draws the colour scale beside a heatmap."""
    ramp = _png_uri(np.arange(255, 1, -1, np.uint8)[:, None], colour_map)
    parts = [_svg_image(ramp, _Box(box.right + 14, box.right + 24, box.top, box.bottom))]
    middle = math.sqrt(low * high) if log or diverging else (low + high) / 2
    # Values beyond the ends of a diverging scale have the colours of its ends.
    signs = ("≥", "", "≤") if diverging else ("", "", "")
    heights = (box.top + 8, (box.top + box.bottom) / 2 + 3, box.bottom)
    for sign, value, y in zip(signs, (high, middle, low), heights):
        text = sign + short_number(float(f"{value:.3g}"))
        parts.append(f'<text x="{box.right + 28}" y="{y:.1f}">{text}</text>')
    return "".join(parts)


def _svg_image(uri: str, box: _Box) -> str:
    return (
        f'<image href="{uri}" x="{box.left}" y="{box.top}" width="{box.width}" '
        f'height="{box.height}" preserveAspectRatio="none"/>'
    )


def stacked_columns(
    title: str,
    shares: np.ndarray,
    *,
    width: float,
    names: Sequence[str],
    colours: Sequence[str],
    marks: Sequence[tuple[float, str]] = (),
    note: str = "",
    unit: tuple[str, float] | None = None,
    run: int | None = None,
) -> str:
    """Draws shares as stacked columns over wall time. Returns the figure as HTML.

    Args:
      shares: [columns, names]; the shares of a column add up to at most 1.
      width: the length of wall time that a column stands for, in seconds.
      colours: the CSS colour of each name.
      marks: (seconds since the start, text) of triangles above the columns.
      unit: the unit of the x axis and its length in seconds, as `suitable_time_unit` returns them;
        None: the unit that suits the whole wall time.
      run: the index of the run that the figure is about, on a page of several runs; None: no run.
    """
    unit, scale = unit or suitable_time_unit(width * len(shares))
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
        if boxes:
            parts.append(
                f'<path d="{boxes}" fill="{colours[i]}"><title>{_escape_html(name)}</title></path>'
            )
    for second, text in marks:
        at = float(x(second / scale))
        parts.append(
            f'<path class="fault" d="M{at:.1f} {TOP - 1}l-4 '
            f'-7h8Z"><title>{_escape_html(text)}</title></path>'
        )
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{_escape_html(name)}</span>'
        for i, (name, colour) in enumerate(zip(names, colours, strict=True))
        if shares[:, i].any()
    )
    return figure_html(title, note, _chart_svg("".join(parts), title), legend, run=run)


def suitable_time_unit(seconds: float) -> tuple[str, float]:
    """Returns the name of the largest unit of time that fits at least three times into `seconds`,
    and the length of the unit in seconds; ("seconds", 1.0) if none fits.
    """
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((unit for unit in units if seconds >= 3 * unit[1]), ("seconds", 1.0))


def series_colour(number: int) -> str:
    """Returns the colour in CSS of the series with this number, different for each number."""
    if number < COLOURS:
        return f"var(--series-{number})"
    return f"hsl({number * 137.508 % 360:.0f} 60% 50%)"  # steps of the golden angle


class LinkCell(NamedTuple):
    """A table cell with a link to another page."""

    shown_text: str
    href: str


def table_html(
    head: Sequence[str], rows: Sequence[Sequence[str | LinkCell]], numeric: bool = False
) -> str:
    """Returns a table as HTML. The cells are plain text or links; `numeric` aligns them as
    numbers.
    """
    cells = "".join(
        "<tr>" + "".join(f"<td>{_table_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table{" class=numeric" if numeric else ""}><thead><tr>'
        + "".join(f"<th>{_escape_html(name)}</th>" for name in head)
        + f"</tr></thead><tbody>{cells}</tbody></table></div>"
    )


def _table_cell(cell: str | LinkCell) -> str:
    if isinstance(cell, LinkCell):
        return f'<a href="{html.escape(cell.href, quote=True)}">{_escape_html(cell.shown_text)}</a>'
    return _escape_html(cell)


def figure_html(
    title: str,
    note: str,
    body: str,
    legend: str = "",
    kind: str = "",
    warning: str = "",
    run: int | None = None,
) -> str:
    """Returns a <figure> as HTML.

    Args:
      title, note, warning: plain text.
      body, legend: HTML.
      kind: the format of the hover data in `body`, from which page.js shows the values under the
        pointer: "lines", "heat", or "" for a figure without hover data.
      run: the index of the run that the whole figure is about, on a page of several runs.
    """
    run_attribute = "" if run is None else f' data-run="{run}"'
    return (
        f'<figure data-kind="{kind}"{run_attribute}><figcaption>{_escape_html(title)}</figcaption>'
        + (f'<p class="note warning">{_escape_html(warning)}</p>' if warning else "")
        + (f'<p class="note">{_escape_html(note)}</p>' if note else "")
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + f"{body}</figure>"
    )


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Returns short texts for the ticks of an axis, with as many digits as tell the ticks apart."""
    for digits in range(4, 9):
        labels = [short_number(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return labels


def short_number(value: float, digits: int = 4) -> str:
    """Returns a number as a short text of at most `digits` significant digits, such as 1.5M, 0.012
    or 3e-5; "–" if it is not finite.
    """
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.{digits}g}{unit}"
    has_one_digit = f"{value:.0e}" == f"{value:.1e}".replace(".0", "")
    if 0 < size < 1e-3 and has_one_digit:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.{digits}g}"


def _without_extreme_values(values: Sequence[float] | np.ndarray | None) -> np.ndarray | None:
    """Returns the values as an array, with NaN for magnitudes above LARGEST and 0 for magnitudes
    below 1 / LARGEST. If `values` is None, returns None.
    """
    if values is None:
        return None
    values = np.asarray(values, float)
    size = np.abs(values)
    return np.where(size <= LARGEST, np.where(size < 1 / LARGEST, 0.0, values), np.nan)


def _y_range_and_cut_off(
    lines: Sequence[Line],
    reference_lines: Sequence[tuple[str, float]],
    log_y: bool,
    from_zero: bool,
    fit_y_to_late_values: bool,
) -> tuple[float, float, float | None]:
    """Returns the low and the high end of the y axis, with margins, and a third value: the largest
    value of the lines if the y axis does not reach this value, otherwise None. `line_chart`
    describes the arguments.
    """
    low, high = full_range = _smallest_and_largest_y(lines, log_y) or (1e-3, 1.0)
    # With fewer points, the first of them are too large a part of the curve to be cut off.
    if fit_y_to_late_values and max(len(line.x) for line in lines) >= 30:
        first, last = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
        start = first + 0.03 * (last - first)
        low, high = _smallest_and_largest_y(lines, log_y, start) or full_range
    cut_off = full_range[1] if full_range[1] > high + 0.25 * (high - low) else None
    if cut_off is None:
        high = full_range[1]
    values = [value for _, value in reference_lines if value > 0 or not log_y]
    low, high = min([low, *values]), max([high, *values])
    if log_y:
        low, high = _widen_empty_range(math.log10(low), math.log10(high))
        margin = 0.04 * (high - low)
        return 10 ** (low - margin), 10 ** (high + margin), cut_off
    is_positive = low >= 0
    low, high = _widen_empty_range(low, high)
    margin = 0.05 * (high - low)
    if is_positive:
        return 0.0 if from_zero else max(low - margin, 0.0), high + margin, cut_off
    high += margin
    return low - margin, max(high, 0.0) if from_zero else high, cut_off


def _smallest_and_largest_y(
    lines: Sequence[Line], log: bool, start: float = -np.inf
) -> tuple[float, float] | None:
    """Returns the smallest and the largest finite y of the lines and bands at x ≥ `start`; None if
    there is no finite y. If `log` is true, only positive numbers count.
    """
    parts = []
    for line in lines:
        shown = np.asarray(line.x, float) >= start
        bands = [values for values in (line.band_low, line.band_high) if values is not None]
        parts += [np.asarray(values, float)[shown] for values in (line.y, *bands)]
    values = np.concatenate(parts)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    return (float(values.min()), float(values.max())) if values.size else None


def _widen_empty_range(low: float, high: float) -> tuple[float, float]:
    """Returns `low` and `high`, moved apart if they are (nearly) equal."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    pad = 0.1 * abs(high) or 0.1
    return low - pad, high + pad


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round values on a logarithmic axis. If fewer than two values of the
    form m · 10^p lie on the axis, returns the ticks of a linear axis.
    """
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
    return Axis(low, high, 0, 1).tick_values(count - 1)


def _axes_svg(x: Axis, y: Axis, x_label: str, x_names: Sequence[str], percent: bool = False) -> str:
    """Draws grid lines, ticks and the label of the x axis."""
    parts = []
    values = y.tick_values(5)
    labels = [f"{value:.0%}" for value in values] if percent else tick_labels(values)
    for value, text in zip(values, labels, strict=True):
        at = float(y(value))
        parts.append(
            f'<line class="grid" x1="{x.svg_begin}" x2="{x.svg_end}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{x.svg_begin - 6}" '
            f'y="{at + 3.5:.1f}" text-anchor="end">{text}</text>'
        )
    ticks = _evenly_spaced_indices(len(x_names), 12) if x_names else x.tick_values(6)
    labels = [x_names[tick] for tick in ticks] if x_names else tick_labels(ticks)
    for tick, text in zip(ticks, labels, strict=True):
        at = float(x(tick))
        # The last label is kept inside the drawing.
        anchor = "end" if at > WIDTH - 24 else "middle"
        parts.append(
            f'<text x="{min(at, WIDTH - 2):.1f}" y="{y.svg_begin + 14}" text-anchor="{anchor}">'
            f"{_escape_html(text)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{x.svg_begin}" x2="{x.svg_end}" '
        f'y1="{y.svg_begin}" y2="{y.svg_begin}"/>'
    )
    return "".join(parts) + _x_axis_label(x_label, (x.svg_begin + x.svg_end) / 2)


def _x_axis_label(text: str, at: float) -> str:
    return (
        f'<text class="axis-label" x="{at:.1f}" y="{HEIGHT - 5}" '
        f'text-anchor="middle">{_escape_html(text)}</text>'
    )


def _y_axis_label(text: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="axis-label" x="12" y="{middle}" transform="rotate(-90 12 {middle})" '
        f'text-anchor="middle">{_escape_html(text)}</text>'
    )


def _reference_line(label: str, value: float, y: Axis, others: Sequence[float]) -> str:
    """Draws a dashed horizontal line at y = `value`, with its label. `others` has the values of all
    reference lines of the chart. The label stands above the line, or below it if the frame or
    another reference line is close above.
    """
    at = float(y(value))
    # The label is below the line if the frame or another line is too close above it.
    below = at - TOP < 12 or any(0 < at - float(y(other)) < 13 for other in others)
    return (
        f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" '
        f'y2="{at:.1f}"/><text class="reference" '
        f'x="{WIDTH - RIGHT - 2}" y="{at + (11 if below else -4):.1f}" '
        f'text-anchor="end">{_escape_html(label)}</text>'
    )


def _line_svg(line: Line, x: Axis, y: Axis) -> str:
    """Draws a line, its band and its points."""
    px, py = x(line.x), y(np.asarray(line.y, float))
    parts = [_band_svg(line, px, y)]
    style = f'stroke="{line.css_colour}"{line.dash_attribute}{line.run_attribute}'
    if line.joined:
        parts.append(f'<path class="line" d="{_svg_path(px, py)}" {style}/>')
    single = len(px) == 1 or np.isfinite(py).sum() == 1
    if line.dots and len(px) <= 60 or single:
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" '
            f'fill="{line.css_colour}"{line.run_attribute}/>'
            for a, b in zip(px, py)
            if np.isfinite(b)
        ]
    return "".join(parts)


def _band_svg(line: Line, px: np.ndarray, y: Axis) -> str:
    """Draws the band between `line.band_low` and `line.band_high`, with the gaps that they have.
    Returns "" if the band has no height.
    """
    if _largest_band_height(line) <= 0:
        return ""
    low, high = y(np.asarray(line.band_low, float)), y(np.asarray(line.band_high, float))
    drawn = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    edges = ""
    for part in np.split(drawn, np.flatnonzero(np.diff(drawn) > 1) + 1):
        lower = _svg_path(px[part][::-1], low[part][::-1])
        edges += f"{_svg_path(px[part], high[part])}L{lower[1:]}Z"
    return f'<path class="band" d="{edges}" fill="{line.css_colour}"{line.run_attribute}/>'


def _largest_band_height(line: Line) -> float:
    """Returns the largest distance between the edges of the line's band; 0 without a band."""
    if line.band_low is None or line.band_high is None:
        return 0.0
    return float(
        np.nanmax(np.asarray(line.band_high, float) - np.asarray(line.band_low, float), initial=0)
    )


def _svg_path(px: np.ndarray, py: np.ndarray) -> str:
    """Returns an SVG path that connects neighbouring points and has a gap at each NaN."""
    parts, connected = [], False
    for a, b in zip(px, np.clip(py, -1e5, 1e5)):
        finite = bool(np.isfinite(b))
        if finite:
            parts.append(f"{'L' if connected else 'M'}{a:.1f} {b:.1f}")
        connected = finite
    return "".join(parts)


def _legend_entry(line: Line) -> str:
    return (
        f'<span><svg width="18" height="8"><path d="M0 4H18" stroke="{line.css_colour}" '
        f'stroke-width="2.5"{line.dash_attribute}/></svg>'
        f"{_escape_html(line.label)}</span>"
    )


def _chart_svg(body: str, title: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_escape_html(title)}">{body}</svg>'
    )


def _json_script(data: dict) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _rounded_for_json(values, digits: int = 5) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in map(float, values)]


def _evenly_spaced_indices(count: int, most: int) -> list[int]:
    """Returns at most `most` of the indices 0 … count - 1: the index 0 and every n-th index after
    it, with the smallest possible n.
    """
    return list(range(0, count, max(1, -(-count // most))))


def _escape_html(text: str) -> str:
    return html.escape(str(text))


def _interpolate_colour(anchors: Sequence[str], level: float) -> tuple[int, int, int]:
    """Returns the colour (red, green, blue) at `level`, which is interpolated linearly between the
    hexadecimal colours `anchors`; the first anchor is at level 0 and the last at level 1.
    """
    position = min(max(level, 0.0), 1.0) * (len(anchors) - 1)
    i = min(int(position), len(anchors) - 2)
    a, b = (bytes.fromhex(anchors[j]) for j in (i, i + 1))
    return tuple(round(p + (q - p) * (position - i)) for p, q in zip(a, b))


def _viridis_colour(level: float) -> tuple[int, int, int]:
    """Returns the colour (red, green, blue) of a level from 0 to 1, in the colour map viridis of
    matplotlib (public domain), interpolated between five of its colours.
    """
    return _interpolate_colour(("440154", "3b528b", "21918c", "5ec962", "fde725"), level)


def _diverging_colour(level: float) -> tuple[int, int, int]:
    """Returns the colour (red, green, blue) of a level from 0 (blue) through 0.5 (near-white) to 1
    (red).
    """
    return _interpolate_colour(("2166ac", "92c5de", "f0efeb", "f4a582", "b2182b"), level)


def _png_uri(index: np.ndarray, colour_map: Callable[[float], tuple[int, int, int]]) -> str:
    """Encodes palette indices [rows, columns] as a PNG image in a data URI.

    Index 0 is transparent, 1 is black, and 2 … 255 are the colours of the levels 0 … 1.
    """
    palette = bytes(6) + b"".join(bytes(colour_map(i / 253)) for i in range(254))

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
