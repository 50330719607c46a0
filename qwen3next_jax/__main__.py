"""The entry point of the package: `qwen3next VERB …`, or `python -m qwen3next_jax VERB …`."""

import importlib
import os
import sys

from qwen3next_jax import __version__
from qwen3next_jax.common.installation import exclude_absent_tpu_from_jax

VERBS = {
    "train": "train a model, or continue a run",
    "prepare": "tokenize and pack the data of a run, on any number of hosts",
    "eval": "evaluate a run or a Hugging Face directory",
    "generate": "continue a prompt, or chat",
    "export": "write a run as a Hugging Face directory",
    "merge": "write the weighted mean of checkpoints as a run or an export",
    "report": "write a page with the charts of runs",
    "sweep": "run an ablation sweep and write its report",
    "scaling": "fit loss against size and tokens, and predict runs",
    "doctor": "check this machine: chip, versions, what runs each operator, how fast",
    "show": "describe the model of a config: layers, parameters, FLOPs, memory",
    "plan": "predict memory and time of a step on a slice, without the slice",
    "verify": "check runs, exports and prepared data against their digests",
    "replay": "run the step again at which the guards ended a run",
    "harness": "run lm-evaluation-harness tasks",
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage_text())
        sys.exit(0 if arguments else 2)
    verb = arguments[0]
    if verb == "--version":
        from qwen3next_jax.common.version import code_version

        print(f"qwen3next-jax {__version__} ({code_version()})")
        sys.exit(0)
    if verb not in VERBS:
        from qwen3next_jax.common.errors import did_you_mean

        hint = did_you_mean(verb, VERBS) or f": expected one of {', '.join(VERBS)}"
        print(f"error: {verb}: no such verb{hint}", file=sys.stderr)
        sys.exit(2)
    # A config may name a user's own modules, which are in the folder where the command starts.
    sys.path.append(os.getcwd())
    run_verb(verb, arguments[1:])


def run_verb(verb: str, arguments: list[str]) -> None:
    """Runs the command `verb` with these arguments, and exits with the command's exit code."""
    exclude_absent_tpu_from_jax(os.environ)
    from qwen3next_jax.commands import cli

    command = importlib.import_module(f"qwen3next_jax.commands.{verb}")
    sys.argv[1:] = arguments
    cli.run_command(command, getattr(command, "ARGUMENTS", ""))


def _usage_text() -> str:
    verbs = "\n".join(f"  {verb:10} {meaning}" for verb, meaning in VERBS.items())
    return (
        f"usage: qwen3next VERB [FLAGS]\n\n{verbs}\n\n"
        "qwen3next VERB --help shows its flags, qwen3next --version the version."
    )


if __name__ == "__main__":
    main()
