"""Scaling laws: made data give back what they were made of, and the data that cannot are refused or
named.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from qwen3next_jax.sweeps.costs import count_costs
from qwen3next_jax.sweeps.points import load_sweep
from qwen3next_jax.sweeps.scaling import (
    CONSTANTS,
    LossFit,
    ScalingRun,
    analyse_scaling,
    compute_optimal_size,
    fit_iso_flop,
    fit_loss,
    fit_parabolas,
    flops_per_token_by_size,
    missing_point_sentences,
    mixed_axis_sentences,
    predict_losses,
    read_runs,
    resample_fits,
)
from qwen3next_jax.sweeps.scaling_report import as_json, as_text, render_page, result_sentences
from tests.refusals import refused

CHINCHILLA = LossFit(1.69, 406.4, 410.7, 0.34, 0.28)


def ladder(fit=CHINCHILLA, noise=0.0, seed=0, budgets=(1e18, 3e18, 9e18, 2.7e19), sizes=5):
    """Runs with C = 6 N D, around the best sizes of four budgets."""
    rng = np.random.default_rng(seed)
    made = []
    for flops in budgets:
        for size in 1.2e8 * math.sqrt(flops / 1e18) * np.geomspace(0.25, 4, sizes):
            tokens = flops / 6 / size
            loss = fit(size, tokens) * math.exp(noise * rng.standard_normal())
            made.append(ScalingRun(f"{flops:g}", float(size), tokens, flops, float(loss)))
    return made


@pytest.mark.parametrize(
    "fit", [CHINCHILLA, LossFit(0.4, 30.0, 2e4, 0.2, 0.6), LossFit(2.5, 5e4, 60.0, 0.55, 0.15)]
)
def test_the_constants_of_exact_data_come_back(fit):
    assert fit_loss(ladder(fit)).constants == pytest.approx(fit.constants, rel=1e-3)


@pytest.mark.slow
def test_intervals_hold_the_constants_of_noisy_data():
    """Of 25 independent intervals that hold their constant in 95 % of cases, 18 or fewer hold it
    with a probability of 2e-4. Those of one fit are not independent.
    """
    held = 0
    for seed in range(5):
        runs = ladder(noise=3e-3, seed=seed)
        fits = resample_fits(runs, fit_loss(runs), 40, seed)
        low, high = np.quantile([fit.constants for fit in fits], (0.025, 0.975), axis=0)
        held += np.sum((low <= CHINCHILLA.constants) & (CHINCHILLA.constants <= high))
    assert held > 18


def test_the_best_size_is_that_of_the_closed_form():
    """2203.15556, equation 4, for C = 6 N D."""
    c = CHINCHILLA
    runs = ladder()
    factor = (c.alpha * c.a / (c.beta * c.b)) ** (1 / (c.alpha + c.beta))
    for flops in (1e18, 1e21):
        expected = factor * (flops / 6) ** (c.beta / (c.alpha + c.beta))
        found = compute_optimal_size(c, flops, flops_per_token_by_size(runs), (1e6, 1e12))
        assert found == pytest.approx(expected, rel=1e-2)
    found = analyse_scaling(runs, resamples=20)
    assert found.optimal_size_exponent.value == pytest.approx(c.beta / (c.alpha + c.beta), abs=0.01)


def test_parabolas_find_minima_between_sizes_only():
    def budget(flops, best):
        sizes = np.geomspace(1e6, 1e7, 5)
        return [
            ScalingRun("", n, flops / 6 / n, flops * 1.01**i, 3 + 0.1 * math.log(n / best) ** 2)
            for i, n in enumerate(sizes)
        ]

    inside, outside = fit_parabolas(budget(1e15, 3e6) + budget(1e16, 2e7))
    assert inside.best_size_within_runs == pytest.approx(3e6, rel=1e-6)
    assert math.isnan(outside.best_size_within_runs)


def test_nearly_equal_sizes_count_as_one():
    """Two models of every size: the second has 3e-5 more parameters and 18 % more FLOPs."""
    runs = ladder(sizes=3)
    others = [run._replace(size=run.size * 1.00003, tokens=run.tokens / 1.18) for run in runs]
    flops_per_token = flops_per_token_by_size(runs + others)
    size = 2 * max(run.size for run in runs)
    assert flops_per_token(size) == pytest.approx(6 * math.sqrt(1.18) * size, rel=1e-4)
    close = [run._replace(size=1e8 * (1 + 0.001 * (i % 3))) for i, run in enumerate(runs)]
    with refused("sizes of the model", "1"):
        analyse_scaling(close)
    assert fit_parabolas(close) == ()


def test_nearly_largest_runs_are_held_out():
    runs = ladder(noise=1e-3)
    runs.append(runs[-1]._replace(name="nearly as large", size=runs[-1].size * 0.99))
    predictions = analyse_scaling(runs, resamples=4).heldout_predictions["the largest run"]
    assert {prediction.heldout_run for prediction in predictions} == {*runs[-2:]}


def test_parabolas_without_residuals_give_no_interval():
    """A parabola meets three runs exactly, whatever their noise."""
    exact, residual = (fit_iso_flop(ladder(noise=1e-2, sizes=n), 40, 0) for n in (3, 4))
    assert exact.size_exponent.low is None
    assert residual.size_exponent.low < residual.size_exponent.high


def test_lost_minima_give_no_interval():
    """With this noise, every tenth parabola of resampled losses has no minimum."""
    noisy = ladder(noise=3e-2, seed=2, budgets=(1e18, 3e18))
    assert len(fit_parabolas(noisy)) == 2
    assert fit_iso_flop(noisy, 100, 0).size_exponent.low is None


def test_unseen_runs_are_predicted_within_the_interval():
    runs = ladder(noise=2e-3, seed=3)
    (found,) = predict_losses(runs[:-1], runs[-1:], resamples=40, seed=0)
    assert found.predicted_loss.low <= runs[-1].loss <= found.predicted_loss.high
    assert abs(found.relative_error) < 0.02


@pytest.mark.slow
def test_what_the_data_do_not_tell_is_named():
    """One budget of nearly equal models: no constant is known."""
    runs = ladder(noise=1e-2, budgets=(1e18, 1.3e18), sizes=4)
    scaling = analyse_scaling(runs, resamples=20)
    assert not scaling.constant_intervals["E"].is_determined
    assert "do not tell E" in " ".join(result_sentences(scaling, 20))
    told = analyse_scaling(ladder(noise=1e-3), resamples=20)
    assert all(told.constant_intervals[name].is_determined for name in ("E", "α", "β"))


def test_a_fit_without_a_best_size_is_named():
    """The loss does not depend on the size, so ever smaller models are better."""
    flat = LossFit(1.69, 1e-9, 410.7, 0.34, 0.28)
    scaling = analyse_scaling(ladder(flat), resamples=20)
    assert scaling.extrapolated_optima[0].at_search_end
    assert not analyse_scaling(ladder(), resamples=20).extrapolated_optima[2].at_search_end
    text = " ".join(result_sentences(scaling, 20))
    assert "no best N" in text
    assert "grows as" not in text


def test_text_page_and_json_are_whole():
    scaling = analyse_scaling(ladder(noise=3e-3), resamples=20)
    assert set(json.loads(as_json(scaling))["constants"]) == set(CONSTANTS)
    assert "largest" in as_text(scaling, 20)
    text = render_page(scaling, "title", "heldout loss", 20)
    assert text.count("<figure") == 4
    assert "nan" not in text
    assert "N (parameters)" in text
    assert "N (parameters)" not in render_page(scaling, "title", "heldout loss", 20, "flops")
    three_sizes = fit_iso_flop(ladder(noise=1e-2, sizes=3), 20, 0)
    scaling = dataclasses.replace(scaling, iso_flop=three_sizes)
    assert "(no interval)" in as_text(scaling, 20)
    assert json.loads(as_json(scaling))["iso_flop_exponent"]["high"] is None


def test_too_few_runs_are_refused():
    runs = ladder()
    same_size = [run._replace(size=1e8 * (1 + i % 2)) for i, run in enumerate(runs)]
    same_tokens = [run._replace(tokens=1e9) for run in runs]
    in_step = [run._replace(tokens=20 * run.size) for run in runs]
    few_pairs = [run._replace(name=seed) for run in runs[4:15:3] for seed in "01"]
    for wrong, name in (
        (runs[:5], "5 runs"),
        (same_size, "sizes of the model"),
        (same_tokens, "numbers of tokens"),
        (few_pairs, "4 different pairs"),
        (in_step, "the numbers of tokens are a power"),
    ):
        with refused(name):
            analyse_scaling(wrong)


def test_results_without_counts_are_refused(tmp_path):
    counts = {"parameters": 10, "tokens": 100, "flops_per_token": 60.0}
    point = {"point": "a=1", "heldout loss": 2.0, **counts}
    file = tmp_path / "results.json"

    def write(point):
        file.write_text(json.dumps({"points": [point]}))

    axes = {"a": ["1", "2"], "train.seed": ["0", "1"]}
    file.write_text(json.dumps({"axes": axes, "points": [point]}))
    assert ["3 of 4" in sentence for sentence in missing_point_sentences([tmp_path])] == [True]
    write(point)
    assert missing_point_sentences([tmp_path]) == []
    assert read_runs([tmp_path], size="flops") == (ScalingRun("a=1", 10.0, 100.0, 6000.0, 2.0),)
    with refused("a=1"):
        read_runs([tmp_path, file])
    for name in ("heldout loss", *counts):
        write({key: value for key, value in point.items() if key != name})
        with refused("a=1", name):
            read_runs([file])
    for count in (1e-320, 10**400):
        write(point | {"parameters": count})
        with refused("a=1", "parameters"):
            read_runs([file])
    for wrong in ("", "[]", '{"points": 3}', '{"points": [], "axes": [3]}'):
        file.write_text(wrong)
        with refused("results.json"):
            read_runs([file])


def test_an_axis_without_a_term_is_named(tmp_path):
    axes = {"size": ["a", "b"], "optimizer": ["adamw", "muon"], "train.seed": ["0", "1"]}
    points = [
        dict(zip(axes, values, strict=True), parameters=100 * (1 + (values[0] == "b")))
        | {"tokens": 100, "flops_per_token": 60.0, "heldout loss": 2.0}
        for values in itertools.product(*axes.values())
    ]
    (tmp_path / "results.json").write_text(json.dumps({"axes": axes, "points": points}))
    (sentence,) = mixed_axis_sentences([tmp_path])
    assert "optimizer" in sentence


def test_names_that_utf8_lacks_are_written(tmp_path):
    points = [
        {
            "point": "\ud800",
            "parameters": run.size,
            "tokens": run.tokens,
            "flops_per_token": run.flops / run.tokens,
            "heldout loss": run.loss,
        }
        for run in ladder(noise=1e-3)
    ]
    (tmp_path / "results.json").write_text(json.dumps({"points": points}))
    command = [sys.executable, "-m", "qwen3next_jax", "scaling", str(tmp_path), "--resamples=20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "scaling.json").read_text())["runs"][0]["name"] == "\ud800"


def test_an_axis_of_flops_gives_every_point_its_budget(tmp_path):
    path = tmp_path / "sweep.py"

    def write(**changes):
        record = {
            "base": "configs/tiny.py",
            "axes": {"flops": [1e12, 5e12], "model.hidden_size": [32, 64]},
        }
        path.write_text(f"def get_sweep():\n    return {record | changes!r}\n")

    write()
    sweep = load_sweep(path)
    for point in sweep.points:
        costs, train = count_costs(point.config), point.config.train
        of_step = costs.flops_per_token * train.batch_size * train.sequence_length
        flops = costs.flops_per_token * costs.tokens
        assert abs(flops - float(point.axis_values["flops"])) <= of_step / 2
        assert point.overrides["train.steps"] == train.steps
    with refused("train.steps"):
        load_sweep(path, {"train.steps": 3})
    write(set={"train.stages": ({"steps": 3},)})
    with refused("train.stages"):
        load_sweep(path)
    for value in (0, -1e9, "1e9", 1e3):
        write(axes={"flops": [value]})
        with refused("flops"):
            load_sweep(path)
