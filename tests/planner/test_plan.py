"""The planner: mistakes in one line, the search, and one real train step through the real TPU
compiler.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax import load_config
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.config.remat import POLICIES
from qwen3next_jax.ops.preferences import UNROLLED
from qwen3next_jax.planner import planning, subprocess_plan, topology
from qwen3next_jax.planner.search import (
    RECOMPUTED,
    estimated_hbm_bytes,
    estimated_step_seconds,
    rank_candidates,
)
from qwen3next_jax.planner.subprocess_plan import make_plan_in_subprocess
from qwen3next_jax.sharding.chips import CHIPS
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=4,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=0,
    mtp_depth=0,
)


def config(**mesh):
    return Config(
        model=MODEL,
        train=TrainConfig(batch_size=8, sequence_length=256, remat="block"),
        parallel=ParallelConfig(mesh=MeshConfig(**mesh)),
    )


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "qwen3next_jax", "plan", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@needs_compiler
def test_the_command_answers_a_mistake_in_one_line(tmp_path):
    done = command(
        "--config=configs/tiny.py", "--topology=v5p:9", f"--json={tmp_path / 'plan.json'}"
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())
    assert "--topology=v5p:9" in done.stderr
    assert "v6e" not in done.stderr


def test_a_size_that_is_no_number():
    done = command(
        "--config=configs/tiny.py", "--topology=v5p:2x2x1", "--config.parallel.mesh.data=abc"
    )
    assert done.returncode == 2
    assert "--config.parallel.mesh.data=abc" in done.stderr


@pytest.mark.slow
def test_a_figure_that_does_not_exist():
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/planner/planner_figures.py",
            "--compile=v6e_16x16_default,typo",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "typo" in done.stderr
    assert "v5p_8x8x8_default" in done.stderr


@pytest.mark.parametrize(
    "name, names",
    [
        ("v9:2x2x1", ("v4", "v5p", "2x2x1", "tpu7x", "h100", "h200", "HOSTSxGPUS")),
        ("h100:16x9", ("h100", "HOSTSxGPUS")),
        ("v5p", ("v5p", "2x2x1")),
        ("v5p:8x8", ("v5p", "2x2x1")),
        ("v6e:2x2x1", ("v6e", "1x1")),
        ("v5p:axb", ("v5p", "2x2x1")),
        ("v5p:0x2x2", ("v5p", "2x2x1")),
    ],
)
def test_unknown_topology_lists_the_known(name, names):
    with refused(f"--topology={name}", *names):
        topology.describe_topology(name)


@pytest.mark.parametrize("name", ["v6e:2x2x1", "v6e-8", "V6E:2x2"])
def test_only_its_chips_grids_are_listed(name):
    with pytest.raises(UserError) as told:
        topology.describe_topology(name)
    assert "v6e: 1x1" in str(told.value)
    assert "v5p" not in str(told.value)


def test_gpus_need_their_compiler(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda _: None)
    with refused("--topology=h100:16x8", "--extra plan-gpu"):
        topology.describe_topology("h100:16x8")


@pytest.mark.parametrize(
    "name, chips", [("v6e:32x32", "1,024"), ("v5e:32x16", "512"), ("v4:16x16x32", "8,192")]
)
def test_a_slice_larger_than_a_pod(name, chips):
    with refused(f"--topology={name}", chips):
        topology.describe_topology(name)


@needs_compiler
def test_what_the_compiler_lacks_is_said_before_a_compile(monkeypatch):
    monkeypatch.setattr(planning, "make_train_step", None)
    with refused("expert = 16", 8):
        planning.make_plan(
            Config(parallel=ParallelConfig(mesh=MeshConfig(data=2, expert=16))),
            topology.describe_topology("v5e:4x8"),
        )


@needs_compiler
@pytest.mark.parametrize(
    "slice_, names",
    [
        ("v5p:3x5x7", ("v5p:3x5x7", "v5p", "2x2x1")),
        ("v5p:2x2x1", ("--extra plan",)),
    ],
)
def test_a_refused_plan_leaves_no_folder(slice_, names, tmp_path, monkeypatch):
    import qwen3next_jax.commands.plan as command_module

    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" and "2x2" in slice_ else there(name),
    )
    monkeypatch.setattr(subprocess_plan, "make_plan_in_subprocess", None)
    monkeypatch.setattr(command_module, "_config", config)
    for flag, value in dict(
        _topology=slice_,
        _json=str(tmp_path / "new" / "plan.json"),
        _mesh=None,
        _search=False,
        _rows=[],
        _quick=False,
        _cost_model=None,
        _slices=1,
        _skew=0.0,
    ).items():
        monkeypatch.setattr(command_module, flag, types.SimpleNamespace(value=value))
    with refused(*names):
        command_module.main()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "skew, experts, names",
    [
        (2.0, 16, ("--skew=2", "0")),
        (float("nan"), 16, ("--skew=nan", "0")),
        (0.5, 0, ("--skew=0.5",)),
    ],
)
def test_a_skew_that_no_router_can_have(monkeypatch, skew, experts, names):
    import qwen3next_jax.commands.plan as command_module

    flags = dict(_rows=[], _search=False, _topology="v5p:2x2x1", _skew=skew)
    for flag, value in flags.items():
        monkeypatch.setattr(command_module, flag, types.SimpleNamespace(value=value))
    with refused(*names):
        command_module._check_flags(Config(model=ModelConfig(num_experts=experts)))


@pytest.mark.parametrize("flag, value", [("quick", True), ("search", True), ("skew", 0.5)])
def test_a_flag_that_gpus_have_no_use_for(flag, value, monkeypatch):
    import qwen3next_jax.commands.plan as command_module

    given = dict(quick=False, search=False, skew=0.0) | {flag: value}
    for name, value in given.items():
        monkeypatch.setattr(command_module, f"_{name}", types.SimpleNamespace(value=value))
    with refused(f"--{flag}", "h100:1x8"):
        command_module._check_gpu_flags("h100:1x8")


def test_libtpu_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("--extra plan"):
        topology.describe_topology("v5p:2x2x1")


@pytest.mark.parametrize(
    "text, names",
    [
        ("data=2,exprt=2", ("'exprt=2'", "AXIS=SIZE", "'expert'")),
        ("", ("--mesh=", "AXIS=SIZE")),
        ("data=two", ("'data=two'", "AXIS=SIZE")),
        ("data=--1", ("'data=--1'", "AXIS=SIZE")),
        ("data=2,data=2", ()),
        ("data=0", ("parallel.mesh.data = 0",)),
    ],
)
def test_mesh_flag(text, names):
    from qwen3next_jax.commands.plan import with_mesh
    from qwen3next_jax.commands.run_flags import parse_mesh_flag

    with refused(*names):
        with_mesh(ParallelConfig(), parse_mesh_flag(text))
    assert with_mesh(ParallelConfig(), parse_mesh_flag("expert=2,tensor=2")).mesh == MeshConfig(
        data=-1, expert=2, tensor=2
    )


@needs_compiler
@pytest.mark.parametrize(
    "mesh, names",
    [
        (dict(data=3), ("parallel.mesh", "3", "= 3", "4")),
        (
            dict(data=1, tensor=4),
            ("parallel.mesh.tensor = 4", "model.linear_num_key_heads = 2"),
        ),
    ],
)
def test_mesh_that_does_not_fit_devices_or_model(mesh, names):
    # it comes whole out of the compiler's process
    plan = make_plan_in_subprocess if "data 3" in names else planning.make_plan
    with refused(*names):
        plan(config(**mesh), topology.describe_topology("v6e:2x2"))


@needs_compiler
def test_a_run_s_compiler_options_replace_the_chip_s():
    mesh, own = (
        make_mesh(ParallelConfig(), topology.describe_topology(name).devices)
        for name in ("v6e:2x2", "v6e:1x1")
    )
    chips = compiler_options(ParallelConfig(), mesh)
    name = next(iter(chips))
    changed = compiler_options(
        ParallelConfig(compiler_options=f"{name}=, xla_tpu_enable_latency_hiding_scheduler=true"),
        mesh,
    )
    assert changed == {n: v for n, v in chips.items() if n != name} | {
        "xla_tpu_enable_latency_hiding_scheduler": "true"
    }
    assert (
        compiler_options(ParallelConfig(), own)
        == {}
        == compiler_options(ParallelConfig(), make_mesh(ParallelConfig()))
    )
    for text in ("xla_no=1", "fast"):
        with refused(text):
            compiler_options(ParallelConfig(compiler_options=text), mesh)


# ---- the real compiler
# --------------------------------------------------------------------------------------------------


@functools.cache
def plan_of(interval: int):
    """A plan of recurrent layers, of which every `interval`-th is attention; 0 for none."""
    periods = UNROLLED["tpu"] + 1  # else there is no loop over them
    of_kind = dataclasses.replace(
        MODEL,
        full_attention_interval=interval,
        layer_types=(),
        num_hidden_layers=periods * max(interval, 1),
    )
    return make_plan_in_subprocess(
        dataclasses.replace(config(data=2, expert=2), model=of_kind),
        # v5e has no sparse cores, for which the compiler would need a third more time.
        topology.describe_topology("v5e:2x2"),
    )


@pytest.fixture
def plan():
    return plan_of(0)


of_both_kinds = pytest.mark.parametrize(
    "interval",
    [0, pytest.param(2, marks=pytest.mark.slow)],
    ids=("recurrent layers", "every second of attention"),
)


@pytest.mark.needs("kernels")
@needs_compiler
@of_both_kinds
def test_a_plan_of_a_real_step_fits(interval):
    plan = plan_of(interval)
    assert plan.fits, plan.failure_reason
    assert plan.mesh == {"slice": 1, "data": 2, "expert": 2, "context": 1, "tensor": 1}
    assert not plan.kernels_of_unknown_cost


@pytest.mark.needs("kernels")
@needs_compiler
@of_both_kinds
def test_the_memory_of_a_plan_adds_up(interval):
    plan = plan_of(interval)
    # two moments, and counters
    assert plan.memory.optimizer == pytest.approx(2 * plan.memory.parameters, rel=1e-3)
    assert plan.memory.peak == pytest.approx(sum(plan.memory[:-1]))
    assert min(plan.memory.activations, plan.memory.gradients) > 0


@pytest.mark.needs("kernels")
@needs_compiler
def test_only_the_rounds_of_experts_are_unstated(plan):
    """They depend on the router."""
    assert plan.loops_of_unknown_length
    assert all("shard_map/while" in name for name in plan.loops_of_unknown_length)


@pytest.mark.needs("kernels")
@needs_compiler
@of_both_kinds
def test_flops_of_a_plan_are_the_recomputed_model_s(interval):
    """Everything the model needs and the recomputed forward passes, but no expert twice."""
    plan = plan_of(interval)
    assert 1.2 < plan.estimate.flops / plan.model_flops < 3
    assert 0 < plan.mfu < plan.as_dict()["mfu_roofline"] < 0.5
    assert dataclasses.replace(plan, kernels_of_unknown_cost=("k",)).mfu is None


@pytest.mark.needs("kernels")
@needs_compiler
def test_the_parts_of_an_estimate_are_its_seconds(plan):
    for estimate in (plan.estimate, plan.estimate_by_cost_model["calibrated"]):
        assert sum(estimate.seconds_by_resource.values()) == pytest.approx(estimate.seconds)
    parts = plan.estimate.cost_by_function
    assert sum(part.seconds for part in parts.values()) == pytest.approx(plan.estimate.seconds)
    assert any("GatedDeltaNet." in name for name in parts)


@pytest.mark.needs("kernels")
@needs_compiler
def test_estimates_are_in_their_order(plan):
    """The model's needs at the peaks, the program's, its schedule, and measured rates."""
    roofline, calibrated = (
        plan.estimate_by_cost_model["roofline"],
        plan.estimate_by_cost_model["calibrated"],
    )
    assert roofline.seconds < plan.estimate.seconds < calibrated.seconds
    assert plan.ideal_time.seconds < min(roofline.seconds, plan.ideal_time.realistic * 1.001)


@pytest.mark.needs("kernels")
@needs_compiler
@of_both_kinds
def test_collectives_of_a_plan_follow_its_mesh(interval):
    plan = plan_of(interval)
    assert {axis for c in plan.collectives for axis in c.axes} == {"data", "expert"}
    assert {c.run_count for c in plan.collectives} >= {1, len(plan.model.layer_stacks[-1])}


@pytest.mark.slow
def test_a_layer_alone_gathers_weights_and_exchanges_rows():
    """benchmarks/planner/block_plan.py, for two devices of a CPU."""
    compile_layer = runpy.run_path(str(ROOT / "benchmarks/planner/block_plan.py"))["compile_layer"]
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=1, expert=2)), jax.devices()[:2])
    program = compile_layer(MODEL, "gated_deltanet", mesh, 1, 64, 1, "dots", {}).as_text()
    assert "all-gather(" in program
    assert "reduce-scatter(" in program


@needs_compiler
def test_plan_is_shown_written_and_drawn(plan, tmp_path):
    from rich.console import Console

    from qwen3next_jax.commands.plan import draw_memory_bars, print_plan

    values = json.loads(json.dumps(plan.as_dict()))
    assert values.keys() >= {
        "topology",
        "chips",
        "mesh",
        "fits",
        "peak_hbm_bytes",
        "step_seconds",
        "tokens_per_second",
        "mfu",
        "compile_seconds",
    }
    assert values["tokens_per_second"] == pytest.approx(8 * 256 / values["step_seconds"])
    console = Console(record=True, width=150, file=open(os.devnull, "w"))
    print_plan(plan, console)
    text = console.export_text()
    assert "data=2 expert=2: fits" in text
    assert "bound by " + plan.slowest_resource in text
    assert "ideal: max(" in text
    assert "rates of v5e by calibrated: no product measured: the nearest, v6e" in text
    draw_memory_bars([plan], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@needs_compiler
def test_what_does_not_fit_is_a_row(monkeypatch):
    def too_large(config, mesh):
        def step(state, batch):
            x = jnp.broadcast_to(
                jnp.sum(batch["tokens"]).astype(jnp.float32), (2**18, 128)
            ) * jnp.arange(128.0)
            y = jnp.sin(x @ x.T)
            return y @ jnp.cos(y @ x)

        return jax.jit(step)

    monkeypatch.setattr(planning, "make_train_step", too_large)
    plan = planning.make_plan(config(data=4), topology.describe_topology("v6e:2x2"))
    assert not plan.fits
    assert plan.needed_hbm_bytes > plan.usable_hbm
    assert plan.usable_hbm == pytest.approx(CHIPS["v6e"].usable_hbm_per_device, rel=1e-3)
    assert plan.failure_reason.startswith(
        f"needs {plan.needed_hbm_bytes / 2**30:.2f} GiB of 31.24 GiB"
    )
    assert plan.as_dict()["mfu"] is None


@needs_compiler
@pytest.mark.parametrize("table_s_share", [1, 2])
def test_what_nearly_fits_has_a_time(table_s_share, monkeypatch):
    """Also if the table of chips knows of more memory than the compiler does."""

    def slightly_too_large(config, mesh):
        def step(state, batch):
            x = jnp.sum(batch["tokens"]) * jnp.arange(131_584.0)[:, None] * jnp.arange(128.0)
            product = x @ x.T  # 32.3 GiB of bfloat16, read twice
            return product @ x, product.T @ x

        return jax.jit(step)

    monkeypatch.setattr(planning, "make_train_step", slightly_too_large)
    slice_ = topology.describe_topology("v6e:2x2")
    chip = dataclasses.replace(
        slice_.chip, usable_hbm_per_device=table_s_share * slice_.chip.usable_hbm_per_device
    )
    plan = planning.make_plan(config(data=4), slice_._replace(chip=chip))
    over = plan.needed_hbm_bytes - plan.usable_hbm
    assert plan.verdict == "does not fit"
    assert 0 < over < planning.NEAR * plan.usable_hbm
    assert f"{over / 2**30:.2f} GiB" in plan.failure_reason
    product_seconds = 3 * 2 * 131_584**2 * 128 / CHIPS["v6e"].device_flops
    assert plan.as_dict()["step_seconds"] > product_seconds


@needs_compiler
def test_the_compiler_s_share_of_memory_counts(monkeypatch):
    """At O1 the compiler does not refuse it."""
    monkeypatch.setattr(
        planning,
        "make_train_step",
        lambda config, mesh: jax.jit(lambda state, batch: jnp.sum(batch["tokens"])),
    )
    slice_ = topology.describe_topology("v6e:2x2")
    small = slice_._replace(chip=dataclasses.replace(slice_.chip, usable_hbm_per_device=1000.0))
    assert planning.make_plan(config(data=4), slice_, "O1").fits
    plan = planning.make_plan(config(data=4), small, "O1")
    assert plan.verdict == "does not fit"
    assert plan.needed_hbm_bytes > plan.usable_hbm == 1000


@needs_compiler
def test_an_error_of_the_compiler_is_a_row(monkeypatch):
    class Lowered:
        def trace(self, *_):
            return self

        def lower(self, **_):
            return self

        def compile(self, _):
            raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed\nat length")

    monkeypatch.setattr(planning, "make_train_step", lambda config, mesh: Lowered())
    plan = planning.make_plan(config(data=4), topology.describe_topology("v6e:2x2"))
    assert plan.verdict == "failed"
    assert plan.failure_reason == "the compiler's error: INTERNAL: Mosaic failed"


# ---- a process for the compiler
# ----------------------------------------------------------------------------------------


def executable(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@needs_compiler
@pytest.mark.parametrize(
    "program, reason",
    [
        (
            "echo 'F1121 17:00 x.cc:33] Check failed: a == b (1 vs. 2)' >&2; kill -ABRT $$",
            "the compiler aborted: Check failed: a == b (1 vs. 2)",
        ),
        ("kill -SEGV $$", "the compiler's process was ended by signal 11 (Segmentation fault)"),
        ("kill -40 $$", "the compiler's process was ended by signal 40 (Real-time signal 6)"),
        (
            "kill -KILL $$",
            "the compiler's process was ended by signal 9 (Killed): perhaps the machine ran out "
            "of memory",
        ),
        (
            "echo 'Check failed: in passing' >&2; echo 'KeyError: no rule' >&2; exit 1",
            "the planner crashed: KeyError: no rule",
        ),
        (
            r"printf '\200\005\225' >/dev/fd/$4; kill -SEGV $$",
            "the compiler's process was ended by signal 11 (Segmentation fault)",
        ),
    ],
)
def test_a_compiler_that_ends_its_process_is_one_line(
    program, reason, tmp_path, monkeypatch, capfd
):
    from rich.console import Console

    from qwen3next_jax.commands.plan import print_plan

    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", program))
    plan = make_plan_in_subprocess(config(data=4), topology.describe_topology("v6e:2x2"))
    assert plan.verdict == "failed"
    assert plan.failure_reason == reason
    assert plan.as_dict()["peak_hbm_bytes"] is None
    console = Console(record=True, width=200, file=open(os.devnull, "w"))
    print_plan(plan, console)
    assert f"data=4 failed: {reason}" in console.export_text()
    # what Python said goes on
    assert ("in passing" in capfd.readouterr().err) == ("planner crashed" in reason)


@needs_compiler
def test_an_interrupt_ends_the_compiler(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        sys,
        "executable",
        executable(tmp_path / "python", f"trap '' INT; echo $$ > {pid}; exec sleep 600"),
    )

    def interrupt():
        while not (pid.exists() and pid.read_text().strip()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # workers of pytest-xdist ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            make_plan_in_subprocess(config(data=4), topology.describe_topology("v6e:2x2"))
    finally:
        signal.signal(signal.SIGINT, before)
    status = pathlib.Path("/proc", pid.read_text().strip(), "status")
    give_up = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone
        while "State:\tZ" not in status.read_text():  # killed, not yet waited for
            assert time.monotonic() < give_up
            time.sleep(0.02)


def test_a_planner_killed_early_leaves_no_compiler():
    """Killed before its child asks to end with it. The child would then wait for standard input,
    and compile.
    """
    program = (
        "import os, signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-m', 'qwen3next_jax.planner.subprocess_plan', "
        "str(os.getpid()), '1', 'schedules'])\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as planner:
        # its end: nobody holds it any more
        ended, _, _ = select.select([planner.stdout], [], [], 300)
        assert ended
        assert not planner.stdout.read()


# ---- the search
# --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("slice_", ["v6e:2x2", "v4:2x2x1"])
def test_the_smallest_slices_have_a_ranking(slice_):
    config = load_config("small")
    found = rank_candidates(config.model, config.train, topology.describe_topology(slice_))
    only_tensor = [c for c in found if c.mesh.tensor > 1 and c.mesh.data == c.mesh.expert == 1]
    assert not found[0].unusable_reason
    assert any(not c.unusable_reason for c in only_tensor)


@pytest.fixture(scope="module")
def candidates():
    return rank_candidates(
        ModelConfig(),
        TrainConfig(batch_size=7, sequence_length=4096),
        topology.describe_topology("v6e:16x16"),
        batch_sizes=(256, 512),
    )


@needs_compiler
def test_what_fits_comes_first_the_fastest_first(candidates):
    fitting = [c for c in candidates if not c.unusable_reason]
    assert fitting
    assert candidates[: len(fitting)] == fitting
    per_token = [c.step_seconds / c.tokens_per_step for c in fitting]
    assert per_token == sorted(per_token)
    assert {c.train.batch_size for c in fitting} == {256, 512}


@needs_compiler
def test_each_mesh_has_its_fastest_remat(candidates):
    fitting = [c for c in candidates if not c.unusable_reason]
    assert len({(c.mesh, c.train.batch_size) for c in fitting}) == len(fitting)
    # Nobody would train 81 B parameters without recomputation on 32 GB chips in one piece.
    assert all(c.train.remat != "none" for c in fitting[:3])
    assert set(RECOMPUTED) == {*POLICIES, "dots keep=experts", "keep=router"} - {"full"}


@needs_compiler
def test_candidates_use_all_devices(candidates):
    assert all(np.prod(list(c.mesh_sizes.values())) == 256 for c in candidates)
    assert all(c.mesh_sizes["context"] == 1 for c in candidates)


@needs_compiler
def test_what_does_not_fit_has_its_reason(candidates):
    reasons = [c.unusable_reason for c in candidates]
    assert any("31 GiB" in reason for reason in reasons)
    assert any("divide" in reason for reason in reasons)
    on_v5e = rank_candidates(
        ModelConfig(),
        TrainConfig(batch_size=256, sequence_length=4096),
        topology.describe_topology("v5e:16x16"),
        {"expert": 16},
    )
    assert all(
        "ragged_all_to_all" in c.unusable_reason
        for c in on_v5e
        if "divide" not in c.unusable_reason
    )


@needs_compiler
def test_named_axes_keep_their_sizes():
    named = rank_candidates(
        ModelConfig(),
        TrainConfig(batch_size=256, sequence_length=4096),
        topology.describe_topology("v6e:16x16"),
        {"expert": 4},
    )
    assert all(c.mesh_sizes["expert"] == 4 for c in named)
    assert {c.mesh_sizes["tensor"] for c in named} == {1, 2, 4, 8, 16}


@needs_compiler
@pytest.mark.parametrize(
    "rows, length, sizes",
    [
        (8, 4096, (1, 8, 4, 16)),
        (16, 32_768, (2, 8, 32, 1)),
        (512, 262_144, (8, 8, 8, 1)),
    ],
)
def test_long_or_few_rows_are_split(rows, length, sizes):
    few = rank_candidates(
        ModelConfig(),
        TrainConfig(batch_size=rows, sequence_length=length),
        topology.describe_topology("v5p:8x8x8"),
        dict(data=sizes[0], expert=sizes[1]),
    )
    wanted = (1, *sizes)
    assert any(
        tuple(c.mesh_sizes.values()) == wanted and "divide" not in c.unusable_reason for c in few
    )


@needs_compiler
def test_a_line_is_slower_than_a_ring():
    """Half of a dimension of the torus is a line: a byte takes twice as long as on the ring."""
    v5p = topology.describe_topology("v5p:8x8x8")
    train = TrainConfig(batch_size=2048, sequence_length=4096, remat="dots")
    ring, line = (
        estimated_step_seconds(ModelConfig(), train, MeshConfig(1, 512 // n, n), v5p)
        for n in (8, 4)
    )
    assert ring < line


def test_muon_saves_a_moment_of_each_matrix():
    """Nearly all of the model are matrices."""
    train = TrainConfig(batch_size=2048, sequence_length=4096, remat="dots")
    mesh = MeshConfig(1, 64, 8)
    muon, adamw = (
        estimated_hbm_bytes(ModelConfig(), train, mesh, optimizer=OptimizerConfig(name=name))
        for name in ("muon", "adamw")
    )
    assert -4 < (muon - adamw) / (81_324_862_720 / 512) < -3.9


@needs_compiler
def test_search_compiles_the_best_five_and_shows_the_rest(plan, monkeypatch):
    from rich.console import Console

    from qwen3next_jax.commands.plan import search_and_compile

    compiled = []

    def pretend(config, topology, level, skew):
        compiled.append(config)
        other = {
            1: {},
            2: dict(failed=True, failure_reason="the compiler aborted: Check failed: x"),
            3: dict(needed_hbm_bytes=2**36, failure_reason="needs 64.00 GiB of 31.24 GiB"),
        }
        return (
            dataclasses.replace(plan, fits=False, **other[len(compiled)])
            if other.get(len(compiled))
            else plan
        )

    monkeypatch.setattr(subprocess_plan, "make_plan_in_subprocess", pretend)
    console = Console(record=True, width=200, file=open(os.devnull, "w"))
    released = Config(train=TrainConfig(batch_size=256, sequence_length=4096))
    found = search_and_compile(released, topology.describe_topology("v6e:16x16"), "", console, {})
    text = console.export_text()
    assert len(compiled) == len(found) == 5 == len(set(compiled))
    assert [p.verdict for p in found] == 3 * ["fits"] + ["does not fit", "failed"]
    for part in (
        "needs 64.00 GiB of 31.24 GiB",
        "the compiler aborted: Check failed: x",
        "candidates do not fit",
        f"{plan.mfu:.1%}",
    ):
        assert part in text
    with refused(256):
        search_and_compile(
            Config(train=TrainConfig(batch_size=7, sequence_length=4097)),
            topology.describe_topology("v6e:16x16"),
            "",
            console,
            {},
        )
    with refused("data=3, expert=2"):
        search_and_compile(
            Config(), topology.describe_topology("v6e:16x16"), "", console, {"data": 3, "expert": 2}
        )


@needs_compiler
def test_search_prices_the_network_between_slices():
    """Two slices of 256 chips: the gradients' way to the other slice and back adds to the time of a
    step, and a shared state leaves half of the moments on each.
    """
    two = topology.describe_topology("v6e:16x16", 2)
    assert (two.chips, len(two.devices), two.title) == (512, 512, "2 × v6e:16x16")
    model, train = ModelConfig(), TrainConfig(batch_size=512, sequence_length=4096)
    fixed = {"expert": 8, "context": 1, "tensor": 1}
    stored = 81_324_862_720 / 256
    for dtype, state, bytes_of_parameter, moments in (
        ("float32", "replicated", 2 / 2 * 4, 8),
        ("bfloat16", "replicated", 2 / 2 * 2, 8),
        ("bfloat16", "sharded", 1 / 2 * (2 + 4), 4),
    ):
        parallel = ParallelConfig(slice_gradients=dtype, slice_state=state)
        best = rank_candidates(model, train, two, fixed, parallel=parallel)[0]
        assert best.mesh_sizes == {"slice": 2, "data": 32, **fixed}
        assert not best.unusable_reason
        crossing = best.step_seconds - estimated_step_seconds(model, best.train, best.mesh, two)
        assert crossing == pytest.approx(stored * bytes_of_parameter / 12.5e9)
        saved = estimated_hbm_bytes(model, best.train, best.mesh) - best.hbm_bytes
        assert saved == pytest.approx(stored * (8 - moments))
    with refused("tpu7x", "v5e", "v5p", "v6e"):
        rank_candidates(model, train, topology.describe_topology("tpu7x:4x4x4", 2), fixed)
