"""The effective speed-up: one number that says how much compute a change of the model or of its
training saves.

A comparison has two arms: the baseline, and the arm with the change. Each arm was trained several
times with different budgets C of compute, which are numbers of steps, of FLOPs, or of seconds. A
law is fitted to the losses of each arm:

    L(C) = E + A / C^α                                   so C(ℓ) = (A / (ℓ - E))^(1/α)
    ℓ = max(L_baseline(largest budget), L_arm(largest budget))
    speed-up = C_baseline(ℓ) / C_arm(ℓ)

ℓ is the loss of the worse arm at its largest budget. The speed-up is the compute that the baseline
needs to reach ℓ, divided by the compute that the arm with the change needs. A speed-up of 2 means
half the compute; a number below 1 means that the change slows training down. The better arm reaches
ℓ between its own budgets, so no law is used beyond the budgets that were trained. The paper
2509.02046 inverts the baseline's law at the final loss of the other arm, which lies beyond the
baseline's budgets. If a constant factor of compute turns the law of one arm into the law of the
other, the definition of 2509.02046 and the definition here give the same speed-up at every loss.

The interval over seeds reaches from the lowest to the highest speed-up among all pairs (seed of the
baseline, seed of the arm). If noise moves the log of the compute, with the same distribution in
both arms, the interval misses the true speed-up only if the noise of every seed of one arm is
larger than the noise of every seed of the other arm. With n seeds of one arm and m seeds of the
other, the interval misses the true speed-up with the probability 2 n! m! / (n + m)!: 1/3 for two
seeds of each arm, 1/10 for three, and 1/35 for four.

Letters: S seeds, B budgets.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, join_first, require
from qwen3next_jax.common.events import training_devices
from qwen3next_jax.reporting.charts import Line, line_chart, table_html
from qwen3next_jax.reporting.runs import Run, incomparable_reasons

# unit of a budget → its name for readers
UNITS = {"steps": "steps", "flops": "FLOPs", "seconds": "wall time"}
LEAST_BUDGETS = 3  # the law has three constants
# A law is refused if the distance of the losses from it is worth more than this factor of compute.
LARGEST_MISFIT = 2.0
_EXPONENTS = (0.01, 3.0)  # the smallest and the largest α
# Two losses that differ by less than this share are equal: results.json has five digits.
_SAME_LOSS = 1e-5
_SAME_RATE = 1e-6  # two learning rates that differ by less than this share are equal
_SMALLEST = 1e-30
_CURVE_POINTS = 48


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
      name: the name of the arm.
      losses: [S, B], the loss at the end of every budget.
      budgets_by_unit: unit → [S, B], the budgets in this unit, which is a key of UNITS. A unit that
        was not measured is absent from `budgets_by_unit`, or its budgets are NaN.
      device_names: the devices on which the arm was trained, such as {"8 × TPU v5"}.
    """

    name: str
    losses: np.ndarray
    budgets_by_unit: Mapping[str, np.ndarray]
    device_names: frozenset[str] = frozenset()


class Law(NamedTuple):
    """L(C) = E + A / C^α, fitted to the losses at several budgets.

    Attributes:
      e, a, alpha: E, A and α.
      smallest_budget, largest_budget: the smallest and the largest budget of the fit.
      residual: the distance of the losses from the law, in the unit of the loss: the root of the
        sum of squared residuals divided by max(B - 3, 1). With three budgets, the residual is 0 if
        a law exists that meets the three losses exactly.
    """

    e: float
    a: float
    alpha: float
    smallest_budget: float
    largest_budget: float
    residual: float

    def __call__(self, budget):
        """Returns the losses at the budgets in `budget`, in the shape of `budget`."""
        return self.e + self.a / np.asarray(budget) ** self.alpha

    def budget_for_loss(self, loss: float) -> float:
        """Returns the budget with which the law reaches `loss`. If `loss` is less than the loss at
        the largest budget, returns the largest budget.
        """
        if loss <= self(self.largest_budget):
            return self.largest_budget
        return (self.a / (loss - self.e)) ** (1 / self.alpha)

    def misfit_as_compute_factor(self, budget: float) -> float:
        """Returns the factor by which the compute must grow so that the loss at `budget` falls by
        `residual`: exp(residual / s) with the slope s = -dL / d log C = α A / C^α. The factor is
        infinite if the loss does not fall at `budget`.
        """
        slope = self.alpha * self.a / budget**self.alpha
        if slope <= _SAME_LOSS * self(budget):
            return math.inf
        return math.exp(min(self.residual / slope, 100.0))


class SpeedUp(NamedTuple):
    """The effective speed-up of an arm over its baseline, in one unit of compute.

    Attributes:
      factor: the speed-up, from the laws that are fitted to the means over seeds.
      low, high: the interval over seeds; None if both arms have one seed. If a pair of seeds
        reaches no common loss between its budgets, `low` is 0 or `high` is infinite.
      seeds: the number of seeds of the baseline, and that of the arm.
      loss: ℓ, the loss at which the compute of the arms is compared.
      misfit: the larger `Law.misfit_as_compute_factor` of the two laws; None if both laws have
        three budgets and meet their losses exactly.
    """

    factor: float
    low: float | None
    high: float | None
    seeds: tuple[int, int]
    loss: float
    misfit: float | None

    def __str__(self) -> str:
        """Returns the factor as text, such as "1.43", or "1.43 (1.31 to 1.58)" if there is an
        interval over seeds.
        """
        if self.low is None:
            return f"{self.factor:.3g}"
        if self.low == 0 and self.high == math.inf:
            return f"{self.factor:.3g} (no bound)"
        if self.high == math.inf:
            return f"{self.factor:.3g} ({self.low:.3g} or more)"
        if self.low == 0:
            return f"{self.factor:.3g} ({self.high:.3g} or less)"
        return f"{self.factor:.3g} ({self.low:.3g} to {self.high:.3g})"


class Comparison(NamedTuple):
    """The speed-up of one arm over its baseline, in every unit of compute.

    Attributes:
      arm_name, baseline_name: the names of the arm and of the baseline.
      speed_ups_by_unit: unit → the speed-up, or a sentence that says why there is none.
    """

    arm_name: str
    baseline_name: str
    speed_ups_by_unit: dict[str, SpeedUp | str]


def fit_law(budgets: np.ndarray, losses: np.ndarray) -> Law:
    """Fits L(C) = E + A / C^α with the least squared residuals, E ≥ 0, A ≥ 0 and α in `_EXPONENTS`.

    For a given α, the best E and A solve a linear problem, so only α is searched: on a grid, and
    then on ever finer grids around its best value.

    Args:
      budgets: [B], positive.
      losses: [B], positive.
    """
    high = float(budgets.max())
    log_budgets = np.log(budgets / high)
    alphas = np.geomspace(*_EXPONENTS, 61)
    for _ in range(9):  # each grid is ten times as fine as the one before it
        e, a, squares = _fit_e_and_a_per_exponent(np.exp(-alphas[:, None] * log_budgets), losses)
        i = int(squares.argmin())
        best = Law(
            e=float(e[i]),
            a=float(a[i] * high ** alphas[i]),
            alpha=float(alphas[i]),
            smallest_budget=float(budgets.min()),
            largest_budget=high,
            residual=math.sqrt(squares[i] / max(len(budgets) - LEAST_BUDGETS, 1)),
        )
        alphas = np.geomspace(alphas[max(i - 1, 0)], alphas[min(i + 1, len(alphas) - 1)], 21)
    return best


def _fit_e_and_a_per_exponent(
    powers: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three arrays [exponents]: the E ≥ 0 and the A ≥ 0 for which E + A · powers is closest
    to the losses, and the sum of the squared residuals.

    Args:
      powers: [exponents, B], 1 / C^α.
      losses: [B].
    """
    x = powers - powers.mean(axis=1, keepdims=True)
    a = np.maximum(x @ losses / np.square(x).sum(axis=1), 0.0)
    e = losses.mean() - a * powers.mean(axis=1)
    through_zero = powers @ losses / np.square(powers).sum(axis=1)
    e, a = np.maximum(e, 0.0), np.where(e < 0, through_zero, a)
    residuals = e[:, None] + a[:, None] * powers - losses
    return e, a, np.square(residuals).sum(axis=1)


def speed_up(baseline: Arm, arm: Arm, unit: str) -> SpeedUp:
    """Returns the effective speed-up of `arm` over `baseline`.

    Args:
      unit: the unit of compute, a key of `UNITS`.

    Raises:
      UserError: the losses do not determine a speed-up: an arm has too few budgets, its losses do
        not fall or do not follow the law, the arms trained on different devices (unit "seconds"),
        or they reach no common loss between their budgets.
    """
    for one in (baseline, arm):
        _check_budgets(one, unit)
    if unit == "seconds":
        devices = baseline.device_names | arm.device_names
        require(
            len(devices) <= 1,
            f"{baseline.name} and {arm.name} trained on different devices "
            f"({', '.join(sorted(devices))}), so their wall times do not compare: train both on "
            "the same",
        )
    laws = [
        fit_law(one.budgets_by_unit[unit].mean(axis=0), one.losses.mean(axis=0))
        for one in (baseline, arm)
    ]
    loss = _common_loss(*laws)
    misfits = [
        law.misfit_as_compute_factor(max(law.budget_for_loss(loss), law.smallest_budget))
        for law in laws
    ]
    for one, misfit in zip((baseline, arm), misfits, strict=True):
        require(
            misfit < math.inf,
            f"{one.name}: its loss does not fall with the {UNITS[unit]}, so a loss tells no "
            "compute: add budgets at which it falls",
        )
        require(
            misfit <= LARGEST_MISFIT,
            f"{one.name}: its losses are as far from the law E + A / C^α as a factor of "
            f"{misfit:.2g} of {UNITS[unit]}; expected at most {LARGEST_MISFIT:g}: add seeds, or "
            "leave out budgets at which training was unstable",
        )
    factor = _budget_ratio(*laws)
    if not 0 < factor < math.inf:
        better, worse = (arm, baseline) if factor else (baseline, arm)
        ahead, behind = laws[::-1] if factor else laws
        raise UserError(
            f"{better.name} is below the lowest loss of {worse.name} at its smallest budget, so "
            f"it is more than {behind.largest_budget / ahead.smallest_budget:.3g} times as fast by "
            f"{UNITS[unit]}, and no budget says by how much: give {better.name} smaller budgets, "
            f"or {worse.name} larger"
        )
    low, high = _speed_up_interval(baseline, arm, unit, factor)
    exact = all(
        len(one.losses[0]) == LEAST_BUDGETS and law.residual <= _SAME_LOSS * law(law.largest_budget)
        for one, law in zip((baseline, arm), laws, strict=True)
    )
    return SpeedUp(
        factor=factor,
        low=low,
        high=high,
        seeds=(len(baseline.losses), len(arm.losses)),
        loss=loss,
        misfit=None if exact else max(misfits),
    )


def _check_budgets(arm: Arm, unit: str) -> None:
    """Raises UserError if an arm has too few budgets or losses to fit a law, or budgets that were
    not recorded in `unit`.
    """
    require(
        len(arm.losses) > 0,
        f"{arm.name}: no seed is done at all of its {arm.losses.shape[1]} budgets: let the points "
        "finish, or leave out the budgets at which they failed",
    )
    require(
        np.isfinite(arm.budgets_by_unit.get(unit, math.nan)).all(),
        f"{arm.name}: its {UNITS[unit]} was not recorded at every budget",
    )
    budgets = sorted({float(f"{budget:.6g}") for budget in arm.budgets_by_unit[unit].mean(axis=0)})
    shown = join_first((f"{budget:g}" for budget in budgets), 3)
    require(
        len(budgets) >= LEAST_BUDGETS,
        f"{arm.name}: {len(budgets)} {'budget' if len(budgets) == 1 else 'budgets'} of "
        f"{UNITS[unit]} ({shown}): expected at least {LEAST_BUDGETS}, as the law E + A / C^α has "
        'three constants: train more budgets, such as by an axis "flops" of a sweep',
    )


def _common_loss(baseline: Law, arm: Law) -> float:
    """Returns ℓ, the loss of the worse arm at its largest budget."""
    return float(max(baseline(baseline.largest_budget), arm(arm.largest_budget)))


def _budget_ratio(baseline: Law, arm: Law) -> float:
    """Returns C_baseline(ℓ) / C_arm(ℓ). The ratio is infinite if the arm reaches ℓ below its
    smallest budget, and 0 if the baseline reaches ℓ below its smallest budget.
    """
    loss = _common_loss(baseline, arm)
    baseline_budget, arm_budget = baseline.budget_for_loss(loss), arm.budget_for_loss(loss)
    if arm_budget < arm.smallest_budget:
        return math.inf
    return baseline_budget / arm_budget if baseline_budget >= baseline.smallest_budget else 0.0


def _speed_up_interval(
    baseline: Arm, arm: Arm, unit: str, factor: float
) -> tuple[float, float] | tuple[None, None]:
    """Returns the lowest and the highest number among `factor` and the speed-ups of all pairs of
    seeds; (None, None) if both arms have one seed. If the loss of a seed does not fall with the
    budget, the interval reaches from 0 to infinity.
    """
    if len(baseline.losses) == len(arm.losses) == 1:
        return None, None
    laws_by_arm = [
        [fit_law(*seed) for seed in zip(one.budgets_by_unit[unit], one.losses, strict=True)]
        for one in (baseline, arm)
    ]
    if any(
        law.misfit_as_compute_factor(law.smallest_budget) == math.inf
        for laws in laws_by_arm
        for law in laws
    ):
        return 0.0, math.inf
    ratios = [_budget_ratio(*pair) for pair in itertools.product(*laws_by_arm)]
    return min(factor, *ratios), max(factor, *ratios)


def interval_confidence(seeds: tuple[int, int]) -> float:
    """Returns the probability with which the interval over seeds holds the true speed-up, if both
    arms have the same noise. `seeds`: the number of seeds of each arm.
    """
    return 1 - 2 / math.comb(sum(seeds), seeds[0])


def compare_in_every_unit(baseline: Arm, arm: Arm) -> Comparison:
    """Returns, for every unit of compute, the speed-up of `arm` over `baseline`, or the reason why
    there is no speed-up.
    """
    found: dict[str, SpeedUp | str] = {}
    for unit in UNITS:
        try:
            found[unit] = speed_up(baseline, arm, unit)
        except UserError as error:
            found[unit] = str(error)
    return Comparison(arm.name, baseline.name, found)


# ---- Two runs


def arms_of_runs(baseline: Run, run: Run) -> tuple[str, Arm, Arm]:
    """Makes the arms of two runs, with one seed each.

    The budgets are the steps of the held-out evaluations at which the run has its highest learning
    rate. At another learning rate, the loss in the middle of a run is not the final loss of a
    shorter run.

    Returns:
      The name of the losses for readers, the arm of `baseline`, and the arm of `run`.

    Raises:
      UserError: the runs cannot be compared, or a run has too few held-out evaluations at its
        highest learning rate.
    """
    reasons = incomparable_reasons((baseline, run))
    metric, title = "bits_per_byte", "Held-out bits per byte"
    if any(one.newest_value("heldout", metric) is None for one in (baseline, run)):
        metric, title = "loss", "Held-out loss, nats per token"
    else:
        reasons.pop("tokenizer", None)  # bits per byte compare whatever the tokenizer
    for reason in reasons.values():
        raise UserError(reason.full_sentence.removesuffix("."))
    return title, _arm_of_run(baseline, metric), _arm_of_run(run, metric)


def speed_up_sentence_of_runs(baseline: Run, run: Run) -> str:
    """Returns one sentence: the speed-up of `run` over `baseline`, or the reason why there is no
    speed-up.
    """
    try:
        _, *arms = arms_of_runs(baseline, run)
    except UserError as error:
        return _no_speed_up_sentence(run.name, baseline.name, str(error))
    return speed_up_sentence(compare_in_every_unit(*arms))


def _arm_of_run(run: Run, metric: str) -> Arm:
    """Returns the arm of a run. The arm has one seed; its losses are the values of the field
    `metric` of the run's "heldout" events.
    """
    train = [event for event in run.events_by_kind.get("train", ()) if _has_learning_rate(event)]
    rates = np.array([event["learning_rate"] for event in train], float)
    steps = np.array([event["step"] for event in train])
    evaluated = [
        event
        for event in run.events_by_kind.get("heldout", ())
        if _has_positive_numbers(event, metric)
    ]
    chosen = []
    for event in evaluated:
        # The rate may fall between two train events, so those on both sides have to have the peak.
        before = int(np.searchsorted(steps, event["step"], side="right")) - 1
        after = int(np.searchsorted(steps, event["step"], side="left"))
        if before < 0 or after == len(steps):
            continue
        if min(rates[before], rates[after]) >= (1 - _SAME_RATE) * rates.max() > 0:
            chosen.append(event)
    require(
        len({event["step"] for event in chosen}) >= LEAST_BUDGETS,
        f"{run.name}: {len(chosen)} of {len(evaluated)} held-out evaluations are at its highest "
        f"learning rate; expected at least {LEAST_BUDGETS}, as under a learning rate that falls a "
        "loss in the middle of a run is not the loss of a shorter run: train both runs with "
        'optimizer.schedule=constant, or compare them in a sweep with an axis "flops"',
    )
    require(
        len(run.events_by_kind.get("stage", ())) < 2,
        f"{run.name}: it has several stages, whose losses follow no common law: compare the runs "
        'in a sweep with an axis "flops"',
    )
    at = np.array([[event["step"] for event in chosen]], float)
    spent = {"steps": at}
    for unit, of_step in (
        ("flops", _median_flops_per_step(train)),
        ("seconds", _median_seconds_per_step(train)),
    ):
        if of_step:
            spent[unit] = at * of_step
    return Arm(
        run.name,
        np.array([[event[metric] for event in chosen]], float),
        spent,
        training_devices(run.all_events),
    )


def _has_learning_rate(event: Mapping) -> bool:
    """Whether the event has a learning rate, which may be 0."""
    return event.get("learning_rate") == 0 or _has_positive_numbers(event, "learning_rate")


def _has_positive_numbers(event: Mapping, *names: str) -> bool:
    """Whether each of the fields `names` of the event holds a positive number from 1e-30 to 1e30,
    which float64 can square without overflow.
    """
    return all(
        isinstance(event.get(name), (int, float)) and _SMALLEST < event[name] < 1 / _SMALLEST
        for name in names
    )


def _median_seconds_per_step(train: Sequence[Mapping]) -> float | None:
    """Returns the median over "train" events of the seconds of one step; None if no event records
    seconds.
    """
    values = [
        e["seconds"] / e["steps"] for e in train if _has_positive_numbers(e, "seconds", "steps")
    ]
    return float(np.median(values)) if values else None


def _median_flops_per_step(train: Sequence[Mapping]) -> float | None:
    names = "model_flops_per_second", "seconds", "steps"
    values = [
        e[names[0]] * e["seconds"] / e["steps"] for e in train if _has_positive_numbers(e, *names)
    ]
    return float(np.median(values)) if values else None


# ---- For readers


def speed_up_sentence(comparison: Comparison) -> str:
    """Returns one sentence: the speed-up, or the reason why there is no speed-up."""
    told = {
        u: found for u, found in comparison.speed_ups_by_unit.items() if isinstance(found, SpeedUp)
    }
    refused = dict.fromkeys(
        found for found in comparison.speed_ups_by_unit.values() if isinstance(found, str)
    )
    if not told:
        return _no_speed_up_sentence(
            comparison.arm_name, comparison.baseline_name, next(iter(refused))
        )
    factors = ", ".join(f"{found} by {UNITS[unit]}" for unit, found in told.items())
    first = next(iter(told.values()))
    seeds = " (one seed: no interval)"
    if first.low is not None:
        seeds = f" ({first.seeds[0]} and {first.seeds[1]} seeds)"
    return (
        f"Effective speed-up of {comparison.arm_name} over {comparison.baseline_name}: "
        f"{factors}{seeds}." + "".join(f" {text}." for text in refused)
    )


def _no_speed_up_sentence(arm: str, baseline: str, reason: str) -> str:
    return f"No effective speed-up of {arm} over {baseline}: {reason}."


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as a dict that JSON can represent: infinite numbers become text."""
    return {
        "arm": comparison.arm_name,
        "baseline": comparison.baseline_name,
        **{
            unit: found if isinstance(found, str) else _infinity_as_text(found._asdict())
            for unit, found in comparison.speed_ups_by_unit.items()
        },
    }


def _infinity_as_text(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(v) if v == math.inf else v for name, v in values.items()}


def comparisons_html(comparisons: Sequence[Comparison]) -> str:
    """Returns HTML: a paragraph that says how to read a speed-up, a table with a row for each
    comparison, and a list of the reasons why speed-ups are missing.
    """
    told = [
        found
        for c in comparisons
        for found in c.speed_ups_by_unit.values()
        if isinstance(found, SpeedUp)
    ]
    parts = []
    if told:
        parts.append(f"<p>{html.escape(_how_to_read_text(told))}</p>")
        head = [
            "",
            "baseline",
            *(f"by {name}" for name in UNITS.values()),
            "at a loss of",
            "misfit",
        ]
        parts.append(table_html(head, [_comparison_row(c) for c in comparisons], numeric=True))
    reasons = dict.fromkeys(
        f"No effective speed-up of {c.arm_name} over {c.baseline_name}"
        f"{'' if _same_refusal_in_all_units(c) else f' by {UNITS[unit]}'}: {found}."
        for c in comparisons
        for unit, found in c.speed_ups_by_unit.items()
        if isinstance(found, str)
    )
    listed = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    return "".join(parts) + (f"<ul>{listed}</ul>" if listed else "")


def _same_refusal_in_all_units(comparison: Comparison) -> bool:
    return len(set(map(str, comparison.speed_ups_by_unit.values()))) == 1


def _how_to_read_text(told: Sequence[SpeedUp]) -> str:
    text = (
        "The compute of the baseline over the compute of the row, at the same loss: at 2 the row "
        "needs half the compute, below 1 it needs more. Both are read from the fitted laws "
        "E + A / C^α, at the lowest loss that both reach."
    )
    seeds = sorted({found.seeds for found in told if found.low is not None})
    if seeds:
        chances = join_first(
            (
                f"{interval_confidence((n, m)):.0%} of cases with {n} and {m} seeds"
                for n, m in seeds
            ),
            3,
        )
        text += (
            " In brackets: the lowest and the highest over pairs of a seed of each. If both have "
            f"the same noise, this interval holds the true speed-up in {chances}."
        )
    if any(found.low is None for found in told):
        text += " One seed has no interval: differences may be chance."
    if any(found.misfit for found in told):
        text += (
            " Misfit: the distance of the losses from the law, as a factor of compute, for each "
            "unit where they differ. A speed-up that is nearer to 1 than its misfit says nothing."
        )
    return text


def _comparison_row(comparison: Comparison) -> list[str]:
    told = [found for found in comparison.speed_ups_by_unit.values() if isinstance(found, SpeedUp)]
    misfits = [f"{f.misfit:.3g}" if f.misfit else "–" for f in told]
    return [
        comparison.arm_name,
        comparison.baseline_name,
        *(
            "–" if isinstance(found, str) else str(found)
            for found in comparison.speed_ups_by_unit.values()
        ),
        f"{told[0].loss:.4g}" if told else "–",
        " · ".join(misfits) if len(set(misfits)) > 1 else next(iter(misfits), "–"),
    ]


def law_chart(title: str, arms: Sequence[Arm], where: str = "") -> str:
    """Returns a chart over FLOPs of the losses and the law of each arm that has enough budgets; ""
    if no arm has enough. `where` ends the note of the chart: "Dots were measured{where}".
    """
    lines, unit = [], "flops"
    for i, arm in enumerate(arms):
        try:
            _check_budgets(arm, unit)
        except UserError:
            continue
        budgets, losses = arm.budgets_by_unit[unit].mean(axis=0), arm.losses.mean(axis=0)
        law = fit_law(budgets, losses)
        at = np.geomspace(law.smallest_budget, law.largest_budget, _CURVE_POINTS)
        lines.append(Line(arm.name, at, law(at), colour_index=i))
        order = np.argsort(arm.budgets_by_unit[unit], axis=None, kind="stable")
        points = arm.budgets_by_unit[unit].ravel()[order], arm.losses.ravel()[order]
        lines.append(Line("", *points, colour_index=i, dots=True, joined=False))
    if not lines:
        return ""
    note = f"Dots were measured{where}; lines are the fitted laws E + A / C^α."
    return line_chart(title, lines, x_label=UNITS[unit], log_y=True, log_x=True, note=note)
