"""Merges checkpoints: writes the weighted mean of their parameters as a new run.

    qwen3next merge runs/a@100 runs/a@150 runs/a@200 --out=runs/merged [--weights=1-sqrt]
    [--mesh=data=8]

    qwen3next merge runs/a@200 runs/b@200 --out=exported --export [--dtype=bfloat16]

RUN without @STEP means the newest checkpoint of a run. The new run has the configuration, the
optimizer state, the step and the position in the data of the last checkpoint. The command
`train --config=… --workdir=runs/merged` continues the new run, and
--config.train.init_from=runs/merged begins another run with its parameters. With --export the mean
is written as a Hugging Face directory instead.

With --weights=linear, cosine or 1-sqrt, the weighted mean of the checkpoints of a run with a
constant learning rate approximates the result of decaying the learning rate from the first
checkpoint to the last (WSM, 2507.17634; docs/adapting.md).
"""

import shlex

from absl import flags

from qwen3next_jax.commands import process_setup, run_flags
from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, escape_control
from qwen3next_jax.common.installation import command_line_start
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import MeshConfig
from qwen3next_jax.interop.writing import require_empty_folder

ARGUMENTS = "RUN@STEP …"


def main(given_names: list[str]) -> int:
    if not given_names:
        raise UserError("no checkpoints given: expected RUN@STEP RUN@STEP …")
    if not _out.value:
        raise UserError("--out is missing: expected the folder to write, such as --out=runs/merged")
    if _dtype.value and not _export.value:
        raise UserError("--dtype: the parameters of a run stay float32: add --export, or omit it")
    out, sizes = to_path(_out.value, "--out="), run_flags.parse_mesh_flag(_mesh.value)
    launch = get_launch()
    if _export.value:
        require_empty_folder(out)
    process_setup.enable_compilation_cache()
    # Imported here, so that the user learns of a wrong flag before JAX loads.
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.trained import merging
    from qwen3next_jax.trained.load import distributed_command, mesh_of_params

    if not _export.value:
        merging.require_writable_new_folder(out)
    sources = merging.find_sources(given_names)
    weights = merging.weight_of_each_checkpoint(_weights.value, [source.step for source in sources])
    last = sources[-1]
    with distributed_command(launch, last.folder):
        mesh = mesh_of_params(
            f"{last.folder}: the mesh of its run does not fit these devices",
            last.config.model,
            MeshConfig(**sizes) if sizes else None,
            last.config.parallel.mesh,
            None,
        )
        mesh = mesh or single_device_mesh()
        for source, weight in zip(sources, weights, strict=True):
            print(escape_control(f"{weight:8.4f} × {source.folder} after step {source.step}"))
        quoted = shlex.quote(_out.value)
        if _export.value:
            _export_merged_model(sources, weights, mesh, out)
            next_command = f"{command_line_start('generate')} --model={quoted} --prompt='def '"
        else:
            merging.write_merged_run(sources, weights, mesh, out)
            next_command = f"{command_line_start('eval')} --workdir={quoted}"
        print(f"{_out.value}: merged {len(sources)} checkpoints; next: {next_command}")
    return 0


def _export_merged_model(sources, weights, mesh, out) -> None:
    """Writes the weighted mean of the checkpoints as a Hugging Face directory. If the run of the
    last checkpoint began with a Hugging Face directory, the new directory has the same format.
    `merging.write_merged_run` explains the arguments.
    """
    from flax import nnx

    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.interop.source import config_for_export, with_end_token
    from qwen3next_jax.trained import merging
    from qwen3next_jax.trained.load import tokenizer_of_run
    from qwen3next_jax.training.state import abstract_model

    last = sources[-1]
    base = last.run_record.source
    directory = base and to_path(base.path)
    tokenizer = tokenizer_of_run(last.folder, last.run_record)
    state = merging.read_merged_state(sources, weights, mesh, whole=False)
    graphdef, _ = abstract_model(last.config.model)
    model = nnx.merge(graphdef, state["params"])
    model.config = with_end_token(model.config, tokenizer.eos_id)
    model.config = config_for_export(model.config, None, directory, base.form if base else "")
    has_source = directory is not None and directory.is_dir()
    save_hf(
        model,
        out,
        tokenizer,
        dtype=_dtype.value,
        identity=digests.sha256_json(
            [[s.manifest_digest for s in sources], [float(w) for w in weights]]
        ),
        source=directory if has_source else None,
    )


_out = flags.DEFINE_string("out", None, "new folder to write")
_weights = flags.DEFINE_string(
    "weights",
    "uniform",
    "uniform; a decay (linear, cosine or 1-sqrt), for checkpoints in the order of training; or a "
    "number for each checkpoint, such as 1,2,1: their ratios",
)
_export = flags.DEFINE_bool("export", False, "write a Hugging Face directory instead of a run")
_dtype = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "of the weights of an export, as for qwen3next export"
)
_mesh = run_flags.define_mesh_flag()
get_launch = run_flags.define_launch_flags()
