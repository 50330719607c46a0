"""Trains Qwen3-Next: `python train.py --config=configs/tiny.py [--workdir=…]
[--config.train.steps=…] [--max-restarts=N] [--dry-run]`.
"""

from absl import flags

from qwen3next_jax.commands import config_flags, process_setup, run_flags
from qwen3next_jax.common.storage import with_patience
from qwen3next_jax.config import to_dict
from qwen3next_jax.processes import supervisor

get_config = config_flags.define_config_flag()
get_launch = run_flags.define_launch_flags()
get_workdir = run_flags.define_workdir_flag(default_from_config=True)
get_max_restarts = supervisor.define_max_restarts_flag()
_restart = flags.DEFINE_boolean(
    "restart", False, "begin a new run: moves what is in the workdir into WORKDIR/before-TIME"
)
_allow_unused = flags.DEFINE_boolean(
    "allow-unused",
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
        from qwen3next_jax.runs.store import open_store

        find_run = None
        if _restart.value:
            find_run = open_store(workdir).run_file_identities
        return supervisor.supervise(workdir, get_max_restarts(), find_run=find_run)
    from qwen3next_jax.runs.record import read_config_if_readable
    from qwen3next_jax.training import unused_settings

    given = None if _allow_unused.value else config_flags.settings_given_by_user(may_resume)
    resumed_config = None if _restart.value else read_config_if_readable(workdir)
    unused_settings.check_effect_and_targets(config, given, resumed_config)
    from qwen3next_jax.runs.start import prepare_start

    if launch is None:  # before JAX is loaded
        start = prepare_start(config, workdir, _restart.value)
    process_setup.enable_compilation_cache()
    from qwen3next_jax.processes import distributed

    with distributed.distributed_run(launch, config.parallel, to_dict(config)):
        unused_settings.check_effect_and_targets(
            config, given, resumed_config, unused_settings.find_unused_by_mixers_and_evals
        )
        if launch is not None:  # together, so that all processes report a mistake of one
            start = distributed.run_on_all(
                lambda: prepare_start(config, workdir, _restart.value, distributed.is_process_0())
            )
        if _dry_run.value:
            from qwen3next_jax.runs.dry_run import dry_run

            return dry_run(start)
        from qwen3next_jax.runs.train import train

        return train(start)
