"""Writes a run's newest checkpoint as a Hugging Face directory.

    python -m qwen3next_jax.export --workdir=runs/tiny --out=exported [--step=N] [--dtype=bfloat16] [--mesh=data=8]

The weights are read onto the run's mesh and written tensor by tensor. The same command after a kill keeps the files that are whole.
"""

import dataclasses
import signal

from absl import flags

from qwen3next_jax import cli
from qwen3next_jax.errors import UserError


def main() -> int:
    workdir = _workdir()
    if not _out.value:
        raise UserError("--out is missing: expected the folder to write, such as --out=exported")
    out = cli.local_folder("out", _out.value)
    cli.check_model("workdir", workdir)
    loading = get_loading()
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: nothing stays under the name, what is whole is kept beside it
    cli.enable_compilation_cache()
    # Imported here, so that a mistyped flag is answered at once.
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.interop.writing import require_new
    from qwen3next_jax.load import joined, load_model

    require_new(out)
    with joined(loading.launch, workdir):
        model, tokenizer, step, _, identity = load_model(workdir, _step.value, loading.mesh, loading.dtype)
        if step is not None:  # a run ends its documents with its tokenizer's token, whatever the config's number says
            model.config = dataclasses.replace(model.config, eos_token_id=tokenizer.eos_id)
        save_hf(model, out, tokenizer, dtype=loading.dtype, identity=identity)
        files = sorted(f for f in out.rglob("*") if f.is_file())
        size = sum(f.stat().st_size for f in files)
        print(f"{_out.value}: {len(files)} files, {size / 1e6:,.1f} MB" + ("" if step is None else f", the model after step {step}")
              + f"; next: uv run python -m qwen3next_jax.generate --model={_out.value} --prompt='def '")
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


_workdir = cli.define_workdir_flag(default_from_config=False)
_out = flags.DEFINE_string("out", None, "new folder to write")
get_loading = cli.define_loading_flags()
_step = flags.DEFINE_integer("step", None, "checkpoint to export (default: the newest)", lower_bound=0)

if __name__ == "__main__":
    cli.run(main)
