"""Writes a run's newest checkpoint as a Hugging Face directory.

    qwen3next export --workdir=runs/tiny --out=exported [--step=N]
    [--dtype=bfloat16] [--mesh=data=8]

The weights are read onto the run's mesh and written tensor by tensor. The same command after a
kill keeps the files that are whole. A run that began with a Hugging Face directory is written in
that one's form, with what it has beside the text model (docs/families.md): --form for another,
--source where it has moved, --novision without its vision tower.
"""

import dataclasses
import pathlib
import signal

from absl import flags

from qwen3next_jax.commands import cli
from qwen3next_jax.common.errors import UserError


def main() -> int:
    workdir = _workdir()
    if not _out.value:
        raise UserError("--out is missing: expected the folder to write, such as --out=exported")
    out = cli.local_folder("out", _out.value)
    cli.check_model("workdir", workdir)
    loading = get_loading()
    # as Ctrl-C: nothing stays under the name, what is whole is kept beside it
    signal.signal(signal.SIGTERM, _interrupt)
    cli.enable_compilation_cache()
    # Imported here, so that a mistyped flag is answered at once.
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.interop.source import in_form
    from qwen3next_jax.interop.writing import require_new
    from qwen3next_jax.runs.load import joined, load_model

    require_new(out)
    with joined(loading.launch, workdir):
        source, form = _origin_of(workdir)
        model, tokenizer, step, _, identity = load_model(
            workdir, loading.step, loading.mesh, loading.dtype
        )
        # a run ends its documents with its tokenizer's token, whatever the config's number says
        if step is not None:
            model.config = dataclasses.replace(model.config, eos_token_id=tokenizer.eos_id)
        model.config = in_form(model.config, _form.value, source, form)
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
            f"{_out.value}: {len(files)} files, {size / 1e6:,.1f} MB"
            + ("" if step is None else f", the model after step {step}")
            + f"; next: uv run qwen3next generate --model={_out.value} "
            "--prompt='def '"
        )
    return 0


def _origin_of(workdir: str) -> tuple[pathlib.Path | None, str]:
    """(the Hugging Face directory that the model began with; None where there is none, or where
    nobody knows any more and --form says what to write; its form as far as a record says it).
    """
    from qwen3next_jax.runs.origin import began_with

    if _source.value:
        return cli.local_folder("source", _source.value), ""
    try:
        return began_with(workdir)
    except UserError:
        if not _form.value:
            raise
        return None, ""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


_workdir = cli.define_workdir_flag(default_from_config=False)
_out = flags.DEFINE_string("out", None, "new folder to write")
get_loading = cli.define_loading_flags()
_form = flags.DEFINE_enum(
    "form",
    None,
    ["qwen3_next", "qwen3_5_text", "qwen3_5", "kimi_linear"],
    "what to write it as (default: as what it began)",
)
_source = flags.DEFINE_string(
    "source",
    None,
    "the Hugging Face directory that it began with (default: where the run's configuration says)",
)
_vision = flags.DEFINE_bool(
    "vision", True, "whether that one's vision tower is taken over, where the form has one"
)
