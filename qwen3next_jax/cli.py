"""What the commands share: flags, one-line errors, the platform's quiet start, the compilation cache."""

import ctypes
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from qwen3next_jax.config import Config, default_config, from_dict
from qwen3next_jax.errors import ExitCode, UserError, did_you_mean
from qwen3next_jax.parallel.launch import Launch, find_launch


def run(main: Callable[..., int | None], arguments: str = "") -> None:
    """Parses flags, runs `main()`, exits with its code. A `UserError` becomes one line on standard error and its exit code.

    A command that takes `arguments` besides its flags (their name, such as "WORKDIR") gets them: `main([…])`.
    """
    def guarded(argv: Sequence[str]) -> int | None:
        if len(argv) > 1 and not arguments:
            return _report(f"unexpected argument {argv[1]!r}: expected flags of the form --name=value")
        try:
            return main(list(argv[1:])) if arguments else main()
        except UserError as error:
            return _report(str(error), error.exit_code)
        except KeyboardInterrupt:
            _report("interrupted")
            return ExitCode.INTERRUPTED
    keep_freed_memory()
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which accelerators this machine does not have
    app.run(guarded, flags_parser=_parse)


def _report(message: str, code: ExitCode = ExitCode.USER_ERROR) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        _check_config_file(argv)
        _check_overrides(argv)
        return flags.FLAGS(argv)
    except (AttributeError, KeyError, SyntaxError, TypeError) as error:  # raised by the config file itself
        sys.exit(_report(f"--config: the file cannot be used: {str(error).strip().splitlines()[0]}"))
    except (flags.Error, UserError) as error:
        if "--help" in argv or "-h" in argv or "--helpfull" in argv:
            raise
        text = re.sub(r"invalid literal for int\(\) with base 10: .*", "expected a whole number", str(error))
        text = re.sub(r"could not convert string to float: .*", "expected a number", text)
        sys.exit(_report(text.removeprefix("FATAL Flags parsing error: ")))


def _check_config_file(argv: Sequence[str]) -> None:
    for argument, following in zip(argv[1:], [*argv[2:], ""]):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            path = pathlib.Path((value if equals else following).split(":")[0])
            if not path.is_file():
                reason = "a folder" if path.is_dir() else "no such file"
                raise UserError(f"--config={path}: {reason}{did_you_mean(path.name, [f.name for f in path.parent.glob('*.py')])}")


def _check_overrides(argv: Sequence[str]) -> None:
    """Refuses `--config.a.b` for settings that do not exist, before the config file is read."""
    for argument in argv[1:]:
        name = argument.lstrip("-").split("=", 1)[0]
        if not (argument.startswith("-") and name.startswith("config.")):
            continue
        settings, path = default_config(), name.split(".")[1:]
        for depth, key in enumerate(path):
            if not isinstance(settings, dict) or key not in settings:
                where = "--" + ".".join(("config", *path[:depth + 1]))
                known = settings if isinstance(settings, dict) else ()
                hint = did_you_mean(key, known) or (f"; known here: {', '.join(known)}" if known else "")
                raise UserError(f"{where}: no such setting{hint}")
            settings = settings[key]


def define_config_flag() -> Callable[..., Config | None]:
    """Defines `--config=FILE.py` and its `--config.section.key=value` overrides; call the result for the validated Config
    (`required=False`: None where the flag is not given)."""
    from ml_collections import config_flags

    holder = config_flags.DEFINE_config_file("config", None, "Python file with get_config(); override with --config.train.steps=…")

    def get(required: bool = True) -> Config | None:
        if holder.value is None and not required:
            return None
        if holder.value is None:
            raise UserError("--config is missing: expected a file such as --config=configs/tiny.py")
        return from_dict(Config, holder.value.to_dict())
    return get


def define_workdir_flag(default_from_config: bool) -> Callable[..., pathlib.Path]:
    """Defines `--workdir`; call the result (with the config's name where it has a default) for the path."""
    text = "folder of the run" + (" (default: runs/<name of the config>)" if default_from_config else "")
    holder = flags.DEFINE_string("workdir", None, text)

    def get(name: str | None = None) -> pathlib.Path:
        if holder.value:
            return local_folder("workdir", holder.value)
        if name is None:
            raise UserError("--workdir is missing: expected the folder of a run, such as --workdir=runs/tiny")
        return pathlib.Path("runs") / name
    return get


def local_folder(flag: str, value: str) -> pathlib.Path:
    """The path that `--flag=value` names; as a path gs://bucket would be the local folder gs:/bucket."""
    if "://" in value:
        raise UserError(f"--{flag}={value}: expected a local folder, or one of a file system that is mounted; only data.path may be remote")
    return pathlib.Path(value)


def define_launch_flags() -> Callable[[], Launch | None]:
    """Defines `--coordinator`, `--processes` and `--process`; call the result for this process's place among those of the
    run, from the flags or from what its launcher left in the environment."""
    coordinator = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where the processes of a run meet; SLURM, "
                                                           "Open MPI and TPU slices tell by themselves")
    processes = flags.DEFINE_integer("processes", None, "number of processes of the run", lower_bound=1)
    process = flags.DEFINE_integer("process", None, "which of them this one is, from 0", lower_bound=0)

    def get() -> Launch | None:
        chips = any(pathlib.Path("/dev").glob("accel[0-9]*")) or any(pathlib.Path("/dev/vfio").glob("[0-9]*"))
        return find_launch(os.environ, coordinator.value, processes.value, process.value, chips)
    return get


def positive_integers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """The numbers of a comma-separated flag."""
    if not values or not all(value.strip().isdigit() and int(value) > 0 for value in values):
        raise UserError(f"--{flag}={','.join(values)}: expected positive numbers separated by commas")
    return tuple(int(value) for value in values)


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, so that a command's second start does not compile again."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "qwen3next_jax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory instead of giving it back to the system. Call it before JAX starts its threads.

    On CPU every run of a program takes its buffers from malloc, which by default maps large ones anew: the kernel then
    zeroes hundreds of megabytes a step. Keeping them took a step of configs/tiny.py from 0.60 to 0.46 s on 2 cores.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # of malloc.h
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_arena_max, 1)
