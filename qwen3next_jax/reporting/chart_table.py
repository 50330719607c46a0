"""The table of the report's charts. Each row gives the title of a chart, its unit, the quantities
that it shows, and the condition under which a page has the chart. `run_charts` draws the rows;
docs/reference/metrics.md lists the quantities.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from qwen3next_jax.common.metrics import (
    MetricValue,
    displayed_mtp_depth,
    evaluation_name_of_event,
    metric_values_of_event,
)
from qwen3next_jax.reporting.runs import Run

# (label, value) of published values, which charts show as reference lines.
# docs/reference/metrics.md names the sources.
SINKS = (("without output gate .467", 0.467), ("with gate .048", 0.048))
ACTIVATIONS = (("without output gate 1053", 1053.0), ("with gate 94", 94.0))
MASSIVE = (("massive: 1000 × the median", 1000.0),)
ACCEPTANCE = (("released model .897", 0.897), (".719", 0.719), (".476", 0.476))
PERFECT_BALANCE = (("perfect balance 1", 1.0),)


class Quantity(NamedTuple):
    """A number that a run records in metrics.jsonl.

    Attributes:
      label: the name of the number in the chart's legend.
      event_kind: the kind of the events that record the number, such as "train".
      event_field: the field of these events that holds the number.
      each_mtp_depth: whether each depth of multi-token prediction has its own number. If
        `each_mtp_depth` is true, `{depth}` in `event_field` stands for the depth, and `{target}` in
        `label` for the token that this depth predicts.
      each_source: whether each source of the data has its own number. If `each_source` is true,
        `{source}` in `event_field` and in `label` stands for the source.
      also_parameter_average: whether the chart also shows the same number for the moving average of
        the parameters (train.ema), if a run has measured it.
    """

    label: str
    event_kind: str
    event_field: str
    each_mtp_depth: bool = False
    each_source: bool = False
    also_parameter_average: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A row of the table. A chart is drawn if a run has recorded one of its quantities.

    Attributes:
      title: the title, without the unit.
      unit: the unit; "" if the title says it or there is none.
      quantities: the quantities, if `line_for_each` is "quantity"; otherwise the field of
        "diagnostics" events that holds a number of each layer or parameter group.
      line_for_each: "quantity", "layer", or "group" (a group of parameters outside the layers). The
        x axis shows steps; but if a page has several runs, a chart of layers shows the layers on
        the x axis and has a line for each run.
      only_if: function that is called with the runs of a page; whether this page has the chart.
      log_y: whether the y axis is logarithmic.
      from_zero: whether the y axis starts at 0.
      fit_y_to_late_values: whether the y axis fits only the values after the first steps.
      reference_lines: (label, y) of horizontal lines. If `line_for_each` is "quantity", the chart
        shows at most as many reference lines as it has quantities.
      note: a sentence under the title.
    """

    title: str
    quantities: tuple[Quantity, ...] | str
    unit: str = ""
    line_for_each: Literal["quantity", "layer", "group"] = "quantity"
    only_if: Callable[[Sequence[Run]], bool] = lambda runs: True
    log_y: bool = False
    from_zero: bool = False
    fit_y_to_late_values: bool = False
    reference_lines: tuple[tuple[str, float], ...] = ()
    note: str = ""

    @property
    def title_with_unit(self) -> str:
        """The title, followed by the unit in brackets if there is one."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def heldout_metric_name(run: Run) -> str:
    """Returns the name of the metric that the report shows for held-out rows: "bits per byte" if
    the run has recorded it, otherwise "accuracy"; "" if the run has recorded neither.
    """
    if run.newest_value("heldout", "bits_per_byte") is not None:
        return "bits per byte"
    return "accuracy" if run.newest_value("heldout", "accuracy") is not None else ""


def _some_run_has_no_bits_per_byte(runs: Sequence[Run]) -> bool:
    """Whether a run has recorded held-out accuracy but no bits per byte. If all runs have bits per
    byte, the charts of accuracy add nothing.
    """
    return any(heldout_metric_name(run) == "accuracy" for run in runs)


def _some_run_has_no_mfu(runs: Sequence[Run]) -> bool:
    """Whether a run has recorded no MFU, because the peak FLOP/s of its chip are not known."""
    return any(run.newest_value("train", "mfu") is None for run in runs)


LOSS = (
    Chart(
        "Loss",
        (
            Quantity("training", "train", "loss"),
            Quantity("held-out", "heldout", "loss", also_parameter_average=True),
        ),
        unit="nats per token",
        fit_y_to_late_values=True,
        note="Cross-entropy of the next token. A nat is 1.44 bits.",
    ),
    Chart(
        "Held-out bits per byte",
        (Quantity("", "heldout", "bits_per_byte", also_parameter_average=True),),
        fit_y_to_late_values=True,
    ),
    Chart(
        "Held-out bits per byte by source",
        (Quantity("{source}", "heldout", "bits_per_byte/{source}", each_source=True),),
        fit_y_to_late_values=True,
        note="Rows of each source of the data by themselves.",
    ),
    Chart(
        "Held-out loss by source",
        (Quantity("{source}", "heldout", "loss/{source}", each_source=True),),
        unit="nats per token",
        fit_y_to_late_values=True,
        only_if=_some_run_has_no_bits_per_byte,
    ),
    Chart(
        "Epochs by source",
        (Quantity("{source}", "train", "epochs/{source}", each_source=True),),
        from_zero=True,
        note="How often the run has read each source of the data.",
    ),
    Chart(
        "Held-out accuracy",
        (Quantity("", "heldout", "accuracy", also_parameter_average=True),),
        only_if=_some_run_has_no_bits_per_byte,
    ),
    Chart(
        "MTP loss",
        (Quantity("{target}", "train", "mtp_loss/{depth}", each_mtp_depth=True),),
        unit="nats per token",
        fit_y_to_late_values=True,
        note="Of the token after the next (t+2) and of later ones.",
    ),
    Chart(
        "MTP drafts accepted, held-out text",
        (Quantity("{target}", "heldout", "mtp_acceptance/{depth}", each_mtp_depth=True),),
        from_zero=True,
        reference_lines=ACCEPTANCE,
        note="Share of positions at which the drafted token is the one that the model itself finds "
        "most likely. A draft of t+3 counts only where the draft of t+2 is right as well.",
    ),
    Chart(
        "Accuracy in training",
        (
            Quantity("next token, t+1", "train", "top1"),
            Quantity("MTP {target}", "train", "mtp_top1/{depth}", each_mtp_depth=True),
        ),
        from_zero=True,
    ),
    Chart(
        "Share of tokens in the loss",
        (Quantity("", "train", "target_share"),),
        from_zero=True,
        note="With loss weights (conversations), the loss counts tokens with weights above 0.",
    ),
    Chart(
        "Balance loss",
        (Quantity("", "train", "balance_loss"),),
        fit_y_to_late_values=True,
        reference_lines=PERFECT_BALANCE,
    ),
)

OPTIMISATION = (
    Chart("Gradient norm, before clipping", (Quantity("", "train", "grad_norm"),), log_y=True),
    Chart("Learning rate", (Quantity("", "train", "learning_rate"),), from_zero=True),
    Chart("Gradient norm by layer", "grad_norm", line_for_each="layer", log_y=True),
    Chart("Parameter norm by layer", "param_norm", line_for_each="layer"),
    Chart(
        "Largest norm weight by layer",
        "norm_weight_max",
        line_for_each="layer",
        note="max |w| of the layer's norms; most of them start at 0.",
    ),
    Chart("Gradient norm outside the layers", "grad_norm", line_for_each="group", log_y=True),
    Chart("Parameter norm outside the layers", "param_norm", line_for_each="group", log_y=True),
)

SPEED = (
    Chart("Tokens per second", (Quantity("", "train", "tokens_per_second"),), from_zero=True),
    Chart("Model FLOP/s utilisation", (Quantity("", "train", "mfu"),), from_zero=True),
    Chart(
        "Model FLOP/s",
        (Quantity("", "train", "model_flops_per_second"),),
        only_if=_some_run_has_no_mfu,
        from_zero=True,
    ),
    Chart(
        "Share of the time spent waiting for data",
        (Quantity("", "train", "data_wait"),),
        from_zero=True,
    ),
    Chart("Peak memory", (Quantity("", "train", "memory_bytes"),), unit="bytes", from_zero=True),
)

EXPERTS = (
    Chart(
        "Dead experts by layer",
        "dead_experts",
        line_for_each="layer",
        from_zero=True,
        note="Experts that no token of the batch chose.",
    ),
    Chart(
        "Load: coefficient of variation by layer", "load_cv", line_for_each="layer", from_zero=True
    ),
    Chart(
        "Load: largest violation by layer",
        "load_max_violation",
        line_for_each="layer",
        from_zero=True,
        note="Busiest expert's load over the mean, less 1.",
    ),
    Chart(
        "Router entropy by layer",
        "router_entropy",
        line_for_each="layer",
        note="Of a token's probabilities, over ln E: 1 is undecided, 0 is certain.",
    ),
    Chart(
        "Router z by layer", "router_z", line_for_each="layer", note="Mean of logsumexp(logits)²."
    ),
)

RECURRENT_LAYERS = (
    Chart(
        "Decay half-life by layer",
        "half_life",
        unit="tokens",
        line_for_each="layer",
        log_y=True,
        note="−ln 2 / mean g; geometric mean over heads.",
    ),
    Chart(
        "Longest half-life of a head",
        "half_life_max",
        unit="tokens",
        line_for_each="layer",
        log_y=True,
    ),
    Chart(
        "Write strength β by layer",
        "beta",
        line_for_each="layer",
        note="Mean over tokens and heads.",
    ),
    Chart(
        "State norm by layer",
        "state_norm",
        line_for_each="layer",
        log_y=True,
        note="‖S‖ (Frobenius) after the last token, mean over rows and heads.",
    ),
)

ATTENTION = (
    Chart(
        "Attention on the first token",
        "first_token_share",
        line_for_each="layer",
        from_zero=True,
        reference_lines=SINKS,
        note="Mean over heads and over the queries after it.",
    ),
    Chart(
        "Heads with more than 0.3 on the first token",
        "first_token_heads",
        line_for_each="layer",
        from_zero=True,
        note="Share of the layer's heads.",
    ),
    Chart(
        "Largest attention logit by layer",
        "logit_max",
        line_for_each="layer",
        note="Over heads and pairs of query and key.",
    ),
    Chart("Output gate of attention, mean", "gate_mean", line_for_each="layer", from_zero=True),
    Chart(
        "Output gate of attention below 0.1",
        "gate_closed",
        line_for_each="layer",
        from_zero=True,
        note="Share of the gate's entries.",
    ),
    Chart(
        "Largest activation by layer",
        "activation_max",
        line_for_each="layer",
        log_y=True,
        reference_lines=ACTIVATIONS,
        note="max |x| after the layer.",
    ),
    Chart(
        "Largest activation over the median",
        "activation_ratio",
        line_for_each="layer",
        log_y=True,
        reference_lines=MASSIVE,
    ),
)


def evaluation_charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns a chart for each metric of each evaluation in `eval.suites`, except for metrics with
    the unit "count". The quantities of the evaluation NAME have the event kind "suite NAME";
    `run_charts` groups the "suite" events of a run by the names of the evaluations.
    """
    # (evaluation, kind of number) → {name of the number: one of its values}
    measured: dict[tuple[str, str], dict[str, MetricValue]] = {}
    for run in runs:
        for event in run.events_by_kind.get("suite", ()):
            evaluation = evaluation_name_of_event(event)
            for value in metric_values_of_event(event):
                if value.metric.unit != "count":
                    measured.setdefault((evaluation, value.metric_name), {})[value.key] = value
    charts = []
    for (evaluation, _), values in measured.items():
        metric = next(reversed(values.values())).metric
        label_of_all = "all" if len(values) > 1 else ""
        charts.append(
            Chart(
                f"{evaluation}: {metric.title}",
                tuple(
                    Quantity(value.condition_in_key or label_of_all, f"suite {evaluation}", name)
                    for name, value in values.items()
                ),
                from_zero=metric.unit == "share",
                note=f"{metric.better.capitalize()} is better." if metric.better else "",
            )
        )
    return charts


def expand_quantities(chart: Chart, runs: Sequence[Run]) -> list[Quantity]:
    """Returns the quantities of a chart whose `line_for_each` is "quantity". A quantity of each
    depth of multi-token prediction or of each data source becomes one quantity per depth or source
    that the runs have recorded. If a run has evaluated the average of its parameters, a quantity
    with `also_parameter_average` becomes two quantities: one of the parameters, and one of their
    average.
    """
    found = []
    for quantity in chart.quantities:
        if quantity.each_mtp_depth:
            found += [
                quantity._replace(
                    label=quantity.label.format(target=displayed_mtp_depth(depth)),
                    event_field=quantity.event_field.format(depth=depth),
                )
                for depth in _recorded_mtp_depths(runs)
            ]
        elif quantity.each_source:
            found += [
                quantity._replace(
                    label=quantity.label.format(source=source),
                    event_field=quantity.event_field.format(source=source),
                )
                for source in _sources_with_quantity(runs, quantity)
            ]
        elif quantity.also_parameter_average and any(
            "heldout_average" in run.events_by_kind for run in runs
        ):
            found.append(quantity._replace(label="held-out"))
            found.append(quantity._replace(label="held-out, average", event_kind="heldout_average"))
        else:
            found.append(quantity)
    return found


def _sources_with_quantity(runs: Sequence[Run], quantity: Quantity) -> list[str]:
    """Returns the names of the data sources for which any run has recorded the quantity."""
    prefix = quantity.event_field.partition("{")[0]
    names = dict.fromkeys(
        name for run in runs for name in run.field_names(quantity.event_kind, prefix)
    )
    return [name.removeprefix(prefix) for name in names]


def _recorded_mtp_depths(runs: Sequence[Run]) -> list[int]:
    """Returns the depths of multi-token prediction for which any run has recorded a loss."""
    names = {name for run in runs for name in run.field_names("train", "mtp_loss/")}
    depths = {name.removeprefix("mtp_loss/") for name in names}
    return sorted(int(depth) for depth in depths if depth.isdecimal())
