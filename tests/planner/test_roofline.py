"""The model of time on known cases: collectives on a torus, work beside them, and kernels."""

import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.ops import attention, gated_delta_rule
from qwen3next_jax.planner import compiled, hlo, schedule, topology
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.roofline import Network, _delta_rule_seconds
from qwen3next_jax.sharding.chips import CHIPS
from qwen3next_jax.sharding.mesh import make_mesh

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
GB = 1e9


def seconds(name, mesh, text):
    """Estimate of a program of one computation on a slice of `name`."""
    slice_ = topology.describe_topology(name)
    program = hlo.parse_program(f"ENTRY %main () -> f32[] {{\n{text}\n}}\n")
    return estimate_time(
        program,
        make_mesh(ParallelConfig(mesh=MeshConfig(**mesh)), slice_.devices),
        slice_.chip,
        slice_.shape,
    )


GATHER = """  %x = bf16[1000000]{0} parameter(0)
  ROOT %g = bf16[1000000]{0} all-gather(%x), replica_groups=mesh['data'=16,'expert'=4,'context'=1,'tensor'=1] {'AXIS'}, dimensions={0}"""  # noqa: E501


@needs_compiler
@pytest.mark.parametrize(
    "name, sizes, axis, links",
    [
        ("v5p:4x4x4", (16, 4), "data", 4),
        ("v5p:4x4x4", (16, 4), "expert", 2),
        ("v6e:16x16", (32, 8), "expert", 2),
        ("v6e:16x16", (32, 8), "data", 2 / 2 + 2 / 4),
        ("v6e:16x16", (16, 16), "expert", 2),
    ],
)
def test_a_gather_takes_every_link_of_its_dimensions(name, sizes, axis, links):
    """Of a network of two dimensions a group of 8 is a block of 2 × 4 in lines, of 16 a ring."""
    axes = dict(zip(("data", "expert"), sizes))
    gather = GATHER.replace(
        "'data'=16,'expert'=4", "'data'={data},'expert'={expert}".format(**axes)
    )
    found = seconds(name, axes, gather.replace("AXIS", axis))
    assert found.seconds_by_resource == {
        f"network {axis}": pytest.approx(2e6 * (axes[axis] - 1) / (links * 100 * GB))
    }


@needs_compiler
def test_a_dimension_that_does_not_close_is_a_line():
    gather = GATHER.replace("'data'=16,'expert'=4", "'data'=2,'expert'=2").replace("AXIS", "data")
    found = seconds("v5p:2x2x1", dict(data=2, expert=2), gather)
    assert found.seconds == pytest.approx(2e6 / (100 * GB))


@needs_compiler
@pytest.mark.parametrize("name, closes", [("v5p:2x4x4", False), ("v5p:4x4x4", True)])
def test_only_whole_cubes_close(name, closes):
    slice_ = topology.describe_topology(name)
    mesh = make_mesh(ParallelConfig(), slice_.devices)
    assert Network(mesh, slice_.chip, slice_.shape).closes == (closes,) * 3


TRANSFER = """  %x = f32[1000,1000]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (f32[1000,1000]{1,0}, u32[]{:S(2)}, token[]) send(%x, %t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.59_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}
BETWEEN  %r = (f32[1000,1000]{1,0}, u32[]{:S(2)}, token[]) recv(%t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.59_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sd = token[] send-done(%s), channel_id=2, is_host_transfer=true
  ROOT %rd = (f32[1000,1000]{1,0}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true"""  # noqa: E501


@needs_compiler
def test_transfers_between_slices_overlap_with_work():
    """Four slices: of an all-reduce each device sends 2 · 3/4 of its bytes, at 12.5 GB/s."""
    described = topology.describe_topology("v6e:2x2", 4)
    mesh = make_mesh(ParallelConfig(), described.devices)
    copy = "  %c = f32[1000,1000]{1,0} copy(%x)\n"
    found = []
    for between in ("", copy):
        text = TRANSFER.replace("BETWEEN", between)
        program = hlo.parse_program(f"ENTRY %main () -> f32[] {{\n{text}\n}}\n")
        (collective,) = compiled.program_collectives(program, mesh)
        assert (collective.kind, collective.axes, collective.group_size) == (
            "all-reduce",
            ("slice",),
            4,
        )
        assert collective.total_sent_bytes == pytest.approx(1.5 * 4e6)
        found.append(estimate_time(program, mesh, described.chip, described.shape))
    seconds = 1.5 * 4e6 / (12.5 * GB)
    assert found[0].seconds_by_resource == {"network slice": pytest.approx(seconds)}
    copying = 2 * 4e6 / described.chip.hbm_bandwidth
    assert found[1].seconds_by_resource == {
        "network slice": pytest.approx(seconds - copying),
        "hbm": pytest.approx(copying),
    }


@needs_compiler
def test_two_slices_send_half_of_a_gather():
    """A gather of 4 + 4 chips: of the 7 parts that a chip sends on a ring, one crosses."""
    described = topology.describe_topology("v6e:2x2", 2)
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(slice=1)), described.devices)
    collective = compiled.Collective("all-gather", ("data",), 8, 7e6, 1)
    within = 6e6 / (2 * 100 * GB)
    network = Network(mesh, described.chip, described.shape)
    assert network.collective_seconds(collective, None) == pytest.approx(1e6 / (12.5 * GB) + within)


PERMUTE = """  %x = bf16[1000000]{0} parameter(0)
  ROOT %p = bf16[1000000]{0} collective-permute(%x), source_target_pairs={PAIRS}"""


def _exchange(pairs, axes, name):
    """Seconds of one permutation along `context`: the same pairs of its shards in every group."""
    sizes = [axes.get(axis, 1) for axis in ("data", "expert", "context", "tensor")]
    places = np.arange(np.prod(sizes)).reshape(sizes)
    every = [
        f"{{{i},{j}}}"
        for a, b in pairs
        for i, j in zip(places[:, :, a].ravel(), places[:, :, b].ravel())
    ]
    return seconds(name, axes, PERMUTE.replace("PAIRS", ",".join(every))).seconds


@needs_compiler
@pytest.mark.parametrize(
    "name, axes",
    [
        ("v5p:8x8x8", dict(data=2, expert=8, context=32)),
        ("v5p:8x8x8", dict(data=16, expert=8, context=4)),
        ("v6e:16x16", dict(data=4, expert=8, context=8)),
        ("v6e:8x8", dict(data=1, context=64)),
    ],
)
def test_a_ring_takes_each_link_once(name, axes):
    n = axes["context"]
    assert _exchange([(i, (i + 1) % n) for i in range(n)], axes, name) == pytest.approx(
        2e6 / (100 * GB)
    )


@needs_compiler
@pytest.mark.parametrize(
    "pairs, busiest",
    [
        ([(0, 3)], 1),
        ([(i, (i + 2) % 8) for i in range(8)], 2),
        ([(0, 2), (1, 4)], 2),
        ([(0, 2), (4, 2)], 1),
        ([(0, 4)], 0.5),
        ([(i, (i + 4) % 8) for i in range(8)], 2),
        ([(0, 0), (1, 1)], 0),
    ],
)
def test_transfers_that_meet_on_a_link_share_it(pairs, busiest):
    """On a ring of eight chips; the other chips of the slice do the same along their own rings."""
    assert _exchange(pairs, dict(data=64, context=8), "v5p:8x8x8") == pytest.approx(
        busiest * 2e6 / (100 * GB)
    )


@needs_compiler
def test_a_transfer_goes_along_one_dimension_after_the_other():
    """On 4 × 4 chips row by row 0 → 5 turns once, on one of the two ways round, where it meets 4
    → 6 or 1 → 9.
    """
    found = [
        _exchange([(0, 5), other], dict(data=1, context=16), "v6e:4x4") * (100 * GB) / 2e6
        for other in ((4, 6), (1, 9))
    ]
    assert sorted(found) == pytest.approx([1, 2])


@needs_compiler
def test_an_open_dimension_has_one_way():
    swap = [(i, 3 - i) for i in range(4)]  # both ways over the middle: 0 → 3 and 1 → 2
    assert _exchange(swap, dict(data=4, context=4), "v6e:4x4") == pytest.approx(
        2 * 2e6 / (100 * GB)
    )


@needs_compiler
def test_split_collectives_hide_behind_work():
    """A split gather beside a product: the longer of the two; whatever is not split adds up."""
    product = (
        "  %w = bf16[4096,4096]{1,0} parameter(1)\n  %p = bf16[4096,4096]{1,0} "
        "dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    )
    groups = "replica_groups={{0,1},{2,3}}, dimensions={0}"
    x = "  %x = bf16[SIZE]{0} parameter(0)\n"
    split = (
        x + f"  %g = (bf16[SIZE], bf16[SIZE]) all-gather-start(%x), {groups}\n{product}  ROOT %d "
        f"= bf16[SIZE]{{0}} all-gather-done(%g)"
    )
    whole = x + f"  %g = bf16[SIZE]{{0}} all-gather(%x), {groups}\n{product}"
    compute, flops = 2 * 4096**3 / CHIPS["v5p"].bf16_flops, 2 * 4096**3
    for size in (1_000_000, 100_000_000):
        network = 2 * size / (100 * GB)
        found = seconds("v5p:2x2x1", dict(data=2, tensor=2), split.replace("SIZE", str(size)))
        assert found.seconds == pytest.approx(max(compute, network))
        assert found.flops == flops
        assert found.seconds_by_resource.get("network tensor", 0) == pytest.approx(
            max(network - compute, 0)
        )
        assert seconds(
            "v5p:2x2x1", dict(data=2, tensor=2), whole.replace("SIZE", str(size))
        ).seconds == pytest.approx(compute + network)


@needs_compiler
def test_a_slice_brought_to_vmem_moves_its_own_bytes():
    """Not those of the array that it is cut from, which the compiler names first; of a copy it
    names the target first.
    """
    started = (
        "  %x = s8[64000]{0} parameter(0)\n  %s = (RESULT, s32[]{:S(2)}) OP-start(%x)\n  ROOT %d "
        "= PART OP-done(%s)"
    )
    for op, result, part, moved in (
        ("slice", "(s8[64000]{0}), s8[1000]{0:S(1)}", "s8[1000]{0:S(1)}", 1000),
        ("copy", "s8[64000]{0:S(1)}, s8[64000]{0}", "s8[64000]{0:S(1)}", 64000),
    ):
        text = started.replace("RESULT", result).replace("PART", part).replace("OP", op)
        assert seconds("v6e:2x2", dict(data=4), text).hbm_bytes == moved


@needs_compiler
def test_a_collective_inside_a_fusion_takes_the_network():
    slice_ = topology.describe_topology("v5p:2x2x1")
    text = """%scatter (x: bf16[1000000]) -> bf16[500000] {
  %x = bf16[1000000]{0} parameter(0)
  %sum = bf16[1000000]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %slice = bf16[500000]{0} dynamic-slice(%sum, %id), dynamic_slice_sizes={500000}
}

ENTRY %main (p: bf16[1000000]) -> bf16[500000] {
  %p = bf16[1000000]{0} parameter(0)
  ROOT %f = bf16[500000]{0} fusion(%p), kind=kCustom, calls=%scatter
}
"""
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, tensor=2)), slice_.devices)
    found = estimate_time(hlo.parse_program(text), mesh, slice_.chip, slice_.shape)
    assert found.seconds_by_resource == {"network tensor": pytest.approx(1e6 / (100 * GB))}
    assert found.hbm_bytes == 3e6


@needs_compiler
@pytest.mark.parametrize(
    "axis, expected", [("core", 2e6 / (600 * GB)), ("chip", 2 * 3 * 2e6 / (2 * 100 * GB))]
)
def test_two_devices_of_a_chip_share_its_links(axis, expected):
    slice_ = topology.describe_topology("tpu7x:2x2x1")
    assert slice_.chips == 4
    assert len(slice_.devices) == 8
    devices = sorted(slice_.devices, key=lambda d: (*d.coords, d.core_on_chip))
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("chip", "core"))
    text = GATHER.replace(
        "'data'=16,'expert'=4,'context'=1,'tensor'=1", "'chip'=4,'core'=2"
    ).replace("AXIS", axis)
    found = estimate_time(
        hlo.parse_program(f"ENTRY %main () -> f32[] {{\n{text}\n}}\n"),
        mesh,
        slice_.chip,
        slice_.shape,
    )
    assert found.seconds_by_resource == {f"network {axis}": pytest.approx(expected)}


@needs_compiler
@pytest.mark.parametrize(
    "pair, expected", [("{0,1}", 2e6 / (600 * GB)), ("{0,2},{1,3}", 2 * 2e6 / (100 * GB))]
)
def test_devices_of_a_chip_share_its_link(pair, expected):
    slice_ = topology.describe_topology("tpu7x:2x2x1")
    devices = sorted(slice_.devices, key=lambda d: (*d.coords, d.core_on_chip))
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("chip", "core"))
    text = f"ENTRY %main () -> f32[] {{\n{PERMUTE.replace('PAIRS', pair)}\n}}\n"
    assert estimate_time(
        hlo.parse_program(text), mesh, slice_.chip, slice_.shape
    ).seconds == pytest.approx(expected)


# ---- kernels
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels():
    """Name → [(FLOPs, seconds) of one call] on v6e of attention and the delta rule, forward and
    backward, a row over two shards.
    """
    slice_ = topology.describe_topology("v6e:2x2")
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, context=2)), slice_.devices)
    spec = jax.sharding.PartitionSpec("data", "context")

    def both_ways(q, k, v, decay, beta):
        def loss(q, k, v):
            o, _ = gated_delta_rule(q, k, v, g=decay, beta=beta, axis_name="context")
            return jnp.sum(o.astype(jnp.float32)) + jnp.sum(
                attention(q, k, v, axis_name="context").astype(jnp.float32)
            )

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    def place(*heads, dtype=jnp.bfloat16):  # one row of 256 tokens a device
        return jax.ShapeDtypeStruct(
            (2, 512, *heads), dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
        )

    split = jax.shard_map(both_ways, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = (
            jax.jit(split).lower(*[place(4, 128)] * 3, *[place(4, dtype=jnp.float32)] * 2).compile()
        )
    program = hlo.parse_program(step.as_text())
    assert not compiled.kernels_of_unknown_cost(program)
    found = {}
    for s in program.walk():
        if s.instruction.attribute("custom_call_target") == '"tpu_custom_call"':
            rule = compiled.parse_delta_rule_call(s.computation, s.instruction)
            name = (
                rule.pass_name
                if rule
                else s.instruction.name.split(".")[0]
                .removesuffix("_no_residuals")
                .removesuffix("_residuals")
            )
            found.setdefault(name, []).append(
                (
                    compiled.instruction_flops(program, s.computation, s.instruction),
                    _delta_rule_seconds(s.computation, s.instruction, slice_.chip),
                )
            )
    return found


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kernel, products", [("splash_mha_fwd", 2), ("splash_mha_dkv", 5)])
def test_a_ring_s_own_block_is_causal(kernels, kernel, products):
    """Two blocks of 128 queries a shard: its own keys are causal over both, a visit is two pairs
    without a mask.
    """
    pytest.importorskip("qwen3next_jax.kernels")
    causal, pair = products * 2 * 4 * 256 * 256 * 128 / 2, products * 2 * 4 * 128 * 128 * 128
    assert sorted(flops for flops, _ in kernels[kernel]) == [pair, pair, causal]


@pytest.mark.slow
@needs_compiler
def test_delta_rule_kernels_of_a_split_row(kernels):
    """FLOPs by docs/notes (delta-rule, context-parallel; d = 128, C = 64), cycles by
    `benchmarks/kernels/delta_rule_tpu_schedule.py`.
    """
    pytest.importorskip("qwen3next_jax.kernels")
    d, c, calls = 128, 64, 256 * 4
    expected = {
        "map": (12 * d * d + 10 * c * d, 0.489e6),
        "forward with known inverses": (6 * d * d + 8 * c * d, 0.261e6),
        "backward": (14 * d * d + 20 * c * d, 0.654e6),
    }
    for name, (flops, cycles) in expected.items():  # cycles: of 4096 tokens and 32 heads
        assert kernels[name] == [
            (
                calls * flops,
                pytest.approx(calls * cycles / (4096 * 32) / CHIPS["v6e"].clock_hz, rel=0.01),
            )
        ], name
    assert "forward" not in kernels


def test_a_kernel_that_nothing_is_known_of_is_named():
    text = """ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %splash_mha_fwd.1 = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/unmarked"}
  %stated = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"5"}}}
  %offsets = s32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %new = bf16[8,128]{1,0} custom-call(%stated), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    program = hlo.parse_program(text)
    assert compiled.kernels_of_unknown_cost(program) == ["jit(f)/unmarked", "new"]
    # A schedule with all its trips says it; one of a loop of unknown length does not.
    schedules = {
        "splash_mha_fwd.1": schedule.Schedule(cycles=1e6, copied_bytes=0.0, states_all_trips=True),
        "new": schedule.Schedule(cycles=1e6, copied_bytes=0.0, states_all_trips=False),
    }
    assert compiled.kernels_of_unknown_cost(program, schedules) == ["new"]


BUNDLES = """     0   :  { %s1 = sld [smem:[#allocation0]] /* megacore core id :: core id */  ;;  %s2 = operand [shape: bf16[64,128]] \
/* The window shape is bf16[8,128], while the full shape is bf16[64,128]. */ } /* entry bundle: %twin.1 = custom-call(%x) */
   0x1 LB: > { /* Start region 7 */ %v1 = vmatmul.f32 %v0 }
   0x2   : > { %p1 = scmp.ge.s32.totalorder %s9, 6 /* loop exit test */ ;; %s9 = sadd.s32 1, %s9 }
   0x3   : > { %5 = sbr.rel (!%p1) target = $region7 }
   0x4   :  { %v3 = vadd %v2, %v2 }
"""  # noqa: E501


SKIPPING = """     0   :  { %s1 = sld [smem:[#allocation0]] }
   0x1 LB: > { /* Start region 7 */ %v1 = vmatmul.f32 %v0 }
   0x2   : > { %s8 = sadd.s32 LAST, %s5 /* iteration index */ }
   0x3   : > { %p2 = scmp.ne.s32.totalorder %s8, 0  ;;  %9 = sbr.rel (%p2) target = $region8 }
   0x4   : > { }
   0x5   : > { }
   0x6   : > { }
   0x7   : > { }
   0x8   : > { %v2 = vst %v1 } /* Start region 9 */
   0x9   : > { %v3 = vst %v1 } /* End region 9 */
   0xa PF: > { %p1 = scmp.ge.s32.totalorder %s9, 16 /* loop exit test */ } /* Start/End empty region 8 */
   0xb   : > { %s9 = sadd.s32 1, %s9 }
   0xc   : > { %5 = sbr.rel (!%p1) target = $region7 }
"""  # noqa: E501


@pytest.mark.parametrize("last, share", [(2**32 - 7, 1 / 8), (0, 1)])
def test_the_last_step_of_a_product_counts_once(last, share):
    """A loop of 12 bundles and 16 trips. The two that write the result run if an index minus 7 is
    0, so in one of 8 steps; or it is not said how often (the index is 0).
    """
    text = SKIPPING.replace("LAST", str(last))
    loops, total = schedule.read_loops(text)
    assert schedule.count_cycles(loops, total) == 1 + 16 * 12
    assert schedule.count_skipped_bundles(text, loops) == 2 * 16 * (1 - share)


def test_a_kernel_lasts_its_schedule_and_copies(tmp_path):
    """Three bundles, 6 trips, and two beside them; two cores that copy 2 KiB each a trip; one
    schedule for two alike.
    """

    def program(attributes):
        return hlo.parse_program(f"""ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {{
  %x = bf16[64,128]{{1,0}} parameter(0)
  %twin.1 = bf16[64,128]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call"{attributes}
  %twin.2 = bf16[64,128]{{1,0}} custom-call(%twin.1), custom_call_target="tpu_custom_call"{attributes}
  ROOT %sum = bf16[64,128]{{1,0}} add(%twin.2, %x)
}}
""")  # noqa: E501

    (tmp_path / "1-twin.1-01-final_bundles.txt").write_text(BUNDLES)
    v5p, plain, stating = (
        CHIPS["v5p"],
        program(""),
        program(
            ", "
            'backend_config={"custom_call_config":{"cost_estimate":{"flops":"9000000000","bytes_accessed":"40000"}}}'
        ),
    )
    found = schedule.read_schedules(tmp_path, plain)
    assert found == dict.fromkeys(
        ("twin.1", "twin.2"),
        schedule.Schedule(cycles=20, copied_bytes=2048 * 6 * 2, states_all_trips=True, cores=2),
    )
    mesh, others = Mesh(np.array(jax.devices()[:1]), ("data",)), 3 * 2**14 / v5p.hbm_bandwidth
    network = mock.patch("qwen3next_jax.planner.estimate.Network", lambda *_: None)

    def took(program, cycles):
        with network:
            got = estimate_time(
                program,
                mesh,
                v5p,
                (1,),
                {name: s._replace(cycles=cycles) for name, s in found.items()},
            )
        assert sum(part.seconds for part in got.cost_by_function.values()) == pytest.approx(
            got.seconds
        )
        return got.seconds - others

    # what it reads and writes, at the least
    assert took(plain, 20) == pytest.approx(2 * 2**15 / v5p.hbm_bandwidth)
    assert took(stating, 20) == pytest.approx(2 * 9e9 / v5p.bf16_flops)
    assert took(stating, 1e6) == pytest.approx(2 * 1e6 / v5p.clock_hz)
