"""Reading compiled programs: against programs whose collectives, loops and FLOPs are known by
construction.

Program text written by hand stands for what the compilers here do not emit; the real TPU
compiler is asked in test_plan.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.compiled import (
    hbm_bytes,
    instruction_flops,
    memory_use,
    parse_replica_groups,
    program_collectives,
    shard_bytes,
)

AXES = ("data", "expert", "tensor")
TRIPS, M, N = 5, 64, 32


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)


def compile_text(mesh, f, *arrays):
    """`arrays`: (shape, spec) of float32 inputs."""
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    return jax.jit(f).lower(*given).compile().as_text()


def looped(mesh, body):
    """Runs `body` on the device's own [M, N] part in a scan of TRIPS."""

    def f(x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, length=TRIPS)[0]

    return functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )(f)


SIZE = 4 * M * N
KNOWN = {
    # name: (body, kind, axes, group, bytes that leave a device in one run)
    "gather": (
        lambda x: jax.lax.all_gather(x, "expert").sum(0),
        "all-gather",
        ("expert",),
        2,
        SIZE,
    ),
    "gather over two": (
        lambda x: jax.lax.all_gather(x, ("data", "tensor")).sum(0),
        "all-gather",
        ("data", "tensor"),
        4,
        3 * SIZE,
    ),
    "scatter": (
        lambda x: jnp.tile(jax.lax.psum_scatter(x, ("data", "expert"), tiled=True), (4, 1)),
        "reduce-scatter",
        ("data", "expert"),
        4,
        SIZE * 3 / 4,
    ),
    "sum": (lambda x: jax.lax.psum(x, "tensor") / 2, "all-reduce", ("tensor",), 2, SIZE),
    "sum over all": (lambda x: jax.lax.psum(x, AXES) / 8, "all-reduce", AXES, 8, 2 * SIZE * 7 / 8),
    "permute": (
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        "collective-permute",
        ("data",),
        8,
        SIZE,
    ),
    "all to all": (
        lambda x: jax.lax.all_to_all(x, "expert", 0, 0, tiled=True),
        "all-to-all",
        ("expert",),
        2,
        SIZE / 2,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_collectives_inside_a_scan(mesh, name):
    body, kind, axes, group, sent = KNOWN[name]
    text = compile_text(mesh, looped(mesh, body), ((8 * M, N), P(AXES)))
    (found,) = program_collectives(hlo.parse_program(text), mesh)
    assert (found.kind, found.axes, found.run_count) == (kind, axes, TRIPS)
    assert found.group_size == group
    assert found.sent_bytes == sent
    assert found.total_sent_bytes == TRIPS * sent


# As libtpu 0.0.50 writes reduce-scatters (numbers shortened): of one array, padded, and of two.
FUSED = """%all-reduce-scatter (input: bf16[62,128]) -> bf16[16,128] {
  %input = bf16[62,128]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[64,128]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_2x0_0
  %sum = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%pad), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %slice = bf16[16,128]{1,0:T(8,128)(2,1)} dynamic-slice(%sum, %id, %id), dynamic_slice_sizes={16,128}
}

%all-reduce-scatter.1 (a: f32[64,128], b: f32[64,128]) -> (f32[16,128], f32[16,128]) {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b = f32[64,128]{1,0:T(8,128)} parameter(1)
  %sums = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) all-reduce(%a, %b), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %first = f32[64,128]{1,0:T(8,128)} get-tuple-element(%sums), index=0
  %second = f32[64,128]{1,0:T(8,128)} get-tuple-element(%sums), index=1
  %id = u32[] partition-id()
  %x = f32[16,128]{1,0:T(8,128)} dynamic-slice(%first, %id, %id), dynamic_slice_sizes={16,128}
  %y = f32[16,128]{1,0:T(8,128)} dynamic-slice(%second, %id, %id), dynamic_slice_sizes={16,128}
  %z = f32[16,128]{1,0:T(8,128)} bitcast(%y)
  ROOT %parts = (f32[16,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) tuple(%x, %z)
}

ENTRY %main (p: bf16[62,128], q: f32[64,128]) -> f32[64,128] {
  %p = bf16[62,128]{1,0:T(8,128)(2,1)} parameter(0)
  %q = f32[64,128]{1,0:T(8,128)} parameter(1)
  %one = bf16[16,128]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
  %two = (f32[16,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) fusion(%q, %q), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %plain = f32[64,128]{1,0:T(8,128)} all-reduce(%q), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}
"""  # noqa: E501


def test_a_sliced_all_reduce_is_a_reduce_scatter(mesh):
    found = program_collectives(hlo.parse_program(FUSED), mesh)
    assert [(c.kind, c.axes, c.sent_bytes) for c in found] == [
        ("reduce-scatter", ("data", "expert"), 64 * 128 * 2 * 3 / 4),
        ("reduce-scatter", ("data", "expert"), 2 * 64 * 128 * 4 * 3 / 4),
        ("all-reduce", ("data", "expert"), 2 * 64 * 128 * 4 * 3 / 4),
    ]


def test_a_ragged_exchange_sends_what_both_buffers_hold(mesh):
    text = """ENTRY %main (a: bf16[40,128], b: bf16[60,128]) -> bf16[60,128] {
  %a = bf16[40,128]{1,0} parameter(0)
  %b = bf16[60,128]{1,0} parameter(1)
  %n = s32[2]{0} constant({0, 0})
  ROOT %x = bf16[60,128]{1,0} ragged-all-to-all(OPERANDS, %n, %n, %n, %n), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}
"""  # noqa: E501
    for operands in ("%a, %b", "%b, %a"):
        (found,) = program_collectives(hlo.parse_program(text.replace("OPERANDS", operands)), mesh)
        assert (found.kind, found.axes, found.sent_bytes) == (
            "ragged-all-to-all",
            ("tensor",),
            40 * 128 * 2 / 2,
        )


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=4], device_ids=([2,2]<=[4]) {'x'}", [[0, 1, 2, 3]]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_replica_groups_in_every_form(text, groups):
    assert sorted(map(sorted, parse_replica_groups(text).tolist())) == sorted(map(sorted, groups))
    assert parse_replica_groups("replica_groups={}") is None


def total(text, of):
    """Sum of `of(program, computation, instruction)` × runs over what stands outside fusions."""
    program = hlo.parse_program(text)
    fused = {
        name
        for step in program.walk()
        if step.instruction.opcode == "fusion"
        for name in step.instruction.called_computations
    }
    inside = {id(i) for name in fused for i in program.computations[name].values()}
    return sum(
        s.run_count * of(program, s.computation, s.instruction)
        for s in program.walk()
        if id(s.instruction) not in inside
    )


def test_flops_of_products_in_nested_loops(mesh):
    b, t, k, v = 3, 8, 16, 24

    def f(x, w):
        def outer(x, _):
            return jax.lax.scan(
                lambda x, _: (jnp.einsum("btk,bkv,bvj->btj", x, w, w.swapaxes(1, 2)), None),
                x,
                length=3,
            )[0], None

        return jax.lax.scan(outer, x, length=4)[0]

    one = Mesh(np.array(jax.devices()[:1]), ("one",))
    text = compile_text(one, f, ((b, t, k), P()), ((b, k, v), P()))
    # the order of the two products is the compiler's
    either = {2 * b * t * k * v * 2, 2 * b * (k * v * k + t * k * k)}
    assert total(text, instruction_flops) in {12 * n for n in either} | {
        2 * b * k * v * k + 12 * 2 * b * t * k * k
    }


LOOP = """HloModule m
%body (p: (s32[], f32[6,8,128], f32[8,128])) -> (s32[], f32[6,8,128], f32[8,128]) {
  %p = (s32[]{:T(128)}, f32[6,8,128]{2,1,0:T(8,128)}, /*index=2*/f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %c = s32[]{:T(128)} copy(%i)
  %one = s32[]{:T(128)} constant(-2)
  %next = s32[]{:T(128)} add(%c, %one), metadata={op_name="a\\"b"}
  %x = f32[6,8,128]{2,1,0:T(8,128)} get-tuple-element(%p), index=1
  %y = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=2
  %r = f32[1,8,128]{2,1,0:T(8,128)} reshape(%y)
  %z = f32[6,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%x, %r, %i, %one, %one)
  ROOT %t = (s32[]{:T(128)}, f32[6,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%next, %z, %y)
}, execution_thread="main"

%condition (q: (s32[], f32[6,8,128], f32[8,128])) -> pred[] {
  %q = (s32[], f32[6,8,128], f32[8,128]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant(0)
  ROOT %more = pred[] compare(%bound, %j), direction=LT
}

ENTRY %main (a: f32[6,8,128], b: f32[8,128]) -> f32[6,8,128] {
  %a = f32[6,8,128]{2,1,0:T(8,128)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
  %start = s32[] constant(11)
  %tuple = (s32[], f32[6,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%start, %a, %b)
  %while = (s32[], f32[6,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) while(%tuple), condition=%condition, body=%body, \
metadata={op_name="LOOPNAME"}
  %k = f32[8,128]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", frontend_attributes={m={
  }}, backend_config={"custom_call_config":{"body":"AAAA","cost_estimate":{"flops":"4242","transcendentals":"0"}}}
  ROOT %out = f32[6,8,128]{2,1,0:T(8,128)} get-tuple-element(%while), index=1
}
"""  # noqa: E501


class Compiled:
    """What a compiled object answers."""

    class memory_analysis:
        argument_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = 1000
        temp_size_in_bytes, generated_code_size_in_bytes = 100_000, 10


@pytest.mark.parametrize(
    "end, direction, trips",
    [(11, "LT", 6), (12, "LT", 6), (12, "LE", 7)],  # down to 1, to 2, to 0
)
def test_trips_of_a_loop_are_counted(end, direction, trips):
    text = LOOP.replace("constant(11)", f"constant({end})")
    program = hlo.parse_program(text.replace("direction=LT", f"direction={direction}"))
    entry = program.computations["main"]
    assert program.loop_trips(entry, entry["while"]) == trips


def test_a_loop_without_stated_trips_is_named():
    assert not hlo.parse_program(LOOP).loops_of_unknown_length()
    assert hlo.parse_program(
        LOOP.replace("constant(11)", "parameter(2)")
    ).loops_of_unknown_length() == ["LOOPNAME"]


def test_flops_of_a_kernel_are_those_it_states():
    assert total(LOOP, instruction_flops) == 4242  # its attributes span lines
    # of a kernel that the compiler fused with an update in place
    other = LOOP.replace(
        '"cost_estimate":{"flops":"4242","transcendentals":"0"}',
        '"cost_estimate": {\n"bytes_accessed":11,\n"flops":4242\n}, "device_type": "",',
    )
    assert other != LOOP
    assert total(other, instruction_flops) == 4242


@pytest.mark.parametrize("name, arrays", [("z", 2), ("r", 1)], ids=["in place", "from VMEM"])
def test_bytes_are_those_of_hbm(name, arrays):
    program = hlo.parse_program(LOOP)
    body = program.computations["body"]
    assert hbm_bytes(program, body, body[name]) == arrays * 4 * 8 * 128


@pytest.mark.parametrize(
    "name, part", [("jvp()/while", "activations"), ("transpose(jvp())/while", "gradients")]
)
def test_memory_by_part(name, part):
    found = memory_use(Compiled(), hlo.parse_program(LOOP.replace("LOOPNAME", name)), {}, {})
    assert getattr(found, part) == 4 * 6 * 8 * 128
    assert found.temporaries == 100_000 - 4 * 6 * 8 * 128
    assert found.peak == 1000 + 100_000 + 10


def test_the_compiler_s_total_of_allocations_counts(monkeypatch):
    """It can be less than the sum of the temporary buffers, which share memory."""
    monkeypatch.setattr(Compiled.memory_analysis, "total_allocation_bytes", 90_000, raising=False)
    assert memory_use(Compiled(), hlo.parse_program(LOOP), {}, {}).peak == 90_000 + 10


def test_shard_bytes(mesh):
    leaf = jax.ShapeDtypeStruct(
        (16, 4), jnp.bfloat16, sharding=NamedSharding(mesh, P(("data", "expert")))
    )
    assert shard_bytes({"a": leaf, "b": leaf}) == 2 * 2 * 16 * 4 / 4


@pytest.mark.parametrize(
    "attributes, base, kernel, out, expected",
    [
        ("dim_labels=bf_io->bf", (8, 16), (16, 4), (8, 4), 2 * 8 * 16 * 4),
        # a batch dimension of 3 written as a window with holes: one product each
        (
            "window={size=3 pad=0_0 stride=2 lhs_dilate=3}, dim_labels=b0f_0io->b0f",
            (8, 3, 16),
            (3, 16, 4),
            (8, 3, 4),
            2 * 8 * 3 * 16 * 4,
        ),
        # an ordinary convolution: 4 taps over 10, padded by 3
        (
            "window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f",
            (2, 10, 16),
            (4, 16, 8),
            (2, 10, 8),
            2 * 2 * (10 * 4 - 6) * 16 * 8,
        ),
    ],
    ids=("product", "batched", "convolution"),
)
def test_products_as_convolutions(attributes, base, kernel, out, expected):
    a, b, c = (f"bf16[{','.join(map(str, dims))}]" for dims in (base, kernel, out))
    text = (
        f"ENTRY %m () -> f32[] {{\n  %a = {a} parameter(0)\n  %b = {b} parameter(1)\n"
        f"  ROOT %c = {c} convolution(%a, %b), {attributes}\n}}\n"
    )
    assert total(text, instruction_flops) == expected
    assert (
        total(
            text.replace(", dim", ", operand_precision={highest,highest}, dim", 1),
            instruction_flops,
        )
        == 6 * expected
    )
