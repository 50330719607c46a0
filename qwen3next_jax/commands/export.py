"""Writes a checkpoint of a run, by default the newest, as a Hugging Face directory.

    qwen3next export --workdir=runs/tiny --out=exported [--step=N|best]
    [--dtype=bfloat16] [--mesh=data=8]

    qwen3next export --workdir=runs/adapted --out=adapter --adapter

The weights are read onto the run's mesh and written tensor by tensor. If the command is killed, the
same command continues and keeps the complete files. If the run began with a Hugging Face directory,
the export has the same format as this directory; a vision tower and the other fields of config.json
are copied from this directory (docs/families.md). --form chooses another format. --source names the
directory if it has moved. --novision leaves out the vision tower.

Adapters (model.lora) are merged into their matrices. With --adapter, only the adapters are written,
as PEFT's adapter_model.safetensors and adapter_config.json (docs/adapting.md).
"""

import dataclasses
import pathlib
import shlex
import typing

from absl import flags

from qwen3next_jax.commands import checks, interrupts, process_setup, run_flags
from qwen3next_jax.commands.console import show_while_waiting
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.installation import command_line_start
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.writing import require_empty_folder


def main() -> int:
    workdir = _workdir()
    if not _out.value:
        raise UserError("--out is missing: expected the folder to write, such as --out=exported")
    out = to_path(_out.value, "--out=")
    checks.check_and_read_model_config("workdir", workdir)
    loading = get_loading()
    require_empty_folder(out)
    # SIGTERM acts like Ctrl-C: the folder --out does not appear, and complete files are kept in a
    # folder beside it.
    interrupts.interrupt_at_sigterm()
    process_setup.enable_compilation_cache()
    # Imported here, so that the user learns of a wrong flag before JAX loads.
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.interop.source import config_for_export, with_end_token
    from qwen3next_jax.trained.load import distributed_command, load_model

    if _adapter.value:
        return _export_adapter(workdir, out, loading.step, loading.ema)
    with distributed_command(loading.launch, workdir):
        source, form = _base_folder_and_format(workdir)
        with show_while_waiting(f"reading {workdir}"):
            model, tokenizer, step, _, identity = load_model(
                workdir, loading.step, loading.mesh, loading.dtype, ema=loading.ema
            )
        if step is not None:
            model.config = with_end_token(model.config, tokenizer.eos_id)
        model.config = config_for_export(model.config, _form.value, source, form)
        which = "the model" if step is None else f"the model after step {step}"
        which += "" if step is None else _exported_parameters_note(workdir, loading.ema)
        with show_while_waiting(f"writing {which} to {out}, as {model.config.hf_form}"):
            save_hf(
                model,
                out,
                tokenizer,
                dtype=loading.dtype,
                identity=identity,
                source=source if source and source.is_dir() else None,
                vision=_vision.value,
            )
        files = sorted(f for f in out.rglob("*") if f.is_file())
        size = sum(f.stat().st_size for f in files)
        print(
            f"{_out.value}: {len(files)} files, {size / 1e6:,.1f} MB, {which}; "
            f"next: {command_line_start('generate')} --model={shlex.quote(_out.value)} "
            "--prompt='def '"
        )
    return 0


def _exported_parameters_note(workdir: str, ema: bool) -> str:
    """Returns a text that says whether the newest or the averaged parameters are exported; "" if
    the run has no average (`train.ema` is 0).
    """
    from qwen3next_jax.runs.record import read_config
    from qwen3next_jax.trained.load import describe_ema_choice

    return f", {describe_ema_choice(ema)}" if read_config(to_path(workdir)).train.ema else ""


def _export_adapter(workdir: str, out: pathlib.Path, step, ema: bool) -> int:
    """Writes the adapters of the run in `workdir` as PEFT's files. With `ema`, the moving average
    of the adapters is written. `step`: the value of --step.
    """
    from qwen3next_jax.interop.peft import save_adapter
    from qwen3next_jax.runs.checkpoint import load_adapters
    from qwen3next_jax.trained.base_model import find_adapter_base

    base = to_path(_source.value, "--source=") if _source.value else find_adapter_base(workdir)
    found = load_adapters(to_path(workdir), step, ema)
    _, form = _base_folder_and_format(workdir)
    config = found.model_config
    config = dataclasses.replace(config, hf_form=_form.value or form or config.hf_form)
    digest = found.frozen_manifest_digest
    modules = save_adapter(config, found.adapters, out, str(base or ""), digest)
    described = base or "an export of the model with which the run began"
    # The two classes of transformers name the layers of the text model differently.
    loader = "AutoModelForCausalLM"
    if config.hf_form == "qwen3_5":
        loader = f"AutoModelForImageTextToText (for {loader}: --form=qwen3_5_text)"
    print(
        f"{_out.value}: adapters of {modules} modules after step {found.step}"
        f"{_exported_parameters_note(workdir, ema)}; load them with "
        f"PeftModel.from_pretrained(base, {_out.value!r}), where base is {described}, loaded with "
        f"{loader}"
    )
    return 0


def _base_folder_and_format(workdir: str) -> tuple[pathlib.Path | None, str]:
    """Returns the Hugging Face directory with which the run began, and the format of that
    directory, a value of `model.hf_form`. The directory is None if the run began with random
    weights. The format is "" if --source names the directory.
    """
    from qwen3next_jax.trained.base_model import find_base_model

    if _source.value:
        return to_path(_source.value, "--source="), ""
    base = find_base_model(workdir)
    return (to_path(base.path), base.form) if base else (None, "")


_workdir = run_flags.define_workdir_flag(default_from_config=False)
_out = flags.DEFINE_string("out", None, "new folder to write")
get_loading = run_flags.define_loading_flags()
_form = flags.DEFINE_enum(
    "form",
    None,
    typing.get_args(ModelConfig.__annotations__["hf_form"]),
    "form of the export (default: that of the directory that the run began with, else the run's "
    "model.hf_form); qwen3_5 and qwen4_exp have a vision tower, qwen3_5_text and qwen4_exp_text "
    "are their text models alone",
)
_source = flags.DEFINE_string(
    "source",
    None,
    "the Hugging Face directory that the run began with (default: from the run's configuration)",
)
_adapter = flags.DEFINE_bool("adapter", False, "write the run's adapters alone, as PEFT's files")
_vision = flags.DEFINE_bool(
    "vision", True, "copy the vision tower of that directory, if the form has one"
)
