"""Evaluates a run or a Hugging Face directory: `python eval.py --workdir=runs/tiny
[--suite=heldout,mqar,niah --lengths=256,1024]`.

Without `--config`, the evaluation uses the configuration of the run. A `--config` file may name
other data than those of the run.
"""

import sys

from absl import flags

from qwen3next_jax.commands import checks, config_flags, process_setup, run_flags
from qwen3next_jax.config.registry import EVALUATIONS, check_name
from qwen3next_jax.runs.record import read_config_if_readable
from qwen3next_jax.training import unused_settings

get_config = config_flags.define_config_flag()
get_workdir = run_flags.define_workdir_flag(default_from_config=True)
get_loading = run_flags.define_loading_flags()
_suite = flags.DEFINE_list(
    "suite", ["heldout"], f"evaluations, comma-separated: {', '.join(EVALUATIONS)}"
)
_lengths = flags.DEFINE_list(
    "lengths", ["256"], "row lengths in tokens of induction, copy, niah and state"
)
_pairs = flags.DEFINE_list("pairs", ["4", "8", "16"], "numbers of pairs of mqar")
_rows = flags.DEFINE_integer(
    "rows",
    None,
    "rows of each evaluation (default: all for heldout and position, 128 or 32 for the others)",
    lower_bound=1,
)
_json = flags.DEFINE_string("json", "", "file to which all results are also written")


def main() -> int:
    config = get_config(required=False, may_resume=True)
    workdir = get_workdir(config.name if config else None)
    for name in _suite.value:
        check_name(EVALUATIONS, name, "--suite")
    checks.check_result_file("json", _json.value)
    checks.check_and_read_model_config("workdir", workdir)
    given = config_flags.settings_given_by_user(may_resume=True)
    if config:
        resumed_config = read_config_if_readable(workdir)
        unused_settings.check_effect_and_targets(config, given, resumed_config)
    loading = get_loading()
    lengths, pairs = (
        checks.parse_positive_integers(flag.name, flag.value) for flag in (_lengths, _pairs)
    )
    print(f"{workdir}: loading and compiling", file=sys.stderr, flush=True)
    process_setup.enable_compilation_cache()
    # Imported here, so that the user learns of a wrong flag before JAX loads.
    from qwen3next_jax.commands.evaluate import evaluate_and_print
    from qwen3next_jax.evals.evaluation import EvalOptions
    from qwen3next_jax.trained.load import distributed_command

    with distributed_command(loading.launch, workdir):
        if config:
            unused_settings.check_effect_and_targets(
                config, given, resumed_config, unused_settings.find_unused_by_mixers_and_evals
            )
        return evaluate_and_print(
            config,
            workdir,
            tuple(_suite.value),
            EvalOptions(_rows.value, lengths, pairs),
            _json.value,
            loading.step,
            loading.mesh,
            loading.dtype or "float32",
            loading.ema,
        )
