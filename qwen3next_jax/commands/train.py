"""Trains Qwen3-Next: `python train.py --config=configs/tiny.py [--workdir=…]
[--config.train.steps=…] [--max-restarts=N] [--dry-run]`.
"""

import functools

from absl import flags

from qwen3next_jax.commands import config_flags, process_setup, run_flags
from qwen3next_jax.common.storage import with_patience
from qwen3next_jax.config import to_dict
from qwen3next_jax.processes import supervisor

get_config = config_flags.define_config_flag()
get_launch = run_flags.define_launch_flags()
get_workdir = run_flags.define_workdir_flag(default_from_config=True)
get_max_restarts = supervisor.define_flag()
_restart = flags.DEFINE_boolean(
    "restart", False, "begin a new run: moves what is in the workdir into WORKDIR/before-TIME"
)
_allow_unread = flags.DEFINE_boolean(
    "allow-unread",
    False,
    "accept settings that have no effect on this run; a sweep uses it if they have one on its "
    "other points",
)
_dry_run = flags.DEFINE_boolean(
    "dry-run",
    False,
    "check everything, print the memory and disk that the run needs, write nothing",
)


def main() -> int:
    may_resume = not _restart.value
    config, launch = get_config(may_resume=may_resume), get_launch()
    workdir = with_patience(get_workdir(config.name), config.checkpoint.patience)
    if get_max_restarts() and not _dry_run.value:
        from qwen3next_jax.runs.folder import run_files

        find_run = None
        if _restart.value:
            find_run = functools.partial(run_files, workdir)
        return supervisor.supervise(workdir, get_max_restarts(), find_run=find_run)
    from qwen3next_jax.runs import unread

    given = None if _allow_unread.value else config_flags.given_settings(may_resume)
    unread.check(config, given, workdir, _restart.value)
    # Several processes make this check later and together, so that all of them report its result.
    if launch is None:
        from qwen3next_jax.runs import preflight

        preflight.check(config, workdir, _restart.value)
    process_setup.enable_compilation_cache()
    from qwen3next_jax.processes import distributed

    with distributed.distributed_run(launch, config.parallel, to_dict(config)):
        unread.check(config, given, workdir, _restart.value, unread.unread_by_layers)
        if _dry_run.value:
            from qwen3next_jax.runs.dry_run import dry_run

            return dry_run(config, workdir, _restart.value)
        from qwen3next_jax.runs.train import train

        return train(config, workdir, _restart.value)
