"""The table of the report's charts: one row says a chart's title, its unit, what it shows and when.
`run_charts` draws the rows; docs/reference/metrics.md lists the quantities.
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
    """A number that events of a run record.

    Attributes:
      label: its name in the chart's legend.
      kind: the kind of the events.
      name: its field in these events.
      each_depth: whether each depth of multi-token prediction has such a number. `{depth}` in the
        name then stands for the depth, and `{target}` in the label for the token that it predicts.
      each_source: whether each source of the data has such a number. `{source}` in the name and in
        the label then stands for the source.
      averaged: whether the chart also shows the number of the parameters' moving average
        (train.ema), where a run has measured it.
    """

    label: str
    kind: str
    name: str
    each_depth: bool = False
    each_source: bool = False
    averaged: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A row of the table. A chart is drawn if a run has recorded something that it shows.

    Attributes:
      title: the title, without the unit.
      unit: the unit; "" if the title says it or there is none.
      shows: quantities over steps; or one quantity of "diagnostics" events that each layer has, or
        each group of parameters outside the layers.
      over: the x axis. "layers": steps, with a line for each layer, on a page of one run.
      only_if: whether the page of these runs has the chart at all.
      log: whether the y axis is logarithmic.
      from_zero: whether the y axis starts at 0.
      fit_late: whether the y axis fits only the values after the first steps.
      references: (label, y) of horizontal lines; over steps, at most as many as there are
        quantities.
      note: a sentence under the title.
    """

    title: str
    shows: tuple[Quantity, ...] | str
    unit: str = ""
    over: Literal["steps", "layers", "groups"] = "steps"
    only_if: Callable[[Sequence[Run]], bool] = lambda runs: True
    log: bool = False
    from_zero: bool = False
    fit_late: bool = False
    references: tuple[tuple[str, float], ...] = ()
    note: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def heldout_metric(run: Run) -> str:
    """Returns by which metric the run is judged on held-out rows; "" if it has recorded none."""
    if run.last("heldout", "bits_per_byte") is not None:
        return "bits per byte"
    return "accuracy" if run.last("heldout", "accuracy") is not None else ""


def _some_run_has_no_bits_per_byte(runs: Sequence[Run]) -> bool:
    """Where every run has bits per byte, accuracy says nothing more."""
    return any(heldout_metric(run) == "accuracy" for run in runs)


def _some_run_has_no_mfu(runs: Sequence[Run]) -> bool:
    """Of a chip without a known peak there is no MFU."""
    return any(run.last("train", "mfu") is None for run in runs)


LOSS = (
    Chart(
        "Loss",
        (
            Quantity("training", "train", "loss"),
            Quantity("held-out", "heldout", "loss", averaged=True),
        ),
        unit="nats per token",
        fit_late=True,
        note="Cross-entropy of the next token. A nat is 1.44 bits.",
    ),
    Chart(
        "Held-out bits per byte",
        (Quantity("", "heldout", "bits_per_byte", averaged=True),),
        fit_late=True,
    ),
    Chart(
        "Held-out bits per byte by source",
        (Quantity("{source}", "heldout", "bits_per_byte/{source}", each_source=True),),
        fit_late=True,
        note="Rows of each source of the data by themselves.",
    ),
    Chart(
        "Held-out loss by source",
        (Quantity("{source}", "heldout", "loss/{source}", each_source=True),),
        unit="nats per token",
        fit_late=True,
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
        (Quantity("", "heldout", "accuracy", averaged=True),),
        only_if=_some_run_has_no_bits_per_byte,
    ),
    Chart(
        "MTP loss",
        (Quantity("{target}", "train", "mtp_loss/{depth}", each_depth=True),),
        unit="nats per token",
        fit_late=True,
        note="Of the token after the next (t+2) and of later ones.",
    ),
    Chart(
        "MTP drafts accepted, held-out text",
        (Quantity("{target}", "heldout", "mtp_acceptance/{depth}", each_depth=True),),
        from_zero=True,
        references=ACCEPTANCE,
        note="Share of positions at which the drafted token is the one that the model itself finds "
        "most likely. A draft of t+3 counts only where the draft of t+2 is right as well.",
    ),
    Chart(
        "Accuracy in training",
        (
            Quantity("next token, t+1", "train", "top1"),
            Quantity("MTP {target}", "train", "mtp_top1/{depth}", each_depth=True),
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
        fit_late=True,
        references=PERFECT_BALANCE,
    ),
)

OPTIMISATION = (
    Chart("Gradient norm, before clipping", (Quantity("", "train", "grad_norm"),), log=True),
    Chart("Learning rate", (Quantity("", "train", "learning_rate"),), from_zero=True),
    Chart("Gradient norm by layer", "grad_norm", over="layers", log=True),
    Chart("Parameter norm by layer", "param_norm", over="layers"),
    Chart(
        "Largest norm weight by layer",
        "norm_weight_max",
        over="layers",
        note="max |w| of the layer's norms; most of them start at 0.",
    ),
    Chart("Gradient norm outside the layers", "grad_norm", over="groups", log=True),
    Chart("Parameter norm outside the layers", "param_norm", over="groups", log=True),
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
        over="layers",
        from_zero=True,
        note="Experts that no token of the batch chose.",
    ),
    Chart("Load: coefficient of variation by layer", "load_cv", over="layers", from_zero=True),
    Chart(
        "Load: largest violation by layer",
        "load_max_violation",
        over="layers",
        from_zero=True,
        note="Busiest expert's load over the mean, less 1.",
    ),
    Chart(
        "Router entropy by layer",
        "router_entropy",
        over="layers",
        note="Of a token's probabilities, over ln E: 1 is undecided, 0 is certain.",
    ),
    Chart("Router z by layer", "router_z", over="layers", note="Mean of logsumexp(logits)²."),
)

RECURRENT_LAYERS = (
    Chart(
        "Decay half-life by layer",
        "half_life",
        unit="tokens",
        over="layers",
        log=True,
        note="−ln 2 / mean g; geometric mean over heads.",
    ),
    Chart("Longest half-life of a head", "half_life_max", unit="tokens", over="layers", log=True),
    Chart("Write strength β by layer", "beta", over="layers", note="Mean over tokens and heads."),
    Chart(
        "State norm by layer",
        "state_norm",
        over="layers",
        log=True,
        note="‖S‖ (Frobenius) after the last token, mean over rows and heads.",
    ),
)

ATTENTION = (
    Chart(
        "Attention on the first token",
        "first_token_share",
        over="layers",
        from_zero=True,
        references=SINKS,
        note="Mean over heads and over the queries after it.",
    ),
    Chart(
        "Heads with more than 0.3 on the first token",
        "first_token_heads",
        over="layers",
        from_zero=True,
        note="Share of the layer's heads.",
    ),
    Chart(
        "Largest attention logit by layer",
        "logit_max",
        over="layers",
        note="Over heads and pairs of query and key.",
    ),
    Chart("Output gate of attention, mean", "gate_mean", over="layers", from_zero=True),
    Chart(
        "Output gate of attention below 0.1",
        "gate_closed",
        over="layers",
        from_zero=True,
        note="Share of the gate's entries.",
    ),
    Chart(
        "Largest activation by layer",
        "activation_max",
        over="layers",
        log=True,
        references=ACTIVATIONS,
        note="max |x| after the layer.",
    ),
    Chart(
        "Largest activation over the median",
        "activation_ratio",
        over="layers",
        log=True,
        references=MASSIVE,
    ),
)


def evaluation_charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns a row for each metric of each evaluation in `eval.suites`, except for metrics with
    the unit "count". Its quantities are of events of the kind "suite NAME", which `Run.series` has
    after `run_charts.with_events_by_evaluation`.
    """
    # (evaluation, kind of number) → {name of the number: one of its values}
    measured: dict[tuple[str, str], dict[str, MetricValue]] = {}
    for run in runs:
        for event in run.events.get("suite", ()):
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


def shown_quantities(chart: Chart, runs: Sequence[Run]) -> list[Quantity]:
    """Returns the quantities of a chart over steps: those of its row, with one for each depth of
    multi-token prediction, for each source of the data, and for the average of the parameters where
    the runs have them.
    """
    found = []
    for quantity in chart.shows:
        if quantity.each_depth:
            found += [
                quantity._replace(
                    label=quantity.label.format(target=displayed_mtp_depth(depth)),
                    name=quantity.name.format(depth=depth),
                )
                for depth in _mtp_depths(runs)
            ]
        elif quantity.each_source:
            found += [
                quantity._replace(
                    label=quantity.label.format(source=source),
                    name=quantity.name.format(source=source),
                )
                for source in _source_names(runs, quantity)
            ]
        elif quantity.averaged and any("heldout_average" in run.events for run in runs):
            found.append(quantity._replace(label="held-out"))
            found.append(quantity._replace(label="held-out, average", kind="heldout_average"))
        else:
            found.append(quantity)
    return found


def _source_names(runs: Sequence[Run], quantity: Quantity) -> list[str]:
    """Returns the sources of which a run has recorded the quantity."""
    prefix = quantity.name.partition("{")[0]
    names = dict.fromkeys(name for run in runs for name in run.names(quantity.kind, prefix))
    return [name.removeprefix(prefix) for name in names]


def _mtp_depths(runs: Sequence[Run]) -> list[int]:
    """Returns the depths of multi-token prediction at which a run has recorded a loss."""
    names = {name for run in runs for name in run.names("train", "mtp_loss/")}
    depths = {name.removeprefix("mtp_loss/") for name in names}
    return sorted(int(depth) for depth in depths if depth.isdecimal())
