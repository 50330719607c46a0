"""The cost model "calibrated" on known cases: measured seconds, starts, shared links, and transfers
that compete for HBM.
"""

import dataclasses
import importlib.util
import inspect
import statistics

import pytest

from benchmarks.planner.kernel_validation import predict, read_kernels
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.model import expert_parallelism
from qwen3next_jax.ops.routed_experts import layout
from qwen3next_jax.planner import hlo, topology
from qwen3next_jax.planner.calibrated import RATES, TRIPS_BY_FUNCTION, rates_of_chip
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.expert_load import ExpertLayout, ExpertLoad, mean_expert_load
from qwen3next_jax.planner.ideal import SHARED_LINKS, ideal_time
from qwen3next_jax.planner.parts import cost_by_part, part_of_function
from qwen3next_jax.planner.roofline import FunctionCost
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.planner.search import Candidate, candidates_to_compile
from qwen3next_jax.sharding.chips import CHIPS
from qwen3next_jax.sharding.mesh import make_mesh
from tests.refusals import refused

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
GB = 1e9


def estimate(name, mesh, text, before="", **options):
    """The estimate of a program on a slice of `name`: the computations `before`, and the first."""
    slice_ = topology.describe_topology(name)
    program = hlo.parse_program(f"{before}ENTRY %main () -> f32[] {{\n{text}\n}}\n")
    return estimate_time(
        program,
        make_mesh(ParallelConfig(mesh=MeshConfig(**mesh)), slice_.devices),
        slice_.chip,
        slice_.shape,
        cost_model="calibrated",
        **options,
    )


def test_measured_sizes_take_the_measured_seconds():
    rates = RATES["tpu7x"]
    assert rates.product_curve.seconds(2 * 1024**3) == pytest.approx(2 * 1024**3 / 350e12)
    assert rates.product_curve.seconds(80 * 8192**3) == pytest.approx(80 * 8192**3 / 956e12)
    assert rates.hbm_curve.seconds(2**22) == pytest.approx(2**22 / 1379e9)
    assert rates.hbm_curve.seconds(2**40) == pytest.approx(2**40 / 3210e9)
    assert (
        rates.hbm_curve.empty_kernel_seconds
        < rates.hbm_curve.seconds(1)
        < rates.hbm_curve.seconds(2**22)
    )
    assert rates.hbm_curve.seconds(0) == 0


def test_unmeasured_chips_reach_their_neighbour_s_share():
    v5p, v6e = RATES["v5p"], RATES["v6e"]
    size = 1e15
    assert v5p.product_curve.seconds(size) == pytest.approx(size / (827.5e12 * 459 / 918), rel=1e-3)
    assert v5p.hbm_curve.seconds(size) == pytest.approx(size / (3210e9 * 2765 / 3690))
    assert "nearest, v6e" in v5p.rate_sources["products"]
    assert "v6e" not in v6e.rate_sources["products"]
    with refused("H100"):
        rates_of_chip(CHIPS["H100"])


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
def test_collectives_at_once_share_links():
    """It does not wait for the long one, which takes as much longer as the short one needs."""
    axes = dict(data=32, expert=8)
    mesh = MESH.format(**axes)
    long = "  %y = bf16[1000000000]{0} parameter(1)\n" + ASYNC.format(mesh=mesh).split("  %b =")[0]
    long = long.replace("1000000]{0}", "1000000000]{0}")
    short = "  %x = f32[8]{0} parameter(0)\n  ROOT %r = f32[8]{0} all-reduce(%x), "
    short += f"replica_groups={mesh} {{'data','expert'}}"
    alone = [estimate("v6e:16x16", axes, text).seconds for text in (long, short)]
    end = "\n  ROOT %c = bf16[1000000000]{0} all-gather-done(%a)"
    both = estimate("v6e:16x16", axes, long + short.replace("%x", "%z").replace("ROOT ", "") + end)
    assert alone[0] == 0
    assert alone[1] < 1e-5
    whole = estimate("v6e:16x16", axes, long + end).seconds
    assert both.seconds == pytest.approx(whole + alone[1], rel=1e-9)
    assert both.seconds_by_resource["network data+expert"] == pytest.approx(2 * alone[1])


@needs_compiler
@pytest.mark.parametrize("kind, sent", [("all-gather", 15), ("all-reduce", 2 * 15 / 16)])
def test_collectives_take_a_start_and_their_bytes(kind, sent):
    """An all-reduce of the gathered array, as the compiler makes of some gathers, sends twice the
    bytes of the gather.
    """
    axes, size = dict(data=16, expert=4), 1_000_000
    text = f"  %x = bf16[{size}]{{0}} parameter(0)\n  ROOT %g = bf16[{size}]{{0}} {kind}(%x), "
    text += f"replica_groups={MESH.format(**axes)} {{'data'}}, dimensions={{0}}"
    seconds = 2 * size * sent / (4 * 86.3 * GB)
    found = estimate("v5p:4x4x4", axes, text)
    assert found.seconds_by_resource == {"network data": pytest.approx(4.55e-6 + seconds, rel=1e-3)}


COPY = """  %x = f32[50000000]{0} parameter(0)
  %s = (f32[50000000]{0:S(1)}, f32[50000000]{0}, u32[]) copy-start(%x)
  %w = WORK
  ROOT %d = f32[50000000]{0:S(1)} copy-done(%s)"""
MOVE = "f32[50000000]{0} add(%x, %x)"
PRODUCT = "f32[8192,8192]{1,0:S(1)} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@needs_compiler
def test_an_early_copy_takes_idle_hbm():
    name, axes = "v5p:2x2x1", dict(data=4)
    rates = RATES["v5p"]
    copy = 2e8 / (3210e9 * 2765 / 3690)  # the target is in VMEM
    beside_hbm = estimate(name, axes, COPY.replace("WORK", MOVE)).seconds
    assert beside_hbm == pytest.approx(rates.hbm_curve.seconds(6e8) + copy)
    product = "  %p = bf16[8192,8192]{1,0:S(1)} parameter(1)\n" + COPY.replace("WORK", PRODUCT)
    beside_product = estimate(name, axes, product).seconds
    assert beside_product == pytest.approx(rates.product_curve.seconds(2 * 8192**3))


SHORT_COPY = """  %x = f32[50000000]{0} parameter(0)
  %y = f32[1000]{0} parameter(1)
  %s = (f32[50000000]{0:S(1)}, f32[50000000]{0}, u32[]) copy-start(%x)
  %t = (f32[1000]{0:S(1)}, f32[1000]{0}, u32[]) copy-start(%y)
  ROOT %d = f32[1000]{0:S(1)} copy-done(%t)"""
BUFFER = '  %b = f32[50000000]{0} custom-call(), custom_call_target="AllocateBuffer"\n'


@needs_compiler
def test_copies_share_hbm_and_a_buffer_is_no_copy():
    """A short copy beside a long one takes twice its time. A buffer without content takes none."""
    name, axes, rate = "v5p:2x2x1", dict(data=4), 3210e9 * 2765 / 3690
    short = estimate(name, axes, BUFFER + SHORT_COPY).seconds
    assert short == pytest.approx(2 * 4000 / rate)
    end = "\n  %e = f32[50000000]{0:S(1)} copy-done(%s)"
    both = estimate(name, axes, SHORT_COPY + end).seconds
    assert both == pytest.approx((4000 + 2e8) / rate)


TO_HOST = """  %stack = bf16[8,1000000]{1,0:S(5)} parameter(0)
  %x = bf16[1,1000000]{1,0} parameter(1)
  %i = s32[] constant(0)
  %s = (bf16[8,1000000]{1,0:S(5)}, bf16[1,1000000]{1,0}, u32[]) dynamic-update-slice-start(%stack, %x, %i, %i)
  ROOT %d = bf16[8,1000000]{1,0:S(5)} dynamic-update-slice-done(%s)"""  # noqa: E501


# the form that the compiler writes: the operands, the result, and a flag
FROM_HOST = """  %stack = bf16[8,1000000]{1,0:S(5)} parameter(0)
  %i = s32[] constant(0)
  %s = ((bf16[8,1000000]{1,0:S(5)}, s32[], s32[]), bf16[1,1000000]{1,0}, u32[]) dynamic-slice-start(%stack, %i, %i)
  ROOT %d = bf16[1,1000000]{1,0} dynamic-slice-done(%s)"""  # noqa: E501


@needs_compiler
@pytest.mark.parametrize("text, direction", [(TO_HOST, "to"), (FROM_HOST, "from")])
def test_copies_to_the_host_take_their_link(text, direction):
    found = estimate("v6e:2x2", dict(data=4), text)
    assert found.seconds_by_resource == {
        f"copies {direction} the host": pytest.approx(2e6 / (32 * GB))
    }
    assert found.hbm_bytes == 2e6


SCATTER = """  %x = f32[100000,100]{1,0} parameter(0)
  %i = s32[10,1]{1,0} parameter(1)
  %u = f32[10,100]{1,0} parameter(2)
  ROOT %y = f32[100000,100]{1,0} scatter(%x, %i, %u), to_apply=%add"""


@needs_compiler
@pytest.mark.parametrize("fused", [False, True])
def test_a_scatter_moves_the_rows_that_it_changes(fused):
    before, text = "", SCATTER
    if fused:
        before = f"%inner (x: f32[], i: s32[], u: f32[]) -> f32[] {{\n{SCATTER}\n}}\n"
        text = SCATTER.replace(
            "scatter(%x, %i, %u), to_apply=%add", "fusion(%x, %i, %u), calls=%inner"
        )
    assert estimate("v5p:2x2x1", dict(data=4), text, before).hbm_bytes == 40 + 3 * 4000


# 2 shards of 4 experts, 30 tiles of 16 rows: room for 448 choices of any experts, 398 balanced
KERNEL = """  %tile = s32[30]{0} parameter(0)
  %used = s32[1]{0} parameter(1)
  %x = bf16[480,4096]{1,0} parameter(2)
  %w = f32[480,1]{1,0} parameter(3)
  %g = bf16[4,4096,8192]{2,1,0} parameter(4)
  %d = bf16[4,4096,4096]{2,1,0} parameter(5)
  ROOT %expert_forward.1 = bf16[480,4096]{1,0} custom-call(%tile, %used, %x, %w, %g, %d), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1000000000000","bytes_accessed":"1"}}"""  # noqa: E501
LAYOUT = ExpertLayout(expert_shards=2, experts_per_shard=4, tile_count=30, tile_rows=16)
LOOP = """%body (a: f32[]) -> f32[] {
  %a = bf16[8192,8192]{1,0:S(1)} parameter(0)
  ROOT %b = bf16[8192,8192]{1,0:S(1)} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%condition (a: f32[]) -> pred[] {
  ROOT %a = pred[] parameter(0)
}
"""  # noqa: E501


@needs_compiler
@pytest.mark.parametrize("fused", [False, True])
def test_experts_take_the_tiles_in_use(fused, monkeypatch):
    """Balanced experts leave some tiles empty and no choice over; a skewed router fills the tiles,
    and its further choices go through loops.
    """
    axes, product = dict(data=2, expert=2), RATES["v5p"].product_curve.seconds(2 * 8192**3)
    start = "  %a = bf16[8192,8192]{1,0:S(1)} parameter(6)\n  %loop = bf16[8192,8192]{1,0:S(1)} "
    kernel, before = KERNEL, LOOP
    if fused:  # as the compiler fuses a kernel with an update in place
        before += f"%inner (tile: s32[]) -> bf16[] {{\n{KERNEL}\n}}\n"
        call = "fusion(%tile, %used, %x, %w, %g, %d), calls=%inner"
        kernel = KERNEL.split(" custom-call(")[0] + " " + call
    text = f"{start}while(%a), condition=%condition, body=%body\n{kernel}"
    seconds = {}
    function = lambda _, i: "layout _loop_over_overflowing_experts" if i.opcode == "while" else ""
    monkeypatch.setattr(hlo.Program, "source_function", function)
    for skew in (0.0, 1.5):
        found = estimate(
            "v5p:2x2x1",
            axes,
            text,
            before,
            skew=skew,
            source_of=lambda instruction: instruction.name,
        )
        seconds[skew] = {name: cost.seconds for name, cost in found.cost_by_function.items()}
    kernel, full = "expert_forward.1", RATES["v5p"].product_curve.seconds(1e12)
    # On average half a tile of each of the 4 experts is empty.
    balanced, skewed = (mean_expert_load(LAYOUT, skew) for skew in (0.0, 1.5))
    filled = balanced.fullest * 448 / 1.125 / 16
    assert seconds[0.0][kernel] == pytest.approx(full * (filled + 4 / 2) / 30, rel=0.02)
    assert seconds[1.5][kernel] == pytest.approx(full * skewed.used)
    assert skewed.used > 0.97
    assert seconds[0.0]["b"] == pytest.approx(product * balanced.experts_beyond, rel=0.1)
    assert seconds[1.5]["b"] == pytest.approx(product * skewed.experts_beyond)
    assert balanced.experts_beyond < 0.2 < 1 < skewed.experts_beyond
    # What fits and what does not are all choices: the fullest shard's, in 30 tiles of 16 rows.
    fits = skewed.fullest * LAYOUT.balanced_choices * (1 - skewed.beyond)
    assert 0.85 * 480 < fits <= 480
    assert skewed.fullest > 1.2


@needs_compiler
@pytest.mark.parametrize("name", ["expert_forward", "expert_backward_weights"])
@pytest.mark.parametrize("cores", [1, 2])
def test_experts_take_their_products_and_a_start(name, cores):
    """The cores share the tiles of the one kernel, and the matrices of the other."""
    in_vmem = KERNEL.replace("1,0}", "1,0:S(1)}").replace('"1000000000000"', '"1000000000"')
    schedules = {f"{name}.1": Schedule(1.0, 0.0, states_all_trips=False, cores=cores)}
    axes, v5p = dict(data=2, expert=2), CHIPS["v5p"]
    text = in_vmem.replace("expert_forward", name)
    found = estimate("v5p:2x2x1", axes, text, schedules=schedules, skew=1.5)
    steps = 30 / (cores if name == "expert_forward" else 1)
    seconds = 1e9 / (v5p.bf16_flops / 2 * cores) + steps * RATES["v5p"].grid_step_start_seconds
    assert found.seconds == pytest.approx(seconds * mean_expert_load(LAYOUT, 1.5).used)


GROUPED = """  %ends = s32[6]{{0}} parameter(0)
  %group = s32[20]{{0}} parameter(1)
  %x = bf16[2048,640]{{1,0:S(1)}} parameter(2)
  %w = bf16[5,{width}]{{2,1,0:S(1)}} parameter(3)
  %dy = bf16[2048,384]{{1,0:S(1)}} parameter(4)
  ROOT %k.1 = bf16[{out}]{{1,0:S(1)}} custom-call(%ends, %group, {operands}), custom_call_target="tpu_custom_call", {tiling}, backend_config={{"cost_estimate":{{"flops":"1006632960","bytes_accessed":"1"}}}}"""  # noqa: E501


@needs_compiler
@pytest.mark.parametrize(
    "operands, width, out",
    [
        ("%x, %w", "640,384", "2048,384"),
        ("%dy, %w", "640,384", "2048,640"),
        ("%x, %dy", "640,384", "5,640,384"),
    ],
    ids=["product", "gradient of the rows", "gradient of the matrices"],
)
def test_a_grouped_product_takes_all_touched_tiles(operands, width, out):
    """Some tiles of 256 rows have rows of two groups, and the kernel computes them twice. The last
    tiles of the other axes are larger than what is left of the matrices.
    """
    ends = [300, 700, 1200, 2000, 2048]
    visits = sum(
        (end - 1) // 256 - start // 256 + 1 for start, end in zip([0, *ends], ends, strict=False)
    )
    contracted, columns = (384, 640) if operands.startswith("%dy") else (640, 384)
    tiles, of_matrices = (-(-contracted // 512), -(-columns // 256)), operands == "%x, %dy"
    v5p, rates = CHIPS["v5p"], RATES["v5p"]

    def seconds(columns):
        """The seconds of a core that has so many of the tiles of columns."""
        steps, blocks = visits * tiles[0] * columns, 5 * tiles[0] * columns
        of_step = 2 * 256 * 512 * 256 / (v5p.bf16_flops / 2) + rates.grid_step_start_seconds
        added = blocks * 512 * 256 if of_matrices else steps * 256 * 256 / 2
        return steps * of_step + added / 1024 / v5p.clock_hz

    given = dict(operands=operands, width=width, out=out)
    by_xla = GROUPED.format(tiling='frontend_attributes={ragged_dot_tiling="256,512,256"}', **given)
    by_pallas = GROUPED.format(
        tiling='metadata={op_name="f/ragged_dot_tiling_256_512_256/pallas_call"}', **given
    )
    # Two cores share the columns' tiles. Of three tiles, one core computes two.
    shared = seconds(-(-tiles[1] // 2))
    for text in (by_xla, by_pallas):
        assert estimate("v5p:2x2x1", dict(data=4), text).seconds == pytest.approx(shared)
    one_core = {"k.1": Schedule(1.0, 0.0, states_all_trips=False, cores=1)}
    found = estimate("v5p:2x2x1", dict(data=4), by_pallas, schedules=one_core)
    assert found.seconds == pytest.approx(seconds(tiles[1]))
    # The schedule of XLA's kernel is that of one step.
    slow = {"k.1": Schedule(1e5, 0.0, states_all_trips=False, cores=2)}
    in_steps = visits * tiles[0] * -(-tiles[1] // 2) * 1e5 / v5p.clock_hz
    found = estimate("v5p:2x2x1", dict(data=4), by_xla, schedules=slow)
    assert found.seconds == pytest.approx(in_steps)


@needs_compiler
@pytest.mark.parametrize("chip", ["v5p", "tpu7x"])
def test_grouped_products_last_as_long_as_measured_ones(chip):
    """Others measured the kernels. The one constant of a chip that was fitted to them leaves errors
    of about 5 %. Kernels that mask columns are left out: they are up to half as fast.
    """
    kernels = [k for k in read_kernels() if k.chip == chip and k.width % 128 == 0]
    errors = [abs(predict(kernel) / kernel.milliseconds - 1) for kernel in kernels]
    assert len(errors) > 60
    assert statistics.median(errors) < 0.05
    assert sum(error > 0.10 for error in errors) <= len(errors) // 15


@needs_compiler
def test_the_ideal_adds_up_what_shares_links():
    slice_ = topology.describe_topology("v6e:16x16")
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=32, expert=8)), slice_.devices)
    found = ideal_time(ModelConfig(), TrainConfig(batch_size=256), slice_, mesh)
    sums = found.bound["network data"] + found.bound["network expert"]
    assert found.bound[SHARED_LINKS] == found.seconds == pytest.approx(sums)
    assert found.realistic == pytest.approx(sums / RATES["v6e"].reached_link_share)


def test_a_search_compiles_every_expert_size():
    """The formulas are too rough to drop FSDP alone, or 2 or 4 shards of the experts."""

    def candidate(expert, tensor, seconds):
        return Candidate(TrainConfig(), MeshConfig(expert=expert, tensor=tensor), 0.0, seconds, "")

    sizes = (8, 1), (8, 1), (1, 8), (16, 1), (4, 1), (8, 1), (2, 1), (1, 1), (1, 1)
    fitting = [candidate(*size, seconds) for seconds, size in enumerate(sizes)]
    assert [c.step_seconds for c in candidates_to_compile(fitting, 5)] == [0, 1, 4, 6, 7]
    assert [c.step_seconds for c in candidates_to_compile(fitting[:4], 3)] == [0, 1, 2]


def test_parts_have_names_for_readers_and_lose_nothing():
    sources = {
        "expert_implementations split_experts": "experts",
        "moe choose": "router",
        "gated_deltanet GatedDeltaNet.inputs.<genexpr>": "recurrent layers: projections, gates",
        "splash_mha_fwd_segmented_residuals": "attention: scores",
        "cross_entropy _chunk": "head and loss",
        "?": "other",
    }
    costs = {name: FunctionCost(2.0**i, 1.0, 3.0) for i, name in enumerate(sources)}
    parts = cost_by_part(costs | {"moe route": FunctionCost(100.0, 1.0, 3.0)})
    assert parts["router"] == FunctionCost(102.0, 2.0, 6.0)
    assert next(iter(parts)) == "router"
    assert all(part_of_function(name) == part for name, part in sources.items())
    assert sum(part.seconds for part in parts.values()) == 163.0


def test_loops_are_known_by_their_functions():
    functions = {
        member.__qualname__
        for owner in (layout, expert_parallelism._AllToAllExperts)
        for member in vars(owner).values()
        if inspect.isfunction(member)
    }
    assert set(TRIPS_BY_FUNCTION) <= functions
    assert set(TRIPS_BY_FUNCTION.values()) <= {
        field.name for field in dataclasses.fields(ExpertLoad)
    }


def test_only_such_loops_have_choices_beyond():
    one, gathered, ragged = (
        mean_expert_load(ExpertLayout(shards, 32, 400, 64), 1.0) for shards in (1, 8, 16)
    )
    assert one.beyond == one.experts_beyond == one.rounds == 0
    assert gathered.beyond > 0
    assert gathered.experts_beyond > 1
    assert gathered.rounds == 0
    assert ragged.beyond > 0
    assert ragged.experts_beyond == 0
    assert ragged.rounds > 0
