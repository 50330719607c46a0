"""The effective speed-up: made losses give back the factor of compute that they were made with, and
losses that do not tell one are refused.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_jax.reporting import page, speedup
from qwen3next_jax.reporting.runs import run_from_events
from qwen3next_jax.reporting.speedup import (
    Arm,
    SpeedUp,
    arms_of_runs,
    compare_in_every_unit,
    comparison_record,
    comparisons_html,
    fit_law,
    interval_confidence,
    speed_up,
    speed_up_sentence,
)
from tests.refusals import refused

BUDGETS = np.array([1e11, 3e11, 9e11, 2.7e12])
# The last grid of α is this fine (1.1 / 10⁸ of α), and rounding moves the minimum of a sum of
# squares by the root of float64's 1e-16; a factor of compute of 30 multiplies both by ln 30 / α.
TOLERANCE = 1e-5


def law(budgets, faster=1.0, e=1.7, a=40.0, alpha=0.15):
    return e + a / (faster * budgets) ** alpha


def arm(losses, budgets=BUDGETS, name="arm", **changes):
    """An arm whose steps, FLOPs and seconds are in proportion. `losses`: [B] or [S, B]."""
    losses = np.atleast_2d(losses)
    budgets = np.broadcast_to(budgets, losses.shape)
    spent = {"steps": budgets / 1e9, "flops": budgets, "seconds": budgets / 1e8}
    return dataclasses.replace(Arm(name, losses, spent), **changes)


def noisy(faster, seeds, rng, noise=2e-3):
    return arm(law(BUDGETS, faster) + noise * rng.standard_normal((seeds, len(BUDGETS))))


@given(
    st.floats(0.05, 20), st.floats(0, 3), st.floats(0.05, 0.6), st.sampled_from(list(speedup.UNITS))
)
@settings(max_examples=25, deadline=None)
def test_the_factor_of_made_losses_comes_back(faster, e, alpha, unit):
    constants = {"e": e, "a": 1e11**alpha, "alpha": alpha}
    baseline, other = arm(law(BUDGETS, **constants)), arm(law(BUDGETS, faster, **constants))
    found = speed_up(baseline, other, unit)
    assert found.factor == pytest.approx(faster, rel=TOLERANCE)
    assert speed_up(other, baseline, unit).factor == pytest.approx(1 / faster, rel=TOLERANCE)


def test_arms_of_other_laws_meet_at_the_worse_one_s_last_loss():
    """The laws differ in all constants, and in the budgets."""
    first, second = {"e": 1.7, "a": 40.0, "alpha": 0.15}, {"e": 1.6, "a": 90.0, "alpha": 0.18}
    budgets = 0.5 * BUDGETS
    last = law(BUDGETS[-1], **first)
    reached = (second["a"] / (last - second["e"])) ** (1 / second["alpha"])
    assert budgets[0] < reached < budgets[-1]
    found = speed_up(arm(law(BUDGETS, **first)), arm(law(budgets, **second), budgets), "flops")
    assert found.factor == pytest.approx(BUDGETS[-1] / reached, rel=TOLERANCE)
    assert found.loss == pytest.approx(last)


@pytest.mark.parametrize("faster", [0.5, 1.0, 1.3])
def test_the_interval_holds_the_factor_as_often_as_it_says(faster):
    """With three seeds each, 9 of 10 intervals do; 50 or fewer of 64 do with a probability of
    3e-3 (binomial).
    """
    rng = np.random.default_rng(0)
    found = [speed_up(noisy(1.0, 3, rng), noisy(faster, 3, rng), "flops") for _ in range(64)]
    assert interval_confidence((3, 3)) == pytest.approx(0.9)
    assert sum(one.low <= faster <= one.high for one in found) > 50
    assert np.median([one.high / one.low for one in found]) < 1.25
    assert all(one.low <= one.factor <= one.high for one in found)


def test_the_confidence_is_that_of_separate_ranks():
    """Of all orders of n + m seeds, those in which one arm is above the other."""
    rng = np.random.default_rng(1)
    for n, m in ((2, 2), (3, 2), (3, 3)):
        first, second = rng.random((20_000, n)), rng.random((20_000, m))
        apart = (first.min(1) > second.max(1)) | (first.max(1) < second.min(1))
        assert interval_confidence((n, m)) == pytest.approx(
            1 - apart.mean(), abs=4 * 0.5 / 20_000**0.5
        )


def test_one_seed_each_has_no_interval():
    found = compare_in_every_unit(arm(law(BUDGETS)), arm(law(BUDGETS, 2.0)))
    assert found.speed_ups_by_unit["steps"].low is None
    assert str(found.speed_ups_by_unit["steps"]) == "2"
    assert "no interval" in speed_up_sentence(found)
    assert "One seed" in comparisons_html([found])


def test_a_seed_beyond_the_budgets_leaves_its_end_open():
    fast = np.stack([law(BUDGETS, 2.0), law(BUDGETS, 60.0)])
    found = speed_up(arm(law(BUDGETS)), arm(fast), "flops")
    assert found.high == math.inf
    assert found.low == pytest.approx(2.0, rel=TOLERANCE)
    assert str(found).endswith("(2 or more)")
    record = comparison_record(compare_in_every_unit(arm(law(BUDGETS)), arm(fast)))
    assert json.loads(json.dumps(record, allow_nan=False))["flops"]["high"] == "inf"


def test_the_better_budgets_are_never_left():
    """30 times as fast: the smallest budget of one arm is below the largest of the other, which is
    27 times as large.
    """
    with refused("fast", "slow", "27"):
        speed_up(arm(law(BUDGETS), name="slow"), arm(law(BUDGETS, 30.0), name="fast"), "flops")
    with refused("fast", "slow", "27"):
        speed_up(arm(law(BUDGETS, 30.0), name="fast"), arm(law(BUDGETS), name="slow"), "flops")


@pytest.mark.parametrize(
    "losses, budgets, names",
    [
        ([2.0], [1e11], ("1 budget", "1e+11", "at least 3")),
        ([2.0, 1.9], [1e11, 3e11], ("2 budgets",)),
        ([2.0, 1.9, 1.8], [1e11, 3e11, 3e11], ("2 budgets",)),
        (np.zeros((0, 4)), BUDGETS, ("no seed", "4 budgets")),
        ([2.0, 2.1, 2.2, 2.3], BUDGETS, ("does not fall",)),
        ([2.0, 2.0, 2.0, 2.0], BUDGETS, ("does not fall",)),
        ([3.0, 1.9, 2.6, 2.2], BUDGETS, ("law",)),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_losses_that_tell_no_compute_are_refused(losses, budgets, names, swapped):
    arms = [arm(law(BUDGETS)), arm(np.array(losses), np.array(budgets), name="wrong")]
    with refused("wrong", *names):
        speed_up(*(arms[::-1] if swapped else arms), "flops")


def test_wall_times_of_other_devices_are_refused():
    first = arm(law(BUDGETS), device_names=frozenset({"1 × H100"}))
    second = arm(law(BUDGETS, 2.0), device_names=frozenset({"1 × H200"}))
    found = compare_in_every_unit(first, second)
    assert isinstance(found.speed_ups_by_unit["flops"], SpeedUp)
    assert "1 × H100" in found.speed_ups_by_unit["seconds"]
    assert "1 × H200" in found.speed_ups_by_unit["seconds"]
    assert found.speed_ups_by_unit["seconds"] in speed_up_sentence(found)


def test_a_rising_law_is_flat():
    assert fit_law(BUDGETS, np.array([2.0, 2.1, 2.2, 2.3])).a == 0


def run_of(name, faster=1.0, rate=lambda step: 1e-3, flops=6e6, **data):
    """A run of 1,000 steps, evaluated every 100, whose losses follow the law of its steps."""
    events = [{"event": "start", "step": 0, "time": 0.0, "devices": 1, "device_kind": "cpu"}]
    for step in range(50, 1001, 50):
        speed = {"steps": 50, "seconds": 5.0, "model_flops_per_second": flops}
        train = {"learning_rate": rate(step), "loss": 2.0} | speed
        events.append({"event": "train", "step": step, "time": step / 10} | train)
        if step % 100 == 0:
            loss = float(law(np.array(step), faster, a=4.0, alpha=0.3))
            values = {"loss": loss, "bits_per_byte": loss}
            events.append({"event": "heldout", "step": step, "time": step / 10} | values)
    config = {"train": {"steps": 1000}, "data": {"path": "text"} | data}
    return run_from_events(name, config, events)


def test_two_runs_at_a_constant_rate_are_compared():
    _, *arms = arms_of_runs(run_of("a"), run_of("b", 2.0, flops=12e6))
    comparison = compare_in_every_unit(*arms)
    factors = {unit: found.factor for unit, found in comparison.speed_ups_by_unit.items()}
    assert factors == pytest.approx({"steps": 2.0, "flops": 1.0, "seconds": 2.0}, rel=TOLERANCE)
    text = page.render_report([run_of("a"), run_of("b", 2.0)])
    assert "Effective speed-up" in text
    assert "Dots were measured" in text


def test_only_evaluations_at_the_highest_rate_count():
    """A rate that falls over the last fifth of the steps, as "warmup_stable_decay" does."""
    falling = run_of("b", 2.0, rate=lambda step: 1e-3 * min(step / 200, 1.0, (1000 - step) / 200))
    *_, other = arms_of_runs(run_of("a"), falling)
    assert other.budgets_by_unit["steps"].tolist() == [[200, 300, 400, 500, 600, 700, 800]]


def test_an_evaluation_between_two_rates_does_not_count():
    """Also if the second rate is 0."""
    for last in (0.0, 1e-4):
        falling = run_of("b", 2.0, rate=lambda step: last if step > 900 else 1e-3)
        falling.events_by_kind["train"] = [
            e for e in falling.events_by_kind["train"] if e["step"] % 200 == 0
        ]
        *_, other = arms_of_runs(run_of("a"), falling)
        assert other.budgets_by_unit["steps"].max() == 800


def test_a_misfit_is_told_beside_an_exact_law():
    budgets = BUDGETS[:3]
    exact, off = arm(law(budgets), budgets), arm(law(BUDGETS, 1.2) + [0, 2e-3, -2e-3, 0])
    assert speed_up(exact, arm(law(budgets, 1.2), budgets), "flops").misfit is None
    assert speed_up(exact, off, "flops").misfit > 1.001


def test_a_flat_seed_leaves_no_bound():
    falls = law(BUDGETS)
    found = speed_up(arm([falls, falls]), arm([0 * falls + falls[1], falls]), "flops")
    assert found.low == 0
    assert found.high == math.inf


def test_runs_that_carry_no_speed_up_say_why():
    cosine = run_of("b", rate=lambda step: 1e-3 * (1 + math.cos(math.pi * step / 1000)))
    for other, names in (
        (cosine, ("b", "optimizer.schedule", "flops")),
        (run_of("b", path="other text"), ("data.path",)),
    ):
        with refused(*names):
            arms_of_runs(run_of("a"), other)
        text = page.render_report([run_of("a"), other])
        assert "Effective speed-up" in text
        assert names[-1] in text
