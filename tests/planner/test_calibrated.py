"""The cost model "calibrated" on known cases: measured seconds, starts, shared links, and transfers
that compete for HBM.
"""

import importlib.util

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.planner import hlo, topology
from qwen3next_jax.planner.calibrated import RATES, rates_of
from qwen3next_jax.planner.ideal import SHARED_LINKS, ideal_time
from qwen3next_jax.planner.parts import by_part, part_name
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.roofline import SourceCost
from qwen3next_jax.planner.search import Candidate, choose
from qwen3next_jax.sharding.chips import CHIPS
from qwen3next_jax.sharding.mesh import make_mesh

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
GB = 1e9


def estimate(name, mesh, text):
    """The estimate of a program of one computation on a slice of `name`."""
    slice_ = topology.describe_topology(name)
    program = hlo.parse(f"ENTRY %main () -> f32[] {{\n{text}\n}}\n")
    return estimate_time(
        program,
        make_mesh(ParallelConfig(mesh=MeshConfig(**mesh)), slice_.devices),
        slice_.chip,
        slice_.shape,
        cost_model="calibrated",
    )


def test_measured_sizes_take_the_measured_seconds():
    rates = RATES["tpu7x"]
    assert rates.products.seconds(2 * 1024**3) == pytest.approx(2 * 1024**3 / 350e12)
    assert rates.products.seconds(80 * 8192**3) == pytest.approx(80 * 8192**3 / 956e12)
    assert rates.hbm.seconds(2**22) == pytest.approx(2**22 / 1379e9)
    assert rates.hbm.seconds(2**40) == pytest.approx(2**40 / 3210e9)
    assert rates.hbm.start < rates.hbm.seconds(1) < rates.hbm.seconds(2**22)
    assert rates.hbm.seconds(0) == 0


def test_a_chip_without_a_measurement_reaches_the_share_of_the_peak_of_the_nearest():
    v5p, v6e = RATES["v5p"], RATES["v6e"]
    size = 1e15
    assert v5p.products.seconds(size) == pytest.approx(size / (827.5e12 * 459 / 918), rel=1e-3)
    assert v5p.hbm.seconds(size) == pytest.approx(size / (3210e9 * 2765 / 3690))
    assert "nearest, v6e" in v5p.sources["products"] and "v6e" not in v6e.sources["products"]
    with pytest.raises(UserError, match="H100"):
        rates_of(CHIPS["H100"])


MESH = "mesh['data'={data},'expert'={expert},'context'=1,'tensor'=1]"
ASYNC = """  %x = bf16[1000000]{{0}} parameter(0)
  %a = (bf16[1000000]{{0}}, bf16[1000000]{{0}}) all-gather-start(%x), replica_groups={mesh} {{'data'}}, dimensions={{0}}
  %b = (bf16[1000000]{{0}}, bf16[1000000]{{0}}) all-gather-start(%x), replica_groups={mesh} {{'expert'}}, dimensions={{0}}
  %c = bf16[1000000]{{0}} all-gather-done(%a)
  ROOT %d = bf16[1000000]{{0}} all-gather-done(%b)"""  # noqa: E501


@needs_compiler
@pytest.mark.parametrize(
    "name, axes, shared",
    [
        ("v5p:4x4x4", dict(data=16, expert=4), False),  # two dimensions of the torus, and the third
        ("v6e:16x16", dict(data=32, expert=8), True),  # both axes lie along both dimensions
    ],
)
def test_links_along_one_dimension_are_one_resource(name, axes, shared):
    mesh = MESH.format(**axes)
    text = "  %x = bf16[1000000]{0} parameter(0)\n  ROOT %g = bf16[1000000]{0} "
    text += f"all-gather(%x), replica_groups={mesh} {{'AXIS'}}, dimensions={{0}}"
    alone = [estimate(name, axes, text.replace("AXIS", axis)).seconds for axis in axes]
    both = estimate(name, axes, ASYNC.format(mesh=mesh)).seconds
    assert both == pytest.approx(sum(alone) if shared else max(alone))


@needs_compiler
@pytest.mark.parametrize("kind, sent", [("all-gather", 15), ("all-reduce", 2 * 15 / 16)])
def test_a_collective_takes_a_start_and_its_bytes_at_the_measured_rate(kind, sent):
    """An all-reduce of the gathered array, as the compiler makes of some gathers, sends twice the
    bytes of the gather.
    """
    axes, size = dict(data=16, expert=4), 1_000_000
    text = f"  %x = bf16[{size}]{{0}} parameter(0)\n  ROOT %g = bf16[{size}]{{0}} {kind}(%x), "
    text += f"replica_groups={MESH.format(**axes)} {{'data'}}, dimensions={{0}}"
    seconds = 2 * size * sent / (4 * 86.3 * GB)
    found = estimate("v5p:4x4x4", axes, text)
    assert found.bound == {"network data": pytest.approx(4.55e-6 + seconds, rel=1e-3)}


COPY = """  %x = f32[50000000]{0} parameter(0)
  %s = (f32[50000000]{0:S(1)}, f32[50000000]{0}, u32[]) copy-start(%x)
  %w = WORK
  ROOT %d = f32[50000000]{0:S(1)} copy-done(%s)"""
MOVE = "f32[50000000]{0} add(%x, %x)"
PRODUCT = "f32[8192,8192]{1,0:S(1)} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@needs_compiler
def test_an_early_copy_takes_the_hbm_time_that_others_leave():
    name, axes = "v5p:2x2x1", dict(data=4)
    rates = RATES["v5p"]
    copy = 2e8 / (3210e9 * 2765 / 3690)  # the target is in VMEM
    beside_hbm = estimate(name, axes, COPY.replace("WORK", MOVE)).seconds
    assert beside_hbm == pytest.approx(rates.hbm.seconds(6e8) + copy)
    product = "  %p = bf16[8192,8192]{1,0:S(1)} parameter(1)\n" + COPY.replace("WORK", PRODUCT)
    beside_product = estimate(name, axes, product).seconds
    assert beside_product == pytest.approx(rates.products.seconds(2 * 8192**3))


@needs_compiler
def test_the_ideal_adds_up_what_shares_links_and_realistic_is_slower():
    slice_ = topology.describe_topology("v6e:16x16")
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=32, expert=8)), slice_.devices)
    found = ideal_time(ModelConfig(), TrainConfig(batch_size=256), slice_, mesh)
    sums = found.bound["network data"] + found.bound["network expert"]
    assert found.bound[SHARED_LINKS] == found.seconds == pytest.approx(sums)
    assert found.realistic == pytest.approx(sums / RATES["v6e"].link_share)


def test_a_search_compiles_every_size_of_expert_parallelism_that_fits():
    """The formulas are too rough to drop FSDP alone, or 2 or 4 shards of the experts."""

    def candidate(expert, seconds):
        return Candidate(TrainConfig(), MeshConfig(expert=expert), 0.0, seconds, "")

    fitting = [candidate(e, s) for s, e in enumerate((8, 8, 8, 16, 4, 8, 2, 1, 1))]
    assert [c.seconds for c in choose(fitting, 5)] == [0, 1, 4, 6, 7]
    assert [c.seconds for c in choose(fitting[:4], 3)] == [0, 1, 2]


def test_parts_have_names_for_readers_and_lose_nothing():
    sources = {
        "expert_forms split_experts": "experts",
        "moe choose": "router",
        "gated_deltanet GatedDeltaNet.inputs.<genexpr>": "recurrent layers: projections, gates",
        "splash_mha_fwd_segmented_residuals": "attention: scores",
        "cross_entropy _chunk": "head and loss",
        "?": "other",
    }
    costs = {name: SourceCost(2.0**i, 1.0, 3.0) for i, name in enumerate(sources)}
    parts = by_part(costs | {"moe route": SourceCost(100.0, 1.0, 3.0)})
    assert parts["router"] == SourceCost(102.0, 2.0, 6.0) and next(iter(parts)) == "router"
    assert all(part_name(name) == part for name, part in sources.items())
    assert sum(part.seconds for part in parts.values()) == 163.0
