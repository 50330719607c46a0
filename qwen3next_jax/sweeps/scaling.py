"""Fits loss against the size of the model and the number of training tokens, over the runs of
sweeps, and predicts runs from it. Nothing here trains.

    L(N, D) = E + A / N^α + B / D^β                      (Hoffmann et al., 2203.15556, approach 3)

N is the size of the model, D the number of training tokens, L the held-out loss. E is the loss that
no size and no number of tokens gets below. C is the number of FLOPs of a run, counted exactly by
`model.flops`; the approximation C = 6 N D is not used.

Letters: n runs, P = 5 constants (log E, log A, log B, α, β).
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, minimize_scalar, nnls
from scipy.special import logsumexp

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, did_you_mean, require, short_repr

CONSTANTS = ("E", "A", "B", "α", "β")
# Residuals of log L above this are outliers: they count linearly, not quadratically (2203.15556).
HUBER_DELTA = 1e-3
CONFIDENCE = 0.95
# A constant counts as determined if the upper end of its interval is at most this many times the
# lower end.
DETERMINED = 2.0
# Runs whose FLOPs differ by less than this share have the same budget: a budget is met to the
# nearest step.
SAME_BUDGET = 0.05
_LARGEST_EXPONENT = 3.0
# The smallest number that a run may have, and 1 over the largest: far outside of what is measured,
# and far inside of what float64 can square and multiply.
_SMALLEST = 1e-30
_START_EXPONENTS = (0.1, 0.25, 0.5, 1.0, 2.0)
_STARTS = 6  # how many of the combinations of start exponents are optimised
_EXTRAPOLATED = 10.0  # how far beyond the measured sizes an optimum is searched


class ScalingRun(NamedTuple):
    """One run, as a fit sees it.

    Attributes:
      name: its name in the sweep.
      size: the size of the model, N.
      tokens: the number of training tokens, D.
      flops: the number of FLOPs of the whole run, C.
      loss: the metric after the last step, L.
    """

    name: str
    size: float
    tokens: float
    flops: float
    loss: float


@dataclasses.dataclass(frozen=True)
class LossFit:
    """The constants of L(N, D) = E + A / N^α + B / D^β, in the order of `CONSTANTS`."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def __call__(self, size, tokens):
        """Returns the loss at sizes and numbers of tokens, which broadcast."""
        return self.e + self.a / size**self.alpha + self.b / tokens**self.beta

    @property
    def constants(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)


class Interval(NamedTuple):
    """A value, and the ends of its bootstrap interval (`CONFIDENCE`)."""

    value: float
    low: float
    high: float

    @property
    def is_determined(self) -> bool:
        """Whether the data tell the value, which is positive, up to the factor `DETERMINED`."""
        return 0 < self.low and self.high <= DETERMINED * self.low


class Optimum(NamedTuple):
    """The best use of `flops` FLOPs: the size, the number of tokens, and the loss.

    `at_end` is true if the size is the smallest or the largest that was searched: by the fit, ever
    smaller or ever larger models are better, and there is no best size.
    """

    flops: float
    size: Interval
    tokens: Interval
    loss: Interval
    at_end: bool


class Prediction(NamedTuple):
    """The loss of a run that the fit has not seen. `interval` holds the predicted loss."""

    run: ScalingRun
    interval: Interval

    @property
    def error(self) -> float:
        """The predicted loss over the measured loss, minus 1."""
        return self.interval.value / self.run.loss - 1


class Parabola(NamedTuple):
    """The loss over log N at one budget, c₀ + c₁ x + c₂ x² with x = log(N / centre).

    Attributes:
      flops: the budget, the mean of the runs'.
      runs: the runs of this budget, by size.
      centre: the mean of the runs' sizes (geometric).
      coefficients: c₂, c₁, c₀.
    """

    flops: float
    runs: tuple[ScalingRun, ...]
    centre: float
    coefficients: tuple[float, float, float]

    def __call__(self, size):
        return np.polyval(self.coefficients, np.log(np.asarray(size) / self.centre))

    @property
    def minimum(self) -> float:
        """The size at the minimum; NaN if the parabola has none."""
        c2, c1, _ = self.coefficients
        return self.centre * math.exp(-c1 / (2 * c2)) if c2 > 0 else math.nan

    @property
    def best_size(self) -> float:
        """The size with the lowest loss. NaN if the minimum is not between the sizes of the runs,
        where the runs do not tell it.
        """
        size = self.minimum
        return size if self.runs[0].size <= size <= self.runs[-1].size else math.nan


class IsoFlop(NamedTuple):
    """IsoFLOP parabolas (2203.15556, approach 2).

    Attributes:
      parabolas: one for each budget with at least three sizes, by budget.
      exponent: a of the line N = G C^a through the minima; None if fewer than two budgets have one.
      factor: G of this line; NaN if there is none.
    """

    parabolas: tuple[Parabola, ...]
    exponent: Interval | None
    factor: float


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a set of runs says about scaling.

    Attributes:
      runs: the runs.
      fit: the fit of the loss.
      intervals: name of a constant → its interval.
      resampled: fits of resampled data, from which the intervals are.
      optima: the best use of some budgets: that of the largest run, and 10 and 100 times as much.
      exponent: a of N_optimal ∝ C^a around the budget of the largest run, by the fit.
      iso_flop: the isoFLOP parabolas.
      predictions: the name of a group of held-out runs → the predictions of these runs from the
        other runs, or why there are none.
    """

    runs: tuple[ScalingRun, ...]
    fit: LossFit
    intervals: dict[str, Interval]
    resampled: tuple[LossFit, ...]
    optima: tuple[Optimum, ...]
    exponent: Interval
    iso_flop: IsoFlop
    predictions: dict[str, tuple[Prediction, ...] | str]


def read_runs(
    paths: Sequence[pathlib.Path], metric: str = "heldout loss", size: str = "parameters"
) -> tuple[ScalingRun, ...]:
    """Reads the runs of sweeps. Runs that differ only in `train.seed` are separate runs.

    Args:
      paths: folders of sweeps, or files results.json.
      metric: the metric to fit, as results.json calls it.
      size: what N counts. "parameters": all parameters. "flops": FLOPs per token / 6, the
        parameters that a token uses, if attention and the recurrence counted as parameters; then
        C = 6 N D.

    Raises:
      UserError: a file cannot be read; a run has no such metric, or no count of parameters, tokens
        or FLOPs; or the paths hold a run twice.
    """
    runs: list[ScalingRun] = []
    for path, record in map(_read_results, paths):
        for point in record["points"]:
            run = _read_run(point, metric, size, path)
            require(
                run not in runs,
                f"{path}: point {run.name} is there twice, with the same loss: as two runs it "
                "would make the intervals too narrow: give every sweep once",
            )
            runs.append(run)
    return tuple(runs)


def missing_points(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns a sentence for each sweep with missing points, which failed or are not done.
    `read_runs` explains the arguments and errors.
    """
    sentences = []
    for path, record in map(_read_results, paths):
        axes = record.get("axes", {}).values()
        count, done = math.prod(map(len, axes)), len(record["points"])
        if axes and done < count:
            sentences.append(
                f"{path}: {count - done} of {count} points failed or are not done: the fit is "
                "without them"
            )
    return sentences


def _read_results(given: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Returns the path and the content of the results.json of a sweep."""
    path = given / "results.json" if given.is_dir() else given
    try:
        record = json_files.read(path)
        points = record["points"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read as the results of a sweep: expected the folder of a sweep "
            "(runs/sweeps/NAME), or its results.json"
        ) from error
    require(
        isinstance(points, list) and all(isinstance(point, dict) for point in points),
        f"{path}: points: expected a list of objects",
    )
    return path, record


def _read_run(point: dict[str, Any], metric: str, size: str, path: pathlib.Path) -> ScalingRun:
    where = f"{path}: point {point.get('point', '?')}"

    def number(key: str, hint: str) -> float:
        value = point.get(key)
        require(
            isinstance(value, (int, float)) and _SMALLEST <= value <= 1 / _SMALLEST,
            f"{where} has {key} = {short_repr(value)}: expected a number from {_SMALLEST} to "
            f"{1 / _SMALLEST}{hint}",
        )
        return float(value)

    again = "; the sweep's command, run again, writes it without training"
    parameters, tokens = number("parameters", again), number("tokens", again)
    flops_per_token = number("flops_per_token", again)
    loss = number(metric, did_you_mean(metric, point) or f"; it has {', '.join(point)}")
    return ScalingRun(
        name=str(point.get("point", "?")),
        size=parameters if size == "parameters" else flops_per_token / 6,
        tokens=tokens,
        flops=flops_per_token * tokens,
        loss=loss,
    )


def check_runs(runs: Sequence[ScalingRun]) -> None:
    """Checks that the runs can determine the constants.

    Raises:
      UserError: there are too few runs, sizes or numbers of tokens, or tokens and sizes grow
        together.
    """
    sizes, tokens = ({round(math.log(run[i]), 6) for run in runs} for i in (1, 2))
    least = len(CONSTANTS) + 1
    require(
        len(runs) >= least,
        f"{len(runs)} runs: expected at least {least} for the {len(CONSTANTS)} constants "
        f"{', '.join(CONSTANTS)}: add points to the sweep",
    )
    for what, values in (("sizes of the model", sizes), ("numbers of tokens", tokens)):
        require(
            len(values) >= 3,
            f"{len(values)} different {what}: expected at least 3, as a power law over them has 3 "
            "constants: add points to the sweep",
        )
    correlation = np.corrcoef(np.log([run.size for run in runs]), np.log([r.tokens for r in runs]))
    require(
        abs(correlation[0, 1]) < 0.999,
        "the numbers of tokens are a power of the sizes of the models in all runs: no fit can tell "
        "the effect of one from that of the other: train some sizes for other numbers of tokens",
    )


def fit_loss(runs: Sequence[ScalingRun], near: LossFit | None = None) -> LossFit:
    """Fits E, A, B, α and β: the sum over runs of the Huber loss of log L(N, D) - log L, with
    log L(N, D) as the log of a sum of exponentials (2203.15556, equation 3).

    `scipy.optimize.least_squares` minimises it from several starts. A start has α and β from a
    table, and the E, A, B ≥ 0 that then have the least squared relative error.

    Args:
      near: a fit to start from, in place of the table.
    """
    size, tokens, loss = (np.array([run[i] for run in runs]) for i in (1, 2, 4))
    # Logs relative to their means keep the constants apart from each other.
    x_mean, y_mean = np.log(size).mean(), np.log(tokens).mean()
    x, y, log_loss = np.log(size) - x_mean, np.log(tokens) - y_mean, np.log(loss)

    def terms(theta):
        e, a, b, alpha, beta = theta
        return np.stack([np.full_like(x, e), a - alpha * x, b - beta * y])

    def residuals(theta):
        return logsumexp(terms(theta), axis=0) - log_loss

    def jacobian(theta):
        shares = np.exp(terms(theta) - logsumexp(terms(theta), axis=0))
        return np.stack([*shares, -shares[1] * x, -shares[2] * y], axis=1)

    low, high = log_loss.min() - 12, log_loss.max() + 2
    bounds = ([low] * 3 + [1e-3] * 2, [log_loss.min(), high, high] + [_LARGEST_EXPONENT] * 2)

    def start(alpha, beta):
        columns = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
        factors, error = nnls(columns / loss[:, None], np.ones_like(loss))
        logs = np.log(np.maximum(factors, math.exp(low)))
        inside = np.clip([*logs, alpha, beta], np.array(bounds[0]) + 1e-6, np.array(bounds[1]))
        return error, inside

    if near is None:
        found = [start(alpha, beta) for alpha in _START_EXPONENTS for beta in _START_EXPONENTS]
        starts = [theta for _, theta in sorted(found, key=lambda pair: pair[0])[:_STARTS]]
    else:
        a, b = math.log(near.a) - near.alpha * x_mean, math.log(near.b) - near.beta * y_mean
        theta = [math.log(max(near.e, math.exp(low))), a, b, near.alpha, near.beta]
        starts = [np.clip(theta, np.array(bounds[0]) + 1e-9, np.array(bounds[1]) - 1e-9)]
    results = [
        least_squares(
            residuals,
            theta,
            jacobian,
            bounds=bounds,
            loss="huber",
            f_scale=HUBER_DELTA,
            xtol=1e-10,
            ftol=1e-12,
            gtol=1e-14,
            max_nfev=100,
        )
        for theta in starts
    ]
    e, a, b, alpha, beta = min(results, key=lambda result: result.cost).x
    return LossFit(
        e=math.exp(e),
        a=math.exp(a + alpha * x_mean),
        b=math.exp(b + beta * y_mean),
        alpha=float(alpha),
        beta=float(beta),
    )


def resample_fits(
    runs: Sequence[ScalingRun], fit: LossFit, resamples: int, seed: int
) -> tuple[LossFit, ...]:
    """Fits resampled data: at the sizes and tokens of the runs, losses that are those of `fit`
    times randomly chosen residuals of the runs.

    Residuals are resampled rather than runs because the runs of a ladder are chosen: without its
    largest size a ladder of five would be another ladder. As a fit of P constants makes the
    residuals of n runs too small, they are multiplied by √(n / (n - P)).
    """
    residuals = np.array([math.log(run.loss / fit(run.size, run.tokens)) for run in runs])
    residuals = _inflate_residuals(residuals, len(CONSTANTS))
    rng = np.random.default_rng(seed)
    fits = []
    for _ in range(resamples):
        noise = np.exp(rng.choice(residuals, len(runs)))
        made = [
            run._replace(loss=fit(run.size, run.tokens) * factor)
            for run, factor in zip(runs, noise, strict=True)
        ]
        fits.append(fit_loss(made, near=fit))
    return tuple(fits)


def _inflate_residuals(residuals: np.ndarray, constants: int) -> np.ndarray:
    """Returns the residuals of a fit with so many constants, centred, with the variance of the
    noise.
    """
    degrees = max(len(residuals) - constants, 1)
    return (residuals - residuals.mean()) * math.sqrt(len(residuals) / degrees)


def _confidence_interval(value: float, resampled: Sequence[float]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(resampled), (tail, 1 - tail))
    return Interval(float(value), float(low), float(high))


def flops_of_size(runs: Sequence[ScalingRun]) -> Callable[[float], float]:
    """Returns the function size → FLOPs per token: exact at the runs' sizes, and between and beyond
    them along straight lines of the logs.
    """
    by_size: dict[float, list[float]] = {}
    for run in runs:
        by_size.setdefault(run.size, []).append(run.flops / run.tokens)
    x = np.log(sorted(by_size))
    y = np.array([np.mean(np.log(by_size[size])) for size in sorted(by_size)])
    slopes = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])

    def flops_per_token(size: float) -> float:
        at = math.log(size)
        beyond = min(at - x[0], 0) * slopes[0] + max(at - x[-1], 0) * slopes[1]
        return math.exp(np.interp(at, x, y) + beyond)

    return flops_per_token


def best_size(
    fit: LossFit,
    flops: float,
    flops_per_token: Callable[[float], float],
    sizes: tuple[float, float],
) -> float:
    """Returns the size between `sizes` at which `fit` has the lowest loss for `flops` FLOPs."""

    def loss(log_size):
        size = math.exp(log_size)
        return fit(size, flops / flops_per_token(size))

    found = minimize_scalar(loss, bounds=np.log(sizes), method="bounded", options={"xatol": 1e-4})
    return math.exp(found.x)


def fit_parabolas(runs: Sequence[ScalingRun]) -> tuple[Parabola, ...]:
    """Fits a parabola to the runs of every budget that has at least three sizes."""
    budgets: list[list[ScalingRun]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if budgets and run.flops <= (1 + SAME_BUDGET) * budgets[-1][0].flops:
            budgets[-1].append(run)
        else:
            budgets.append([run])
    found = []
    for group in budgets:
        group = tuple(sorted(group, key=lambda run: run.size))
        if len({run.size for run in group}) < 3:
            continue
        x = np.log([run.size for run in group])
        coefficients = np.polyfit(x - x.mean(), [run.loss for run in group], 2)
        flops = float(np.mean([run.flops for run in group]))
        found.append(Parabola(flops, group, math.exp(x.mean()), tuple(map(float, coefficients))))
    return tuple(found)


def fit_iso_flop(runs: Sequence[ScalingRun], resamples: int, seed: int) -> IsoFlop:
    """Fits isoFLOP parabolas, and the line N = G C^a through the minima that lie between the sizes
    of the runs. Its interval is from resampled residuals of these parabolas.
    """
    found = fit_parabolas(runs)
    used = [parabola for parabola in found if math.isfinite(parabola.best_size)]
    if len(used) < 2:
        return IsoFlop(found, None, math.nan)
    exponent, factor = _fit_line_of_minima(used)
    runs = [run for parabola in used for run in parabola.runs]
    fitted = np.concatenate([p([run.size for run in p.runs]) for p in used])
    residuals = _inflate_residuals(np.array([run.loss for run in runs]) - fitted, 3 * len(used))
    rng = np.random.default_rng(seed)
    exponents = []
    for _ in range(resamples):
        noise = rng.choice(residuals, len(runs))
        made = [run._replace(loss=loss) for run, loss in zip(runs, fitted + noise, strict=True)]
        exponents.append(_fit_line_of_minima(fit_parabolas(made))[0])
    exponents = [value for value in exponents if math.isfinite(value)]
    return IsoFlop(found, _confidence_interval(exponent, exponents or [exponent]), factor)


def _fit_line_of_minima(found: Sequence[Parabola]) -> tuple[float, float]:
    """Returns a and G of N = G C^a through the minima of the parabolas; NaN if one has none."""
    points = np.log([(parabola.flops, parabola.minimum) for parabola in found])
    if not np.isfinite(points).all():
        return math.nan, math.nan
    slope, offset = np.polyfit(*points.T, 1)
    return float(slope), float(np.exp(offset))


def predict_losses(
    seen: Sequence[ScalingRun], unseen: Sequence[ScalingRun], resamples: int, seed: int
) -> tuple[Prediction, ...]:
    """Fits the runs `seen`, and predicts the loss of the runs `unseen`. The interval holds the
    spread of resampled fits and the noise of a single run.

    Raises:
      UserError: the runs `seen` cannot determine a fit (`check_runs`).
    """
    check_runs(seen)
    fit = fit_loss(seen)
    fits = resample_fits(seen, fit, resamples, seed)
    residuals = np.array([math.log(run.loss / fit(run.size, run.tokens)) for run in seen])
    noise = np.random.default_rng(seed + 1).choice(
        _inflate_residuals(residuals, len(CONSTANTS)), len(fits)
    )
    predictions = []
    for run in unseen:
        resampled = [one(run.size, run.tokens) * math.exp(e) for one, e in zip(fits, noise)]
        predictions.append(
            Prediction(run, _confidence_interval(fit(run.size, run.tokens), resampled))
        )
    return tuple(predictions)


def _predictions(
    runs: Sequence[ScalingRun], resamples: int, seed: int
) -> dict[str, tuple[Prediction, ...] | str]:
    """Returns `Scaling.predictions`: of the largest run, and of the runs of the highest budget."""
    highest = max(run.flops for run in runs)
    budget = [run for run in runs if run.flops * (1 + SAME_BUDGET) >= highest]
    largest = max(budget, key=lambda run: run.size)
    held_out = {"the largest run": [run for run in budget if run.size == largest.size]}
    if len(budget) > len(held_out["the largest run"]):
        held_out["the highest budget"] = budget
    predictions: dict[str, tuple[Prediction, ...] | str] = {}
    for what, unseen in held_out.items():
        seen = [run for run in runs if run not in unseen]
        try:
            predictions[what] = predict_losses(seen, unseen, resamples, seed)
        except UserError as error:
            predictions[what] = str(error)
    return predictions


def analyse(runs: Sequence[ScalingRun], resamples: int = 200, seed: int = 0) -> Scaling:
    """Fits and predicts all that `Scaling` holds.

    Args:
      resamples: the number of resampled fits for the intervals.
      seed: of the resampling.

    Raises:
      UserError: the runs cannot determine a fit (`check_runs`).
    """
    check_runs(runs)
    fit = fit_loss(runs)
    fits = resample_fits(runs, fit, resamples, seed)
    intervals = {
        name: _confidence_interval(value, [one.constants[i] for one in fits])
        for i, (name, value) in enumerate(zip(CONSTANTS, fit.constants, strict=True))
    }
    flops_per_token = flops_of_size(runs)
    sizes = [run.size for run in runs]
    highest = max(run.flops for run in runs)

    def limits(flops: float) -> tuple[float, float]:
        return min(sizes) / _EXTRAPOLATED, max(sizes) * _EXTRAPOLATED * max(flops / highest, 1.0)

    def optimum(one: LossFit, flops: float) -> tuple[float, float, float]:
        size = best_size(one, flops, flops_per_token, limits(flops))
        tokens = flops / flops_per_token(size)
        return size, tokens, float(one(size, tokens))

    optima = []
    for flops in (highest, 10 * highest, 100 * highest):
        resampled = zip(*(optimum(one, flops) for one in fits))
        best = optimum(fit, flops)
        low, high = limits(flops)
        at_end = not 1.01 * low < best[0] < high / 1.01
        optima.append(Optimum(flops, *map(_confidence_interval, best, resampled), at_end))

    def slope(one: LossFit) -> float:
        ends = [optimum(one, factor * highest)[0] for factor in (0.1, 1.0)]
        return math.log(ends[1] / ends[0]) / math.log(10)

    return Scaling(
        runs=tuple(runs),
        fit=fit,
        intervals=intervals,
        resampled=fits,
        optima=tuple(optima),
        exponent=_confidence_interval(slope(fit), [slope(one) for one in fits]),
        iso_flop=fit_iso_flop(runs, resamples, seed),
        predictions=_predictions(runs, resamples, seed),
    )
