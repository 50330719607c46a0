"""Holds the planner against training steps that others measured on TPU pods and published: each row
is a model, a slice, a batch, a sharding and a remat policy as a configuration of this project,
predicted by every cost model (docs/planner_validation.md).

    python benchmarks/planner/validation.py                         prints the table
    python benchmarks/planner/validation.py --compile=llama_8b_v6e  makes the plan of a row again

The plans are in docs/planner/validation. `--compile` takes names of ROWS, separated by commas, and
compiles them one after another, each in a process of its own: 3 to 80 minutes of a CPU each.
No TPU takes part. `--programs=FOLDER` writes the compiled programs and their schedules there; a
program that is there is priced again, not compiled.

Where the kernels of the measured program are known, the compiled one contains them
(`measured_kernels.py`), and the compiler gets the options that were published.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax

from benchmarks import harness
from benchmarks.planner.measured_kernels import MeasuredKernels, install
from qwen3next_jax.common.digests import sha256_json
from qwen3next_jax.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.calibrated import RATES
from qwen3next_jax.planner.estimate import COST_MODELS, estimate_time
from qwen3next_jax.planner.planning import PROGRAM, make_plan
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh

# raised when a cost model changes for every row, so that older plans are refused
PRICES = 4
# fields of a plan that follow from the prices, beside the estimates that are made again
OF_PRICES = (
    *("step_seconds", "tokens_per_second", "mfu", "mfu_roofline", "ideal"),
    *("parts", "bound_seconds", "binding", "hbm_bytes"),
    "expert_load",
)
PLANS = harness.ROOT / "docs/planner/validation"


class Row(NamedTuple):
    """A measured training step and the configuration that stands for it.

    Attributes:
      number: the row of the list of measured steps from which it was taken.
      what: model and slice, for readers.
      topology: the slice.
      data: size of the mesh axis `data`: the number of devices over which FSDP splits.
      rows, tokens: rows of one device, and tokens of a row.
      remat: what the backward pass keeps.
      measured: seconds of a step, of each run that was published.
      model: settings of the model.
      source: where the seconds were published.
      differs: how the measured program differs from the one that is compiled here.
      mean_dtype: dtype of the optimizer's first moments.
      kernels: the kernels of the measured program, whose experts are then those of MaxText, too;
        None: the kernels and experts of this project.
      options: the published options of the compiler, which are added to this project's.
      memory: the published GiB that a device needed at most; None: not published.
      seen: whether the row was known when the rates of the cost models were last changed.
    """

    number: str
    what: str
    topology: str
    data: int
    rows: int
    tokens: int
    remat: str
    measured: tuple[float, ...]
    model: dict
    source: str
    differs: str
    mean_dtype: str = "float32"
    kernels: MeasuredKernels | None = None
    options: str = ""
    memory: float | None = None
    seen: bool = True


def transformer(layers, hidden, heads, key_heads, width, vocabulary, **settings):
    """Settings of a decoder with grouped-query attention and SwiGLU in every layer."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "full_attention_interval": 1,
        "partial_rotary_factor": 1.0,
        "attention_output_gate": False,
        "qk_norm": False,
        "zero_centered_norm": False,
        "mtp_depth": 0,
        "num_experts": 0,
        "shared_expert_intermediate_size": 0,
    } | settings


LLAMA_8B = transformer(32, 4096, 32, 8, 14_336, 128_256)
MISTRAL_7B = LLAMA_8B | {"vocab_size": 32_000}
LLAMA_405B = transformer(126, 16_384, 128, 8, 53_248, 128_256)
LLAMA_70B = transformer(80, 8192, 64, 8, 28_672, 128_256)
LLAMA2_70B = LLAMA_70B | {"vocab_size": 32_000}
MAXTEXT_16B = transformer(32, 4096, 64, 64, 28_672, 32_000)
QWEN3_235B = transformer(
    94, 4096, 64, 4, 1, 151_936,
    qk_norm=True, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
)  # fmt: skip
MIXTRAL = transformer(
    32, 4096, 32, 8, 1, 32_000,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14_336,
)  # fmt: skip
HUNYUAN3 = transformer(
    80, 4096, 64, 8, 13_312, 120_832,
    qk_norm=True, mtp_depth=1, num_experts=192, num_experts_per_tok=8, moe_intermediate_size=1536,
    shared_expert_intermediate_size=1536, mlp_only_layers=(0,),
    moe=MoEConfig(scoring_func="sigmoid", router_bias=True, shared_expert_gate=False),
)  # fmt: skip
DEEPSEEK_V3 = transformer(
    61, 7168, 128, 128, 18_432, 129_280,
    full_mixer="mla", qk_norm=True, head_dim=192, partial_rotary_factor=1 / 3,
    mixer=dict(latent_rank=512, query_rank=1536, shared_key_width=64),
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
    shared_expert_intermediate_size=2048, mlp_only_layers=(0, 1, 2),
    moe=MoEConfig(
        scoring_func="sigmoid", router_bias=True, shared_expert_gate=False,
        n_group=8, topk_group=4, routed_scaling_factor=2.5,
    ),
)  # fmt: skip
QWEN3_NEXT_DENSE = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 12_288,
    "num_experts": 0,
    "shared_expert_intermediate_size": 0,
    "mtp_depth": 0,
}
# MaxText's defaults; the published settings for v5p repeat the tiles
MEGABLOX = MeasuredKernels(512, 1024, 1024, two_backward_kernels=True, attention_block=512)
MEGABLOX_2048 = MEGABLOX._replace(attention_block=2048)
# the tiles that the author of rows 4 and 5 found best for TPU7x
TOKAMAX_TPU7X = MeasuredKernels(512, 2048, 1536)
MAXTEXT_EXPERTS = "benchmarks.planner.measured_kernels:MaxTextExperts"
BLOCKS = "blocks of 2048 in attention (here 1024)"
TOKAMAX = "its experts run in tokamax's kernels (here in megablox's)"
VMEM_ONLY = "of the published options of the compiler only the limit of VMEM"
# ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR of MaxText's benchmarks/xla_flags_library.py, without
# `xla_sc_disjoint_spmem`, which this compiler does not have; the published command has more options
DEEPSEEK_V3_OPTIONS = ",".join(
    (
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather=false",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=false",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
        "xla_tpu_use_tc_device_shape_on_sc=true",
        "xla_sc_enable_instruction_fusion=false",
        "xla_sc_disable_megacore_partitioning=true",
    )
)
# QUICKSTART-v5p.md of gpu-tpu-pedia, without `xla_tpu_dvfs_p_state`, which sets the clock, and
# `xla_sc_disjoint_spmem`, which this compiler does not have
HUNYUAN3_OPTIONS = ",".join(
    (
        "xla_tpu_scoped_vmem_limit_kib=65472",
        "xla_tpu_enable_sparse_core_reduce_scatter_v2=true",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
        "xla_tpu_enable_sparse_core_collective_aggregator=true",
        "xla_tpu_enable_concurrent_sparse_core_offloading=true",
        "xla_tpu_enable_offloading_gather_to_sparsecore=true",
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs=true",
        "xla_tpu_sparse_core_all_gather_latency_multiplier=1",
        "xla_tpu_sparse_core_reduce_scatter_latency_multiplier=3",
        "xla_tpu_use_tc_device_shape_on_sc=true",
        "xla_sc_disable_megacore_partitioning=true",
        "xla_sc_enable_instruction_fusion=false",
        "xla_tpu_enable_all_gather_offload_tracing=true",
        "xla_enable_async_all_gather=true",
        "xla_tpu_prefer_async_allgather_to_allreduce=true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather=false",
        "xla_tpu_enable_latency_hiding_layer_scheduler=true",
        "xla_tpu_scheduler_percent_shared_memory_limit=150",
        "xla_tpu_aggressive_opt_barrier_removal=true",
        "xla_tpu_pcie_bandwidth_multiplier=0.03",
    )
)
ROWS = {
    "qwen3_next_dense_v5e": Row(
        "14", "Qwen3-Next, dense 8B, v5e 256 chips", "v5e:16x16", 256, 1, 4096, "full",
        (2.571,), QWEN3_NEXT_DENSE, "maxtext#4347",
        "the published text names no widths: those of Qwen3.5-9B with this vocabulary, 8.2 B "
        "parameters, are assumed; part of its delta rule runs in XLA",
    ),
    "maxtext_16b_v5e": Row(
        "13", "MaxText 16B, v5e 256 chips", "v5e:16x16", 256, 6, 2048, "full",
        (10.3,), MAXTEXT_16B, "maxtext src/maxtext/configs/tpu/v5e",
        "published as 120 TFLOP/s a chip, from which the seconds are computed",
    ),
    "llama_8b_v6e": Row(
        "9", "Llama 3.1 8B, v6e 8 chips", "v6e:2x4", 8, 3, 8192,
        "offload=input,mixer,queries,keys,values",
        (3.443,), LLAMA_8B, "tpu-recipes training/trillium",
        BLOCKS,
    ),
    "llama_70b_v6e": Row(
        "10", "Llama 3.1 70B, v6e 256 chips", "v6e:16x16", 256, 5, 8192,
        "offload=input,queries,keys,values",
        (42.66,), LLAMA_70B, "tpu-recipes training/trillium",
        BLOCKS,
    ),
    "llama2_70b_v5p": Row(
        "12", "Llama 2 70B, v5p 64 chips", "v5p:4x4x4", 64, 2, 4096,
        "keep=queries,keys,values,mixer",
        (2 * 4096 / 692,), LLAMA2_70B, "maxtext",
        "published as 692 tokens/s a chip, without the slice and the batch, which are assumed",
    ),
    "llama_70b_tpu7x": Row(
        "8", "Llama 3.1 70B, TPU7x 64 chips", "tpu7x:4x4x4", 128, 2, 8192,
        "keep=queries,keys,values,attention",
        (12.20,), LLAMA_70B, "tpu-recipes training/ironwood",
        "first moments in bfloat16 (here float32)",
    ),
    "qwen3_235b_tpu7x_256": Row(
        "6", "Qwen3-235B, TPU7x 256 chips", "tpu7x:4x8x8", 512, 16, 4096, "offload",
        (30.87,), QWEN3_235B, "tpu-recipes training/ironwood",
        f"{TOKAMAX}, with tiles that are not published (here those of row 5); blocks of 2048 in "
        f"the backward pass of attention (here 1024); {VMEM_ONLY}",
        kernels=TOKAMAX_TPU7X,
        options="xla_tpu_scoped_vmem_limit_kib=61440",
    ),
    "qwen3_235b_tpu7x_64": Row(
        "5", "Qwen3-235B, TPU7x 64 chips", "tpu7x:4x4x4", 128, 8, 4096, "offload",
        (15.86,), QWEN3_235B, "gpu-tpu-pedia Qwen3-235B",
        "which kernels, tiles, blocks of attention and dtypes of the optimizer this run, the first "
        "of a series, had is not said (here megablox and splash attention with the tiles and "
        "blocks of the later runs, and first moments in float32; those have bfloat16); the clock "
        "of the chips was raised; what it keeps for the backward pass is not said; "
        f"{VMEM_ONLY}",
        kernels=TOKAMAX_TPU7X._replace(attention_block=2048),
        options="xla_tpu_scoped_vmem_limit_kib=65472",
    ),
    "mixtral_v5p": Row(
        "11", "Mixtral 8x7B, v5p 64 chips", "v5p:4x4x4", 64, 36, 4096, "offload",
        (48.5,), MIXTRAL, "maxtext",
        "published as 251.9 TFLOP/s a chip, from which the seconds are computed; "
        f"{VMEM_ONLY}; blocks of attention not published (here MaxText's default); weights in "
        "bfloat16 (here float32, so the layers' inputs are in the host's memory: on the device an "
        "earlier program needed 101.67 of 95.73 GiB)",
        kernels=MEGABLOX,
        options="xla_tpu_scoped_vmem_limit_kib=81920",
    ),
    "deepseek_v3_v5p": Row(
        "1", "DeepSeek-V3 671B, v5p 512 chips", "v5p:8x8x8", 512, 6, 8192, "offload=input,mixer",
        (90.67, 90.41), DEEPSEEK_V3, "tpu-recipes training/v5p",
        "of the published options of the compiler only those that send collectives over the sparse "
        "cores",
        kernels=MEGABLOX_2048,
        options=DEEPSEEK_V3_OPTIONS,
    ),
    "hunyuan3_v5p": Row(
        "3", "Hunyuan3 295B, v5p 256 chips", "v5p:4x8x8", 256, 8, 4096 * 2, "offload",
        (63.17, 63.33, 63.49), HUNYUAN3, "gpu-tpu-pedia Hunyuan3",
        "two of the published options of the compiler are left out: `xla_sc_disjoint_spmem`, which "
        "this compiler does not have, and `xla_tpu_dvfs_p_state`, which sets the clock",
        kernels=MEGABLOX_2048,
        options=HUNYUAN3_OPTIONS,
        memory=92.7,  # of runs with the same batch and other kernels
    ),
    "hunyuan3_tpu7x": Row(
        "4", "Hunyuan3 295B, TPU7x 64 chips", "tpu7x:4x4x4", 128, 8, 4096, "offload",
        (16.75,), HUNYUAN3, "gpu-tpu-pedia Hunyuan3",
        f"{TOKAMAX}, and so does its attention (here in JAX's splash attention); gradients in "
        f"bfloat16; {VMEM_ONLY}",
        mean_dtype="bfloat16",
        kernels=TOKAMAX_TPU7X._replace(attention_block=2048),
        options="xla_tpu_scoped_vmem_limit_kib=65472",
        memory=75.3,
    ),
    "mistral_7b_v6e": Row(
        "15", "Mistral 7B, v6e 8 chips", "v6e:2x4", 8, 6, 8192,
        "offload=input,mixer,queries,keys,values",
        (6.320,), MISTRAL_7B, "tpu-recipes training/trillium",
        BLOCKS,
        seen=False,
    ),
    "llama_405b_v5p": Row(
        "16", "Llama 3.1 405B, v5p 512 chips", "v5p:8x8x8", 512, 2, 8192,
        "keep=input offload=attention",
        (131.474,), LLAMA_405B, "tpu-recipes training/v5p",
        "the published options of the compiler are left out; the published run offloads the result "
        "of each MLP, too, which no backward pass reads here; blocks of 2048 in attention (here "
        "1024)",
        seen=False,
    ),
}  # fmt: skip


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--compile", default="", help="names of ROWS")
    parser.add_argument("--programs", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="compile at optimization level O1")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [name for name in arguments.compile.split(",") if name]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--compile: no row {', '.join(unknown)}; known: {', '.join(ROWS)}")
    if arguments.one:
        return make(names[0], arguments.programs, "O1" if arguments.quick else "")
    if not names:
        return show()
    for name in names:
        given = ["--quick"] * arguments.quick
        given += [f"--programs={arguments.programs}"] if arguments.programs else []
        command = [sys.executable, __file__, "--one", f"--compile={name}", *given]
        subprocess.run(command, check=True)


def show():
    """Prints the table from the plans that are there, and a line for each that is not."""
    columns = ("row", "model, slice", "rows × tokens a device, remat", "measured s")
    models = (f"`{name}`" for name in COST_MODELS)
    harness.print_header(*columns, *models, "peak GiB", "level")
    raw, unseen = ({name: [] for name in COST_MODELS} for _ in range(2))
    missing = []
    for name, row in ROWS.items():
        path = PLANS / f"{name}.json"
        again = f"python benchmarks/planner/validation.py --compile={name}"
        if not path.exists():
            missing.append(f"{name}: no plan {path.name}: {again}")
            continue
        plan = json.loads(path.read_text())
        if plan.get("fingerprint") != fingerprint(row):
            missing.append(f"{name}: {path.name} is of other settings, rates or prices: {again}")
            continue
        if not plan["estimates"]:
            missing.append(f"{name}: its program {plan['reason']}, so there is no time: {again}")
            continue
        measured = statistics.mean(row.measured)
        errors = {
            model: plan["estimates"][model]["step_seconds"] / measured - 1 for model in COST_MODELS
        }
        for model, error in errors.items():
            (raw if row.seen else unseen)[model].append(abs(error))
        figures = [
            f"{plan['estimates'][model]['step_seconds']:.3f} ({error:+.1%})"
            for model, error in errors.items()
        ]
        needs, usable = (plan[name] / 2**30 for name in ("peak_hbm_bytes", "usable_hbm_bytes"))
        memory = f", {needs - usable:.1f} over" if needs > usable else ""
        memory += f" (measured {row.memory})" if row.memory else ""
        print(
            f"| {row.number} | {row.what} | {row.rows} × {row.tokens:,}, {row.remat} | "
            f"{measured:.3f} | {' | '.join(figures)} | {needs:.1f} of {usable:.1f}{memory} | "
            f"{plan['optimization_level']} |"
        )
    both = {name: raw[name] + unseen[name] for name in COST_MODELS}
    for what, found in (("seen", raw), ("never seen", unseen), ("in all", both)):
        if errors := found["calibrated"]:
            medians = [f"`{model}` {statistics.median(of):.1%}" for model, of in found.items()]
            print(
                f"\nmedian error of {len(errors)} rows {what}: {', '.join(medians)}; largest of "
                f"`calibrated` {max(errors):.1%}"
            )
    print("\n".join(["", *missing]))
    print()
    harness.print_header("row", "measured in", "how the measured program differs")
    for row in ROWS.values():
        harness.print_row(row.number, row.source, row.differs)


def fingerprint(row: Row) -> str:
    """Returns a digest of what a plan was made of: the row's own settings, the measured rates and
    the version of the prices. A setting that the project gets later does not change it.
    """
    model = {name: repr(value) for name, value in row.model.items()}
    made_of = [row.topology, row.data, row.rows, row.tokens, row.remat, model, repr(RATES), PRICES]
    made_of += [row.mean_dtype] * (row.mean_dtype != "float32")
    made_of += [list(row.kernels), "three products"] if row.kernels else []
    made_of += [row.options] if row.options else []
    return sha256_json(made_of)


def configuration(row: Row) -> Config:
    """Returns the run of a row."""
    model = row.model
    if row.kernels:
        moe = dataclasses.replace(model.get("moe", MoEConfig()), experts=MAXTEXT_EXPERTS)
        model = model | {"moe": moe}
    return Config(
        name=row.what,
        model=ModelConfig(**model),
        train=TrainConfig(
            batch_size=row.rows * row.data, sequence_length=row.tokens, remat=row.remat
        ),
        optimizer=OptimizerConfig(mean_dtype=row.mean_dtype),
        parallel=ParallelConfig(mesh=MeshConfig(data=row.data), compiler_options=row.options),
    )


def make(name: str, programs: pathlib.Path | None, level: str):
    """Compiles a row, or prices its program again if that is in `programs`; writes its plan."""
    row, out = ROWS[name], PLANS / f"{name}.json"
    folder = (programs or pathlib.Path(tempfile.mkdtemp(prefix="schedules-"))) / name
    folder.mkdir(parents=True, exist_ok=True)
    schedule.enable_schedule_dump(folder)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    topology = describe_topology(row.topology)
    config = configuration(row)
    if row.kernels:
        install(row.kernels, config.model.hidden_size, config.model.moe_intermediate_size)
    if (folder / PROGRAM).exists() and out.exists():
        found = json.loads(out.read_text())
        for field in OF_PRICES:
            found.pop(field, None)
        program = hlo.parse_program((folder / PROGRAM).read_text())
        schedules = schedule.read_schedules(folder, program)
        mesh = make_mesh(config.parallel, topology.devices)
        estimates = {
            model: estimate_time(program, mesh, topology.chip, topology.shape, schedules, model)
            for model in COST_MODELS
        }
    else:
        plan = make_plan(config, topology, level, folder)
        found, estimates = plan.as_dict(), plan.estimate_by_cost_model
        print(plan.verdict, plan.failure_reason, round(plan.compile_seconds), "s")
    found["fingerprint"] = fingerprint(row)
    found["estimates"] = {
        model: {"step_seconds": estimate.seconds, "bound_seconds": estimate.seconds_by_resource}
        for model, estimate in estimates.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(name, row.measured, {m: e.seconds for m, e in estimates.items()})


if __name__ == "__main__":
    main()
