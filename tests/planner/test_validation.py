"""The table of benchmarks/planner/validation.py: it is printed from plans, and says which plan is
missing or was made of something else.
"""

import json
import math
import pathlib
import runpy

import jax
import numpy as np

from benchmarks.planner import measured_kernels
from benchmarks.planner.measured_kernels import MaxTextExperts, experts_of_maxtext
from qwen3next_jax import kernels
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.sharding.chips import CHIPS
from tests.refusals import refused

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/planner/validation.py"


def test_a_row_is_predicted_from_its_plan(tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))
    show, rows = script["show"], script["ROWS"]
    names = list(rows)[:3]
    chosen = {name: rows[name]._replace(measured=(2.0, 4.0)) for name in names}
    show.__globals__.update(PLANS=tmp_path, ROWS=chosen)
    plan = {
        "optimization_level": "O1",
        "peak_hbm_bytes": 12 * 2**30,
        "usable_hbm_bytes": 16 * 2**30,
        "fingerprint": script["fingerprint"](chosen[names[0]]),
        "estimates": {
            model: {"step_seconds": seconds}
            for model, seconds in (("schedule", 3.0), ("roofline", 1.5), ("calibrated", 3.6))
        },
    }
    (tmp_path / f"{names[0]}.json").write_text(json.dumps(plan))
    (tmp_path / f"{names[1]}.json").write_text(json.dumps(plan))  # of another row: stale
    show()
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith(f"| {chosen[names[0]].number} |"))
    assert "3.000 (+0.0%) | 1.500 (-50.0%) | 3.600 (+20.0%) | 12.0 of 16.0 | O1" in row
    (tmp_path / f"{names[0]}.json").write_text(json.dumps(plan | {"peak_hbm_bytes": 18 * 2**30}))
    show()
    assert "18.0 of 16.0, 2.0 over" in capsys.readouterr().out
    for name in names[1:]:
        (said,) = (line for line in lines if line.startswith(name))
        assert f"--compile={name}" in said


def test_every_row_is_a_configuration_of_its_slice():
    script = runpy.run_path(str(SCRIPT))
    for row in script["ROWS"].values():
        chip, _, grid = row.topology.partition(":")
        devices = math.prod(map(int, grid.split("x"))) * CHIPS[chip].devices_per_chip
        train = script["configuration"](row).train
        assert row.data == devices
        assert train.batch_size == row.rows * devices


def test_the_experts_of_maxtext_are_their_formula():
    """Σ_a weight · (silu(x gate) · (x up)) down, over the chosen experts of each token."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(24, 8)), rng.random((24, 2))
    shapes = {"expert_gate": (4, 8, 12), "expert_up": (4, 8, 12), "expert_down": (4, 12, 8)}
    experts = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    gate, up, down = experts.values()
    expert = rng.permuted(np.tile(np.arange(4), (24, 1)), axis=1)[:, :2]
    of_gate, of_up = (np.einsum("rd,radi->rai", x, w[expert]) for w in (gate, up))
    hidden = of_gate / (1 + np.exp(-of_gate)) * of_up
    expected = np.einsum("ra,rai,raid->rd", weight, hidden, down[expert])
    inputs = [a.astype(np.float32) for a in (x, weight)]
    matrices = [experts[n].astype(np.float32) for n in MaxTextExperts.expert_parameter_names]
    found = jax.jit(experts_of_maxtext)(*inputs, expert.astype(np.int32), *matrices)
    # float32 sums of 12 terms of size 3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_a_row_installs_the_published_settings(monkeypatch):
    changed = [
        (splash_attention, "BLOCK"),
        (splash_attention, "LONG_BLOCK"),
        (splash_attention, "PARTS_OF_DQ"),
        (measured_kernels, "_installed"),
    ]
    for module, name in changed:  # so that they are put back
        value = getattr(module, name)
        monkeypatch.setattr(module, name, dict(value) if isinstance(value, dict) else value)
    monkeypatch.setattr(kernels, "KERNELS", dict(kernels.KERNELS))
    script = runpy.run_path(str(SCRIPT))
    rows = script["ROWS"]
    mixture = script["configuration"](rows["hunyuan3_v5p"]).model.moe.mixture_class()
    with refused("decoding", error=ValueError):
        mixture.choose_expert_implementation(None, layer=0)
    assert mixture.choose_expert_implementation(None, layer=None) is experts_of_maxtext
    measured_kernels.install(rows["qwen3_235b_tpu7x_64"].kernels, 4096, 1536)
    assert measured_kernels._tile(4096, 1536) == (512, 2048, 1536)
    assert measured_kernels._tile(1536, 4096) == (512, 1536, 2048)
    measured_kernels.install(rows["hunyuan3_v5p"].kernels, 4096, 1536)
    # the tile does not divide an expert's width
    assert measured_kernels._tile(4096, 1536) == (512, 1024, 1024)
    assert list(kernels.KERNELS["grouped_matmul"]) == ["megablox"]
    assert splash_attention.BLOCK == splash_attention.block_size(8192, 128, 2) == 2048
    assert splash_attention.PARTS_OF_DQ == 0
