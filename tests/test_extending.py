"""An optimizer and a data source as docs/extending.md adds them (its mixer is in test_mixers.py,
its evaluation in test_evals.py).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from page import example, line

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, DataConfig, ModelConfig, MuonConfig, OptimizerConfig
from qwen3next_jax.config.optimizers import OPTIMIZERS
from qwen3next_jax.config.sources import DATA_SOURCES
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.training.optimizer import make_optimizer


@pytest.fixture(autouse=True)
def the_page_s_lines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    example("my_optimizer.py", tmp_path)
    example("my_source.py", tmp_path)
    monkeypatch.setitem(OPTIMIZERS, *line("OPTIMIZERS"))
    monkeypatch.setitem(DATA_SOURCES, *line("DATA_SOURCES"))


def test_a_new_optimizer_gets_schedule_and_weight_decay_from_the_common_part():
    rate, decay = 0.01, 0.1
    config = Config(
        model=ModelConfig(num_hidden_layers=4, num_experts=0, hidden_size=64),
        optimizer=OptimizerConfig(
            name="lion", learning_rate=rate, warmup_steps=0, weight_decay=decay, clip_norm=0.0
        ),
    )
    optimizer = make_optimizer(config)
    params = {"layers": {0: {"mixer": {"a_log": jnp.ones(3), "out_proj": jnp.ones(3)}}}}
    grads = {
        "layers": {
            0: {"mixer": {"a_log": jnp.array([1.0, -2, 3]), "out_proj": jnp.array([1.0, -2, 3])}}
        }
    }
    update = optimizer.update(grads, optimizer.init(params), params)[0]["layers"][0]["mixer"]
    np.testing.assert_allclose(update["a_log"], -rate * np.array([1, -1, 1]), rtol=1e-6)
    np.testing.assert_allclose(
        update["out_proj"], -rate * (np.array([1, -1, 1]) + decay), rtol=1e-6
    )


def test_a_new_source_is_read_by_index_and_its_mistakes_are_one_line():
    data = open_data(DataConfig(source="counting"), 16, 4, 32)
    batch = next(data.batches(7))
    tokens = batch["tokens"]
    assert (
        tokens.shape == (4, 16)
        and np.ptp((np.diff(tokens, axis=1) % 32), axis=1).max() == 0
        and batch["target_mask"][:, 2:].all()
    )
    np.testing.assert_array_equal(tokens[2], data.row(7 * 4 + 2)["tokens"])
    heldout = next(data.heldout(3))
    assert (
        heldout["segment_ids"].sum(axis=1).tolist() == [16, 16, 16, 0]
        and (heldout["tokens"] != tokens).any()
    )
    assert (
        data.document_names(3)[0] == ["counting:12"]
        and data.describe()["bits_per_nat"] is None
        and not data.tokenizer.reads_text
    )
    assert data.fingerprint != open_data(DataConfig(source="copy"), 16, 4, 32).fingerprint
    with pytest.raises(
        UserError,
        match=r"data.source = 'countin': expected one of .* \(did you mean 'counting'\?\)",
    ):
        DataConfig(source="countin")
    with pytest.raises(
        UserError, match=r"optimizer.name = 'lino': expected one of .* \(did you mean 'lion'\?\)"
    ):
        OptimizerConfig(name="lino")
    with pytest.raises(
        UserError, match="optimizer.muon is set, but optimizer.name = 'lion' does not read it"
    ):
        dataclasses.replace(OptimizerConfig(name="lion"), muon=MuonConfig(momentum=0.9))
