"""Update rules of a user's own (the example of docs/extending.md): when they act, what they may
change, and the mistakes that are refused.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page import example

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, OptimizerConfig, TrainConfig
from qwen3next_jax.training import update_rules
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.loss import total_loss
from qwen3next_jax.training.update_rules import StepInput, UpdateRule
from tests.core.test_freezing import MODEL, start_params
from tests.in_process import resolved

POISON = 101  # segment ids that mark a batch whose loss is made NaN
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(steps=8, batch_size=2, sequence_length=16, update_rules=("my_rule:CapHead",)),
    optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant"),
)


@pytest.fixture(autouse=True)
def my_rule(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    example("my_rule.py", tmp_path)


def poisoned_loss(model, batch, *rest, **named):
    total, parts = total_loss(model, batch, *rest, **named)
    factor = jnp.where(jnp.max(batch["segment_ids"]) == POISON, jnp.nan, 1.0)
    return total * factor, parts | {"total_loss": parts["total_loss"] * factor}


def test_a_rule_acts_at_each_step_but_skipped_ones():
    run = resolved(CONFIG)
    step = make_train_step(run, *run.stages, poisoned_loss)
    state = run.init_state(start_params())  # its head is above the cap
    rng = np.random.default_rng(0)
    for segment, capped_steps in ((POISON, 0), (1, 1), (POISON, 1), (1, 2)):
        before = jax.device_get(state)
        tokens = rng.integers(1, MODEL.vocab_size, (2, 16)).astype(np.int32)
        batch = {"tokens": tokens, "segment_ids": np.full((2, 16), segment, np.int32)}
        state, metrics = step(state, jax.device_put(batch, run.batch_sharding))
        after = jax.device_get(state)
        assert after["capped_steps"] == capped_steps
        assert "capped_share" in metrics
        if segment == POISON:
            for name in after.keys() - {"step", "guards"}:
                jax.tree.map(np.testing.assert_array_equal, after[name], before[name])
        else:
            assert np.abs(after["params"]["head"]).max() <= 0.05


def test_a_rule_cannot_change_frozen_parameters():
    frozen = dataclasses.replace(CONFIG.train, freeze=("head",))
    run = resolved(dataclasses.replace(CONFIG, train=frozen))
    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), run.abstract_state["params"])
    state = {"params": params} | update_rules.initial_rule_entries(run.rules, params)
    step, after, metrics = StepInput(run.stages[0], {}, state), state, {}
    for rule in run.rules:
        after, metrics = update_rules.apply_rule(rule, step, after, metrics, jnp.array(False))
    assert metrics["capped_share"] == 1
    assert after["capped_steps"] == 1
    np.testing.assert_array_equal(after["params"]["head"], params["head"])


@pytest.mark.parametrize(
    "result, told",
    [
        ({"x": jnp.zeros(2)}, "dict: expected"),
        (({"x": jnp.zeros(3)}, {}), r"float32\[3\] for x: expected float32\[2\]"),
        (({"x": jnp.zeros(2), "y": 0}, {}), "for y: expected no such entry"),
        (({}, {}), "nothing for x"),
        (({"x": jnp.zeros(2)}, {"m": jnp.zeros(2)}), r"'m' of shape \[2\]: expected a scalar"),
    ],
)
def test_results_that_are_no_train_state_are_refused(result, told):
    class Mistaken(UpdateRule):
        def apply(self, step, after, metrics):
            return result

    with pytest.raises(UserError, match=f"Mistaken returned .*{told}") as error:
        update_rules.apply_rule(Mistaken(), None, {"x": jnp.zeros(2)}, {}, jnp.array(False))
    assert "\n" not in str(error.value)


def test_entries_are_not_shared():
    class Taken(UpdateRule):
        def init(self, params):
            return {"guards": params["x"]}

    with pytest.raises(UserError, match="Taken adds the entry 'guards'"):
        update_rules.initial_rule_entries([Taken()], {"x": jnp.zeros(2)})


@pytest.mark.parametrize(
    "name, told",
    [
        ("my_rule:CapTail", "cannot be imported"),
        ("builtins:max", "failed"),
        ("operator:eq", "returned bool"),
    ],
)
def test_what_is_no_rule_is_refused(name, told):
    train = dataclasses.replace(CONFIG.train, update_rules=(name,))
    with pytest.raises(UserError, match=f"train.update_rules = '{name}'.*{told}") as error:
        resolved(dataclasses.replace(CONFIG, train=train))
    assert "\n" not in str(error.value)
