"""Fits the loss as a function of the size of the model and the number of training tokens, over the
runs of sweeps, and predicts the losses of other runs from the fit.

    L(N, D) = E + A / N^α + B / D^β                      (Hoffmann et al., 2203.15556, approach 3)

N is the size of the model, D the number of training tokens, L the held-out loss. The loss is above
E at any size and any number of tokens. C is the number of FLOPs of a run, counted exactly by
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
# FLOPs that differ by less than this share count as the same budget, because a budget is met to the
# nearest step. Likewise for numbers of tokens; and for sizes, because widths are multiples of 8.
EQUAL_WITHIN = 0.05
_LARGEST_EXPONENT = 3.0
# The smallest number that a run may have, and 1 over the largest: far outside of what is measured,
# and far inside of what float64 can square and multiply.
_SMALLEST = 1e-30
_START_EXPONENTS = (0.1, 0.25, 0.5, 1.0, 2.0)
_STARTS = 6  # how many of the combinations of start exponents are optimised
_EXTRAPOLATED = 10.0  # how far beyond the measured sizes an optimum is searched


class ScalingRun(NamedTuple):
    """The numbers of one run that a fit uses.

    Attributes:
      name: the name of the run's point in the sweep.
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
        """Returns the losses at sizes and numbers of tokens; the two arrays broadcast."""
        return self.e + self.a / size**self.alpha + self.b / tokens**self.beta

    @property
    def constants(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)


class Interval(NamedTuple):
    """A value, and the low and the high end of its bootstrap interval, which contains the share
    `CONFIDENCE` of the resampled values. The ends are None if the data give no interval.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def is_determined(self) -> bool:
        """Whether the interval is positive and its high end is at most `DETERMINED` times its low
        end. Then the data determine the value.
        """
        return self.low is not None and 0 < self.low and self.high <= DETERMINED * self.low


class Optimum(NamedTuple):
    """The best use of `flops` FLOPs: the size, the number of tokens, and the loss.

    `at_search_end` is true if `size` is the smallest or the largest size that was searched: by the
    fit, ever smaller or ever larger models are then better, and no size is the best.
    """

    flops: float
    size: Interval
    tokens: Interval
    loss: Interval
    at_search_end: bool


class Prediction(NamedTuple):
    """The predicted loss of a run that the fit did not use.

    Attributes:
      heldout_run: the run, with its measured loss.
      predicted_loss: the predicted loss.
    """

    heldout_run: ScalingRun
    predicted_loss: Interval

    @property
    def relative_error(self) -> float:
        """The predicted loss divided by the measured loss, minus 1."""
        return self.predicted_loss.value / self.heldout_run.loss - 1


class Parabola(NamedTuple):
    """The loss as a function of the size N at one budget of FLOPs: c₀ + c₁ x + c₂ x² with
    x = log(N / centre_size).

    Attributes:
      budget_flops: the mean FLOPs of the runs.
      runs: the runs of this budget, in the order of their sizes.
      centre_size: the geometric mean of the sizes of the runs.
      coefficients: c₂, c₁, c₀.
    """

    budget_flops: float
    runs: tuple[ScalingRun, ...]
    centre_size: float
    coefficients: tuple[float, float, float]

    def __call__(self, size):
        return np.polyval(self.coefficients, np.log(np.asarray(size) / self.centre_size))

    @property
    def size_at_minimum(self) -> float:
        """The size at the minimum; NaN if the parabola has no minimum."""
        c2, c1, _ = self.coefficients
        return self.centre_size * math.exp(-c1 / (2 * c2)) if c2 > 0 else math.nan

    @property
    def best_size_within_runs(self) -> float:
        """The size with the lowest loss. NaN if the minimum of the parabola lies outside the sizes
        of the runs, where no loss was measured.
        """
        size = self.size_at_minimum
        return size if self.runs[0].size <= size <= self.runs[-1].size else math.nan


class IsoFlopFit(NamedTuple):
    """IsoFLOP parabolas (2203.15556, approach 2).

    Attributes:
      parabolas: a parabola for each budget with at least three sizes, in the order of the budgets.
      size_exponent: the exponent a of the line N = G C^a through the minima; None if fewer than two
        parabolas have a minimum between the sizes of their runs. It has no interval if every such
        parabola has three runs, which it meets exactly, or if many resampled parabolas have no
        minimum.
      size_factor: the factor G of the line N = G C^a; NaN if `size_exponent` is None.
    """

    parabolas: tuple[Parabola, ...]
    size_exponent: Interval | None
    size_factor: float


@dataclasses.dataclass(frozen=True)
class ScalingAnalysis:
    """The fits of a set of runs, and predictions from them.

    Attributes:
      analysed_runs: the runs.
      loss_fit: the fit of L(N, D) to the losses of all runs.
      constant_intervals: name of a constant of the fit → its value and interval.
      resampled_fits: fits of resampled losses, from which the intervals are computed.
      extrapolated_optima: the best size and number of tokens by `loss_fit`, for the budget with the
        most FLOPs and for 10 and 100 times this budget.
      optimal_size_exponent: the exponent a of N_optimal ∝ C^a by the fit, over the last factor of
        10 below the budget with the most FLOPs.
      iso_flop: the isoFLOP parabolas.
      heldout_predictions: name of a group of held-out runs → the predictions of these runs from a
        fit of the other runs, or a sentence that says why there are none.
    """

    analysed_runs: tuple[ScalingRun, ...]
    loss_fit: LossFit
    constant_intervals: dict[str, Interval]
    resampled_fits: tuple[LossFit, ...]
    extrapolated_optima: tuple[Optimum, ...]
    optimal_size_exponent: Interval
    iso_flop: IsoFlopFit
    heldout_predictions: dict[str, tuple[Prediction, ...] | str]


def read_runs(
    paths: Sequence[pathlib.Path], metric: str = "heldout loss", size: str = "parameters"
) -> tuple[ScalingRun, ...]:
    """Reads the runs of sweeps. Runs that differ only in `train.seed` are separate runs.

    Args:
      paths: folders of sweeps, or files results.json.
      metric: the metric to fit, as results.json calls it.
      size: what N counts. "parameters": all parameters. "flops": a sixth of the FLOPs per token, so
        that C = 6 N D. A sixth of the FLOPs is about the number of parameters that a token uses,
        plus a part for attention and the recurrence.

    Raises:
      UserError: a file cannot be read; a run has no such metric, or no count of parameters, tokens
        or FLOPs; or the paths hold a run twice.
    """
    runs: list[ScalingRun] = []
    for path, record in map(_read_results_json, paths):
        for point in record["points"]:
            run = _read_run(point, metric, size, path)
            require(
                run not in runs,
                f"{path}: point {run.name} is there twice, with the same loss: as two runs it "
                "would make the intervals too narrow: give every sweep once",
            )
            runs.append(run)
    return tuple(runs)


def missing_point_sentences(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns a sentence for each sweep in which points are missing because they failed or are not
    done. `read_runs` explains the arguments and errors.
    """
    sentences = []
    for path, record in map(_read_results_json, paths):
        axes = record.get("axes", {}).values()
        count, done = math.prod(map(len, axes)), len(record["points"])
        if axes and done < count:
            sentences.append(
                f"{path}: {count - done} of {count} points failed or are not done: the fit is "
                "without them"
            )
    return sentences


def mixed_axis_sentences(
    paths: Sequence[pathlib.Path], metric: str = "heldout loss", size: str = "parameters"
) -> list[str]:
    """Returns a sentence for each axis, except for axes of seeds, in which runs of equal size and
    of equal tokens or equal FLOPs differ. The law has no term for such an axis. `read_runs`
    explains the arguments and errors.
    """
    sentences = []
    for path, record in map(_read_results_json, paths):
        points = record["points"]
        runs = [_read_run(point, metric, size, path) for point in points]
        sizes, *others = (_group_numbers([run[i] for run in runs]) for i in (1, 2, 3))
        equal: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for i, numbers in enumerate(others):
            for size_number, number, point in zip(sizes, numbers, points, strict=True):
                equal.setdefault((i, size_number, number), []).append(point)
        sentences += [
            f"{path}: runs of equal size, and of equal tokens or FLOPs, differ in {axis}: the fit "
            "is an average over the values of this axis; for the law of one value, give a sweep of "
            "this value alone"
            for axis in record.get("axes", {})
            if axis.rpartition(".")[2] != "seed"
            and any(
                len({str(point.get(axis)) for point in points}) > 1 for points in equal.values()
            )
        ]
    return sentences


def _group_numbers(values: Sequence[float]) -> list[int]:
    """Divides positive numbers into groups, and returns the number of the group of each. Numbers
    that exceed the smallest of their group by less than the share `EQUAL_WITHIN` are in one group.
    Groups are numbered in ascending order.
    """
    numbers = [0] * len(values)
    group, smallest = -1, 0.0
    for i in sorted(range(len(values)), key=values.__getitem__):
        if group < 0 or values[i] > (1 + EQUAL_WITHIN) * smallest:
            group, smallest = group + 1, values[i]
        numbers[i] = group
    return numbers


def _read_results_json(given: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Returns the path and the content of the results.json of a sweep."""
    path = given / "results.json" if given.is_dir() else given
    try:
        record = json_files.read(path)
        points, axes = record["points"], record.get("axes", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read as the results of a sweep: expected the folder of a sweep "
            "(runs/sweeps/NAME), or its results.json"
        ) from error
    require(
        isinstance(points, list) and all(isinstance(point, dict) for point in points),
        f"{path}: points: expected a list of objects",
    )
    require(
        isinstance(axes, dict) and all(isinstance(values, list) for values in axes.values()),
        f"{path}: axes: expected an object of lists",
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


def check_runs_determine_fit(runs: Sequence[ScalingRun]) -> None:
    """Checks that the runs can determine the constants.

    Raises:
      UserError: there are too few runs, sizes or numbers of tokens, or too few pairs of a size and
        a number of tokens; or the number of tokens is a power of the size in all runs.
    """
    groups = [_group_numbers([run[i] for run in runs]) for i in (1, 2)]
    sizes, tokens, pairs = map(set, (*groups, zip(*groups, strict=True)))
    least = len(CONSTANTS) + 1
    require(
        len(runs) >= least,
        f"{len(runs)} runs: expected at least {least} for the {len(CONSTANTS)} constants "
        f"{', '.join(CONSTANTS)}: add points to the sweep",
    )
    for what, values in (("sizes of the model", sizes), ("numbers of tokens", tokens)):
        require(
            len(values) >= 3,
            f"{what} that differ by more than {EQUAL_WITHIN:.0%}: {len(values)}; expected at least "
            "3, as a power law over them has 3 constants: add points to the sweep",
        )
    require(
        len(pairs) >= len(CONSTANTS),
        f"{len(pairs)} different pairs of a size and a number of tokens (runs that differ only in "
        f"the seed count once): expected at least {len(CONSTANTS)}, the number of constants: add "
        "points to the sweep",
    )
    correlation = np.corrcoef(np.log([run.size for run in runs]), np.log([r.tokens for r in runs]))
    require(
        abs(correlation[0, 1]) < 0.999,
        "the numbers of tokens are a power of the sizes of the models in all runs: no fit can tell "
        "the effect of one from that of the other: train some sizes for other numbers of tokens",
    )


def fit_loss(runs: Sequence[ScalingRun], near: LossFit | None = None) -> LossFit:
    """Fits the constants E, A, B, α and β of L(N, D) to the losses of the runs. The fit minimises
    the sum over runs of the Huber loss of log L(N, D) - log L, where log L(N, D) is written as the
    log of a sum of exponentials (2203.15556, equation 3).

    `scipy.optimize.least_squares` minimises this sum from several starting points. A starting point
    has a combination of `_START_EXPONENTS` as α and β, and the E, A, B ≥ 0 that have the least
    squared relative error for this α and β.

    Args:
      near: a fit that serves as the only starting point; None: the starting points that are
        described above.
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
    """Returns fits of resampled losses. A resample has the sizes and tokens of the runs; each of
    its losses is the loss that `fit` gives, times the exponential of the log residual of a randomly
    chosen run.

    Residuals are resampled, not runs, because the sizes and tokens of the runs were chosen on
    purpose, and a resample without the largest size would be another experiment. A fit of P
    constants makes the residuals of n runs too small, so each is multiplied by √(n / (n - P)).
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
    """Returns the residuals of a fit with `constants` constants, centred and scaled up so that
    their variance estimates the variance of the noise.
    """
    degrees = max(len(residuals) - constants, 1)
    return (residuals - residuals.mean()) * math.sqrt(len(residuals) / degrees)


def _confidence_interval(value: float, resampled: Sequence[float]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(resampled), (tail, 1 - tail))
    return Interval(float(value), float(low), float(high))


def flops_per_token_by_size(runs: Sequence[ScalingRun]) -> Callable[[float], float]:
    """Returns a function that maps a size to FLOPs per token. The function is exact at the runs'
    sizes, except that nearly equal sizes (`EQUAL_WITHIN`) count as their geometric mean; between
    and beyond these sizes, log FLOPs is piecewise linear in log size.
    """
    numbers = np.array(_group_numbers([run.size for run in runs]))
    log_sizes, log_flops = np.log([(run.size, run.flops / run.tokens) for run in runs]).T
    x, y = (
        np.array([logs[numbers == number].mean() for number in range(numbers.max() + 1)])
        for logs in (log_sizes, log_flops)
    )
    slopes = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])

    def flops_per_token(size: float) -> float:
        at = math.log(size)
        beyond = min(at - x[0], 0) * slopes[0] + max(at - x[-1], 0) * slopes[1]
        return math.exp(np.interp(at, x, y) + beyond)

    return flops_per_token


def compute_optimal_size(
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
    runs = sorted(runs, key=lambda run: run.flops)
    budgets: dict[int, list[ScalingRun]] = {}
    for number, run in zip(_group_numbers([run.flops for run in runs]), runs, strict=True):
        budgets.setdefault(number, []).append(run)
    found = []
    for group in budgets.values():
        group = tuple(sorted(group, key=lambda run: run.size))
        if len(set(_group_numbers([run.size for run in group]))) < 3:
            continue
        x = np.log([run.size for run in group])
        coefficients = np.polyfit(x - x.mean(), [run.loss for run in group], 2)
        flops = float(np.mean([run.flops for run in group]))
        found.append(Parabola(flops, group, math.exp(x.mean()), tuple(map(float, coefficients))))
    return tuple(found)


def fit_iso_flop(runs: Sequence[ScalingRun], resamples: int, seed: int) -> IsoFlopFit:
    """Fits isoFLOP parabolas, and the line N = G C^a through those minima that lie between the
    sizes of the runs. The interval of the exponent a is computed from fits of resampled residuals
    of the parabolas. There is no interval if the parabolas have no residuals, because a parabola
    meets three runs exactly; or if more of the resampled exponents than an interval leaves out at
    one end do not exist.
    """
    found = fit_parabolas(runs)
    used = [parabola for parabola in found if math.isfinite(parabola.best_size_within_runs)]
    if len(used) < 2:
        return IsoFlopFit(found, None, math.nan)
    exponent, factor = _fit_line_of_minima(used)
    runs = [run for parabola in used for run in parabola.runs]
    if len(runs) == 3 * len(used):
        return IsoFlopFit(found, Interval(exponent, None, None), factor)
    fitted = np.concatenate([p([run.size for run in p.runs]) for p in used])
    residuals = _inflate_residuals(np.array([run.loss for run in runs]) - fitted, 3 * len(used))
    rng = np.random.default_rng(seed)
    exponents = []
    for _ in range(resamples):
        noise = rng.choice(residuals, len(runs))
        made = [run._replace(loss=loss) for run, loss in zip(runs, fitted + noise, strict=True)]
        exponents.append(_fit_line_of_minima(fit_parabolas(made))[0])
    exponents = [value for value in exponents if math.isfinite(value)]
    interval = Interval(exponent, None, None)
    if len(exponents) >= (1 + CONFIDENCE) / 2 * resamples:
        interval = _confidence_interval(exponent, exponents)
    return IsoFlopFit(found, interval, factor)


def _fit_line_of_minima(found: Sequence[Parabola]) -> tuple[float, float]:
    """Returns a and G of the line N = G C^a through the minima of the parabolas; NaN if a parabola
    has no minimum.
    """
    points = np.log([(parabola.budget_flops, parabola.size_at_minimum) for parabola in found])
    if not np.isfinite(points).all():
        return math.nan, math.nan
    slope, offset = np.polyfit(*points.T, 1)
    with np.errstate(over="ignore"):  # of a resampled line, whose G is not used
        return float(slope), float(np.exp(offset))


def predict_losses(
    seen: Sequence[ScalingRun], unseen: Sequence[ScalingRun], resamples: int, seed: int
) -> tuple[Prediction, ...]:
    """Fits the runs `seen`, and predicts the losses of the runs `unseen`. The intervals of the
    predictions include the spread of the resampled fits and the noise of a single run.

    Raises:
      UserError: the runs `seen` cannot determine a fit (`check_runs_determine_fit`).
    """
    check_runs_determine_fit(seen)
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


def _predict_heldout_groups(
    runs: Sequence[ScalingRun], resamples: int, seed: int
) -> dict[str, tuple[Prediction, ...] | str]:
    """Returns the predictions of two groups of held-out runs, each from a fit of all other runs:
    the runs of the largest size at the highest budget, and all runs with the highest budget.
    (`ScalingAnalysis.heldout_predictions`)
    """
    highest = max(run.flops for run in runs)
    budget = [run for run in runs if run.flops * (1 + EQUAL_WITHIN) >= highest]
    largest = max(budget, key=lambda run: run.size)
    held_out = {
        "the largest run": [run for run in budget if run.size * (1 + EQUAL_WITHIN) >= largest.size]
    }
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


def analyse_scaling(
    runs: Sequence[ScalingRun], resamples: int = 200, seed: int = 0
) -> ScalingAnalysis:
    """Computes all fields of a `ScalingAnalysis` of the runs.

    Args:
      resamples: the number of resampled fits for the intervals.
      seed: the seed of the resampling.

    Raises:
      UserError: the runs cannot determine a fit (`check_runs_determine_fit`).
    """
    check_runs_determine_fit(runs)
    fit = fit_loss(runs)
    fits = resample_fits(runs, fit, resamples, seed)
    intervals = {
        name: _confidence_interval(value, [one.constants[i] for one in fits])
        for i, (name, value) in enumerate(zip(CONSTANTS, fit.constants, strict=True))
    }
    flops_per_token = flops_per_token_by_size(runs)
    sizes = [run.size for run in runs]
    highest = max(run.flops for run in runs)

    def limits(flops: float) -> tuple[float, float]:
        return min(sizes) / _EXTRAPOLATED, max(sizes) * _EXTRAPOLATED * max(flops / highest, 1.0)

    def optimum(one: LossFit, flops: float) -> tuple[float, float, float]:
        size = compute_optimal_size(one, flops, flops_per_token, limits(flops))
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

    return ScalingAnalysis(
        analysed_runs=tuple(runs),
        loss_fit=fit,
        constant_intervals=intervals,
        resampled_fits=fits,
        extrapolated_optima=tuple(optima),
        optimal_size_exponent=_confidence_interval(slope(fit), [slope(one) for one in fits]),
        iso_flop=fit_iso_flop(runs, resamples, seed),
        heldout_predictions=_predict_heldout_groups(runs, resamples, seed),
    )
