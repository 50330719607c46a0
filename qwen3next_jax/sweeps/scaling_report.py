"""Writes the results of `scaling.analyse_scaling` as text for a terminal, as a page with charts,
and as JSON.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence

import numpy as np

from qwen3next_jax.reporting.charts import Line, line_chart, short_number, table_html
from qwen3next_jax.reporting.page import html_document
from qwen3next_jax.sweeps.scaling import (
    CONFIDENCE,
    Interval,
    LossFit,
    Prediction,
    ScalingAnalysis,
    ScalingRun,
    compute_optimal_size,
    flops_per_token_by_size,
)

_CURVE_POINTS = 48
_CURVE_RANGE = (0.5, 100.0)  # of the compute-optimal curves, in budgets of the smallest and largest


def result_sentences(scaling: ScalingAnalysis, resamples: int) -> list[str]:
    """Returns sentences about the results of the fits, and about questions that the data leave
    open.
    """
    runs = scaling.analysed_runs
    found = [
        f"{len(runs)} runs: N {_range_text(run.size for run in runs)}, "
        f"D {_range_text(run.tokens for run in runs)} tokens, "
        f"C {_range_text(run.flops for run in runs)} FLOPs, "
        f"L {min(run.loss for run in runs):.4f} to {max(run.loss for run in runs):.4f}. "
        f"Intervals hold {CONFIDENCE:.0%} of {resamples} resampled fits."
    ]
    residuals = [math.log(run.loss / scaling.loss_fit(run.size, run.tokens)) for run in runs]
    rms = math.sqrt(np.mean(np.square(residuals)))
    found.append(
        f"L = E + A / N^α + B / D^β is within {max(map(abs, residuals)):.2%} of every run, "
        f"{rms:.2%} in the root mean square."
    )
    if unknown := [
        f"{name} ({interval.low:.3g} to {interval.high:.3g})"
        for name, interval in scaling.constant_intervals.items()
        if not interval.is_determined
    ]:
        found.append(
            f"The data do not tell {', '.join(unknown)}: values in this range fit about as well. "
            "More budgets, or longer and larger runs, would tell; until then trust the fit "
            "between the runs, not far beyond them."
        )
    if without := [optimum for optimum in scaling.extrapolated_optima if optimum.at_search_end]:
        found.append(
            f"At {', '.join(f'{optimum.flops:.2g}' for optimum in without)} FLOPs the fit has no "
            "best N: the one in the table is the end of the search."
        )
    if not scaling.extrapolated_optima[0].at_search_end:
        found.append(
            "By the fit, the best N grows as "
            f"C^{_interval_text(scaling.optimal_size_exponent, '.2f')} up to here."
        )
    iso = scaling.iso_flop
    if iso.size_exponent is not None:
        found.append(
            f"By the minima of the isoFLOP parabolas, it grows as C^{
                _interval_text(iso.size_exponent, '.2f')
            }."
        )
        if iso.size_exponent.low is None:
            found.append(
                "The isoFLOP parabolas do not tell how far this exponent may be off: more sizes at "
                "each budget would tell (a parabola meets three runs exactly)."
            )
    if without := [p for p in iso.parabolas if math.isnan(p.best_size_within_runs)]:
        found.append(
            f"At {', '.join(f'{p.budget_flops:.2g}' for p in without)} FLOPs the minimum is not "
            "between the sizes that were tried."
        )
    if not iso.parabolas:
        found.append("No budget has three sizes, so there are no isoFLOP parabolas.")
    return found


def result_tables(scaling: ScalingAnalysis) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Returns title → (head, rows) of each table of the results, as text."""
    constants = [
        [name, f"{i.value:.4g}", f"{i.low:.4g} to {i.high:.4g}", "" if i.is_determined else "no"]
        for name, i in scaling.constant_intervals.items()
    ]
    optima = [
        [
            f"{o.flops:.3g}",
            f"{_interval_text(o.size, '.3g')} (end of the search)"
            if o.at_search_end
            else _interval_text(o.size, ".3g"),
            _interval_text(o.tokens, ".3g"),
            _interval_text(o.loss, ".4f"),
        ]
        for o in scaling.extrapolated_optima
    ]
    found = {
        "Constants": (["", "fit", "interval", "determined"], constants),
        "Compute-optimal": (["FLOPs", "N", "D, tokens", "L"], optima),
    }
    for what, predictions in scaling.heldout_predictions.items():
        if not isinstance(predictions, str):
            found[f"Prediction of {what} from the other runs"] = (
                ["run", "predicted L", "measured L", "error"],
                [_prediction_row(prediction) for prediction in predictions],
            )
    return found


def as_text(scaling: ScalingAnalysis, resamples: int) -> str:
    """Returns the sentences and tables of the results as plain text."""
    parts = ["\n".join(result_sentences(scaling, resamples))]
    for title, (head, rows) in result_tables(scaling).items():
        columns = [head, *rows]
        widths = [max(len(row[i]) for row in columns) for i in range(len(head))]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in columns
        )
        parts.append(f"{title}\n" + "\n".join(f"  {line.rstrip()}" for line in lines))
    for what, predictions in scaling.heldout_predictions.items():
        if isinstance(predictions, str):
            parts.append(f"No prediction of {what} from the other runs: {predictions}")
    return "\n\n".join(parts)


def as_json(scaling: ScalingAnalysis) -> str:
    """Returns all numbers of the analysis as JSON."""
    record = {
        "constants": {name: i._asdict() for name, i in scaling.constant_intervals.items()},
        "exponent": scaling.optimal_size_exponent._asdict(),
        "iso_flop_exponent": (e := scaling.iso_flop.size_exponent) and e._asdict(),
        "optima": [
            {
                "flops": o.flops,
                **{n: getattr(o, n)._asdict() for n in ("size", "tokens", "loss")},
                "at_end": o.at_search_end,
            }
            for o in scaling.extrapolated_optima
        ],
        "predictions": {
            what: found
            if isinstance(found, str)
            else [
                {
                    "run": p.heldout_run.name,
                    "measured": p.heldout_run.loss,
                    **p.predicted_loss._asdict(),
                }
                for p in found
            ]
            for what, found in scaling.heldout_predictions.items()
        },
        "runs": [run._asdict() for run in scaling.analysed_runs],
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def render_page(
    scaling: ScalingAnalysis, title: str, metric: str, resamples: int, size: str = "parameters"
) -> str:
    """Returns the page scaling.html: the sentences, charts and tables of the results, and
    the runs. `size` says what N counts, as in `scaling.read_runs`.
    """
    listed = "".join(
        f"<li>{html.escape(line)}</li>" for line in result_sentences(scaling, resamples)
    )
    runs = [
        [
            run.name,
            f"{run.size:,.0f}",
            f"{run.tokens:,.0f}",
            f"{run.flops:.3g}",
            f"{run.loss:.4f}",
            f"{scaling.loss_fit(run.size, run.tokens) / run.loss - 1:+.2%}",
        ]
        for run in sorted(scaling.analysed_runs, key=lambda run: (run.flops, run.size))
    ]
    sections = {
        "Findings": f"<ul>{listed}</ul>",
        "Charts": f'<div class="charts">{"".join(_charts(scaling, metric))}</div>',
        **{
            name: table_html(head, rows, numeric=True)
            for name, (head, rows) in result_tables(scaling).items()
        },
        **{
            f"Prediction of {what} from the other runs": f"<p>{html.escape(found)}</p>"
            for what, found in scaling.heldout_predictions.items()
            if isinstance(found, str)
        },
        "Runs": table_html(
            ["run", "N", "D, tokens", "C, FLOPs", metric, "fit"], runs, numeric=True
        ),
    }
    body = "".join(
        f'<section id="{name.lower().replace(" ", "-")}"><h2>{html.escape(name)}</h2>{text}'
        "</section>"
        for name, text in sections.items()
    )
    counted = "parameters" if size == "parameters" else "FLOPs per token / 6"
    subtitle = f"{metric} of {len(scaling.analysed_runs)} runs, over N ({counted}) and D (tokens)"
    return html_document(title, subtitle, list(sections), body)


def _charts(scaling: ScalingAnalysis, metric: str) -> list[str]:
    budgets, sizes, tokens, losses = _optimal_curves(scaling)
    by_size: dict[float, list[ScalingRun]] = {}
    for run in sorted(scaling.analysed_runs, key=lambda run: (run.size, run.flops)):
        by_size.setdefault(run.size, []).append(run)
    measured = [
        Line(
            f"N = {short_number(size)}",
            [run.flops for run in runs],
            [run.loss for run in runs],
            gradient_position=i / max(len(by_size) - 1, 1),
            dots=True,
        )
        for i, (size, runs) in enumerate(by_size.items())
    ]
    charts = [
        line_chart(
            f"{metric[0].upper()}{metric[1:]} over compute",
            [*measured, _band_line("compute-optimal, by the fit", budgets, losses, dash=1)],
            x_label="FLOPs",
            log_y=True,
            log_x=True,
            note="The band holds 95 % of the resampled fits.",
        )
    ]
    parabolas = scaling.iso_flop.parabolas
    lines = []
    for i, parabola in enumerate(parabolas):
        at = np.geomspace(parabola.runs[0].size, parabola.runs[-1].size, _CURVE_POINTS)
        lines.append(Line(f"{parabola.budget_flops:.2g} FLOPs", at, parabola(at), colour_index=i))
        points = ([run.size for run in parabola.runs], [run.loss for run in parabola.runs])
        lines.append(Line("", *points, colour_index=i, dots=True, joined=False))
    if lines:
        charts.append(
            line_chart(
                "IsoFLOP parabolas", lines, x_label="N", log_x=True, note="Dots were measured."
            )
        )
    minima = [
        (p.budget_flops, p.best_size_within_runs)
        for p in parabolas
        if math.isfinite(p.best_size_within_runs)
    ]
    optimal = [_band_line("by the fit", budgets, sizes)]
    if minima:
        optimal.append(
            Line("minima of the parabolas", *zip(*minima), colour_index=1, dots=True, joined=False)
        )
    if scaling.iso_flop.size_exponent is not None:
        through = scaling.iso_flop.size_factor * np.power(
            budgets, scaling.iso_flop.size_exponent.value
        )
        optimal.append(Line("line through them", budgets, through, colour_index=1, dash_index=1))
    charts.append(
        line_chart("Compute-optimal size", optimal, x_label="FLOPs", log_y=True, log_x=True)
    )
    charts.append(
        line_chart(
            "Compute-optimal tokens",
            [_band_line("by the fit", budgets, tokens)],
            x_label="FLOPs",
            log_y=True,
            log_x=True,
        )
    )
    return charts


def _optimal_curves(scaling: ScalingAnalysis) -> tuple[np.ndarray, list, list, list]:
    """Returns the budgets of the curves in FLOPs, and three lists [budgets, 1 + resamples]: the
    compute-optimal sizes, tokens and losses by the fit (first) and by at most 50 resampled fits.
    """
    flops = [run.flops for run in scaling.analysed_runs]
    budgets = np.geomspace(_CURVE_RANGE[0] * min(flops), _CURVE_RANGE[1] * max(flops), 25)
    flops_per_token = flops_per_token_by_size(scaling.analysed_runs)
    measured = [run.size for run in scaling.analysed_runs]
    limits = min(measured) / 10, max(measured) * 10 * _CURVE_RANGE[1]
    sizes, tokens, losses = [], [], []

    def add(fits: Sequence[LossFit], budget: float) -> None:
        best = [compute_optimal_size(fit, budget, flops_per_token, limits) for fit in fits]
        used = [budget / flops_per_token(size) for size in best]
        sizes.append(best)
        tokens.append(used)
        losses.append([fit(n, d) for fit, n, d in zip(fits, best, used, strict=True)])

    fits = (scaling.loss_fit, *scaling.resampled_fits[:50])
    for budget in budgets:
        add(fits, budget)
    return budgets, sizes, tokens, losses


def _band_line(label: str, x: Sequence[float], values: Iterable, dash: int = 0) -> Line:
    """Returns the line of the fit, with the band of the resampled fits around it. `values`:
    [x, 1 + resamples], with the values of the fit first.
    """
    values = np.asarray(list(values))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values[:, 1:], (tail, 1 - tail), axis=1)
    return Line(label, x, values[:, 0], band_low=low, band_high=high, dash_index=dash)


def _prediction_row(prediction: Prediction) -> list[str]:
    return [
        prediction.heldout_run.name,
        _interval_text(prediction.predicted_loss, ".4f"),
        f"{prediction.heldout_run.loss:.4f}",
        f"{prediction.relative_error:+.2%}",
    ]


def _range_text(values: Iterable[float]) -> str:
    values = list(values)
    low, high = (short_number(float(f"{end:.3g}")) for end in (min(values), max(values)))
    return f"{low} to {high}"


def _interval_text(interval: Interval, form: str) -> str:
    if interval.low is None:
        return f"{interval.value:{form}} (no interval)"
    value, low, high = (format(number, form) for number in interval)
    return f"{value} ({low} to {high})"
