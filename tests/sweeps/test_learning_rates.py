"""The best learning rate of a sweep, and how far it moves along the x axis."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from qwen3next_jax.common.metrics import pair_with_declarations
from qwen3next_jax.evals.heldout import Heldout
from qwen3next_jax.sweeps.learning_rates import best_rate, best_rates_along_x
from qwen3next_jax.sweeps.points import load_sweep
from qwen3next_jax.sweeps.report import render_report
from qwen3next_jax.sweeps.results import PointResult

ROOT = Path(__file__).parents[2]
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
METRIC = "heldout bits_per_byte"


def loss(rate, best):
    return 2 + 0.1 * math.log(rate / best) ** 2


@pytest.mark.parametrize("best", [1.5e-3, 3e-3, 7.9e-3])
def test_a_parabola_s_minimum_lies_between_rates(best):
    found, at_edge = best_rate(RATES, [loss(rate, best) for rate in RATES])
    assert found == pytest.approx(best)
    assert not at_edge


def test_a_minimum_at_an_edge_was_tried():
    assert best_rate(RATES, [1, 2, 3, 4, 5]) == (RATES[0], True)
    assert best_rate(RATES, [5, 4, 3, 2, 1]) == (RATES[-1], True)
    assert best_rate(RATES, [3, 2, 1, np.inf, np.inf]) == (RATES[2], False)
    assert best_rate(RATES, [1.0] * 5)[1]
    assert best_rate(RATES[:1], [1.0]) == (RATES[0], True)


def test_one_best_rate_moves_nowhere(tmp_path, monkeypatch):
    """Only the points of the first width are done."""
    monkeypatch.chdir(ROOT)
    axes = {"model.hidden_size": [64, 256], "optimizer.learning_rate": [1e-3, 2e-3]}
    record = {"base": "configs/tiny.py", "axes": axes}
    (tmp_path / "sweep.py").write_text(f"def get_sweep():\n    return {record!r}\n")
    sweep = load_sweep(tmp_path / "sweep.py")
    metrics = {METRIC: pair_with_declarations({"bits_per_byte": 2.0}, Heldout.metrics)[0]}
    results = [
        PointResult(p, 500, metrics if p.config.model.hidden_size == 64 else {}, 100.0, 1.0)
        for p in sweep.points
    ]
    page = render_report(sweep, results, {}, "widths")
    assert "best learning rate" in page
    assert "moves by" not in page


@pytest.mark.slow
def test_a_report_says_how_far_the_best_rate_moves(tmp_path, monkeypatch):
    """Without scaling by two octaves, four steps of √2; with it not at all."""
    monkeypatch.chdir(ROOT)
    mup = {"optimizer.scaling": "mup", "optimizer.base_width": 64}
    record = {
        "base": "configs/tiny.py",
        "x": "model.hidden_size",
        "axes": {
            "scaling": {"none": {}, "mup": mup},
            "model.hidden_size": [64, 256],
            "optimizer.learning_rate": list(RATES),
            "train.seed": [0, 1],
        },
    }
    (tmp_path / "sweep.py").write_text(f"def get_sweep():\n    return {record!r}\n")
    sweep = load_sweep(tmp_path / "sweep.py")
    results = []
    for point in sweep.points:
        drop = point.config.optimizer.scaling == "none" and point.config.model.hidden_size == 256
        best = 6e-3 / (4 if drop else 1)
        value = loss(point.config.optimizer.learning_rate, best) + 0.01 * point.config.train.seed
        name = METRIC.partition(" ")[2]
        metrics = {METRIC: pair_with_declarations({name: value}, Heldout.metrics)[0]}
        results.append(PointResult(point, 500, metrics, 100.0, 1.0))
    found = best_rates_along_x(sweep, results, METRIC)
    assert [one.moved_sqrt2_steps for one in found["scaling none"]] == pytest.approx([0, -4])
    narrow, wide = found["scaling mup"]
    assert [narrow.moved_sqrt2_steps, wide.moved_sqrt2_steps] == pytest.approx([0, 0], abs=1e-9)
    assert narrow.largest_losses[0] - narrow.smallest_losses[0] == pytest.approx(0.01)
    # Where a seed of the best rate failed, the best is another; where it is not done, nothing is
    # said of this rate.
    assert narrow.rate == pytest.approx(6e-3)
    places = ("mup", "64", "0.008", "1")
    (one,) = (i for i, r in enumerate(results) if tuple(r.point.axis_values.values()) == places)
    left_out = dataclasses.replace(results[one], final_metrics={})
    results[one] = dataclasses.replace(left_out, failure_reason="diverged")
    best = best_rates_along_x(sweep, results, METRIC)["scaling mup"][0]
    assert best.mean_losses[3] == np.inf
    assert (best.rate, best.at_edge) == (4e-3, False)
    results[one] = left_out
    rates = best_rates_along_x(sweep, results, METRIC)["scaling mup"][0].tried_rates
    assert rates == (*RATES[:3], RATES[4])
    page = render_report(sweep, results, {point.name: "" for point in sweep.points}, "widths")
    assert 'id="learning-rate"' in page
    assert "-4.0 steps" in page
