"""Writes a run's newest checkpoint as a Hugging Face directory.

    python -m qwen3next_jax.export --workdir=runs/tiny --out=exported [--step=N]
"""

import dataclasses
import pathlib
import signal

from absl import flags

from qwen3next_jax import cli
from qwen3next_jax.errors import UserError


def main() -> int:
    workdir = _workdir()
    if not _out.value:
        raise UserError("--out is missing: expected the folder to write, such as --out=exported")
    cli.check_model("workdir", workdir)
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: what was written so far goes again
    cli.enable_compilation_cache()
    # Imported here, so that a mistyped flag is answered at once.
    from qwen3next_jax.interop.huggingface import require_new, save_hf
    from qwen3next_jax.load import load_model

    require_new(pathlib.Path(_out.value))
    model, tokenizer, step = load_model(workdir, _step.value)
    if step is not None:  # a run ends its documents with its tokenizer's token, whatever the config's number says
        model.config = dataclasses.replace(model.config, eos_token_id=tokenizer.eos_id)
    save_hf(model, _out.value, tokenizer)
    files = sorted(f for f in pathlib.Path(_out.value).rglob("*") if f.is_file())
    size = sum(f.stat().st_size for f in files)
    print(f"{_out.value}: {len(files)} files, {size / 1e6:,.1f} MB" + ("" if step is None else f", the model after step {step}")
          + f"; next: uv run python -m qwen3next_jax.generate --model={_out.value} --prompt='def '")
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


_workdir = cli.define_workdir_flag(default_from_config=False)
_out = flags.DEFINE_string("out", None, "new folder to write")
_step = flags.DEFINE_integer("step", None, "checkpoint to export (default: the newest)", lower_bound=0)

if __name__ == "__main__":
    cli.run(main)
