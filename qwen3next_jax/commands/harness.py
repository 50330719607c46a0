"""Runs lm-evaluation-harness tasks on a run or a Hugging Face directory.

    qwen3next harness --model=WORKDIR_OR_HF_DIR --tasks=arc_easy,lambada_openai
    [--task_dir=FOLDER] [--json=FILE] [--prepared_dir=FOLDER]

The command needs the extra "evals": pip install 'qwen3next-jax[evals]'. `--task_dir` names a folder
with task files (YAML) of your own. `--prepared_dir` names a folder of prepared data; the command
then also reports how many examples of each task the data contain.
"""

import json
import pathlib

from absl import flags

from qwen3next_jax.commands import checks, process_setup, run_flags
from qwen3next_jax.common.errors import ExitCode, UserError, as_user_error
from qwen3next_jax.common.installation import how_to_install


def main() -> int:
    if not _model.value or not _tasks.value:
        raise UserError(
            "--model and --tasks are needed: a run or a Hugging Face directory, and names of tasks"
        )
    checks.check_and_read_model_config("model", _model.value)
    checks.check_result_file("json", _json.value)
    loading = get_loading()
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness is not installed ({error}): {how_to_install('evals')}"
        ) from error
    process_setup.enable_compilation_cache()
    from qwen3next_jax.data.contamination import find_tokenized_parts
    from qwen3next_jax.data.store import Store
    from qwen3next_jax.evals.contamination import contamination_of_tasks
    from qwen3next_jax.evals.harness import HarnessModel
    from qwen3next_jax.processes.distributed import is_process_0
    from qwen3next_jax.trained.load import distributed_command, load_model

    manager = TaskManager(include_path=_task_dir.value)
    if unknown := [name for name in _tasks.value if not manager.match_tasks([name])]:
        raise UserError(
            f"--tasks: no task named {unknown[0]!r}"
            + ("" if _task_dir.value else "; task files of your own: --task_dir=FOLDER")
        )
    with distributed_command(loading.launch, _model.value):
        model, tokenizer, _, places, _ = load_model(
            _model.value, loading.step, loading.mesh, loading.dtype or "float32", ema=loading.ema
        )
        if tokenizer is None:
            raise UserError(
                f"{_model.value}: no tokenizer.json there: put the model's own beside its "
                "config.json"
            )
        subject = HarnessModel(
            model, tokenizer, _max_length.value, _batch_size.value, places, _speculative.value
        )
        if _prepared_dir.value:
            # A mistake in --prepared_dir is reported before the tasks run.
            find_tokenized_parts(Store(_prepared_dir.value), tokenizer)
        results = lm_eval.simple_evaluate(
            subject,
            tasks=_tasks.value,
            num_fewshot=_fewshot.value,
            limit=_limit.value,
            task_manager=manager,
            bootstrap_iters=0,  # bootstrapping would fork this process, in which JAX runs threads
        )
        print(make_table(results))
        contamination = {}
        if _prepared_dir.value and is_process_0():
            found = contamination_of_tasks(results["samples"], tokenizer, _prepared_dir.value)
            for task, task_contamination in found.items():
                print(f"{task}: {task_contamination.summary()}")
                contamination[task] = task_contamination.counts_by_verdict()
        if _json.value and is_process_0():
            kept = {name: results[name] for name in ("results", "versions", "n-samples", "n-shot")}
            kept |= {"contamination": contamination} if _prepared_dir.value else {}
            with as_user_error(f"--json={_json.value}: cannot be written", OSError):
                pathlib.Path(_json.value).write_text(json.dumps(kept, indent=2, default=str) + "\n")
    return ExitCode.DONE


_model = flags.DEFINE_string("model", None, "folder of a run, or a Hugging Face directory")
get_loading = run_flags.define_loading_flags()
_tasks = flags.DEFINE_list("tasks", [], "tasks, comma-separated")
_task_dir = flags.DEFINE_string("task_dir", None, "folder of task files of your own")
_fewshot = flags.DEFINE_integer(
    "fewshot", None, "examples before each question (default: the task's own number)", lower_bound=0
)
_limit = flags.DEFINE_integer("limit", None, "documents of each task (default: all)", lower_bound=1)
_max_length = flags.DEFINE_integer(
    "max_length", 2048, "longest context with its continuation, in tokens", lower_bound=2
)
_batch_size = flags.DEFINE_integer("batch_size", 8, "rows of one forward pass", lower_bound=1)
_speculative = flags.DEFINE_integer(
    "speculative",
    0,
    "tokens drafted per pass where a task generates, up to 4; 0: none",
    lower_bound=0,
)
_prepared_dir = flags.DEFINE_string(
    "prepared_dir", "", "folder of prepared data: how many examples of the tasks does it contain?"
)
_json = flags.DEFINE_string("json", "", "file to which the results are also written")
