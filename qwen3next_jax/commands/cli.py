"""Functions that the commands share: they define flags, turn errors into one line, handle Ctrl-C,
and set up the compilation cache.
"""

import collections
import contextlib
import copy
import ctypes
import functools
import itertools
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import app, flags, logging
from rich.console import Console

from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    did_you_mean,
    escape_lines,
    out_of_memory,
    require_path,
    similar_folder,
)
from qwen3next_jax.common.installation import has_tpu_chips
from qwen3next_jax.common.storage import BucketPath, check_bucket, is_bucket, to_path
from qwen3next_jax.config import (
    MESH_AXES,
    Config,
    MeshConfig,
    MixerConfig,
    ModelConfig,
    from_dict,
    registry,
)
from qwen3next_jax.config.describe import list_settings, mixer_settings
from qwen3next_jax.config.files import (
    UserInput,
    apply_overrides,
    default_of,
    find_file,
    flags_hint,
    load_config_file,
    settings_called,
)
from qwen3next_jax.config.reading import FlagText
from qwen3next_jax.processes.launch import Launch, find_launch
from qwen3next_jax.runs.vocabulary import fill_from_tokenizer

_STDOUT = 1
_HELP = ("-h", "-?", "--help", "-help", "--helpshort", "--helpfull")  # flags that ask for help


def run(command: types.ModuleType, arguments: str = "") -> None:
    """Parses the flags, runs `command.main()` and exits with its code. A `UserError` becomes one
    line on standard error and an exit code. `--help` shows the command's docstring.

    Args:
      command: the module of the command.
      arguments: the name of the command's positional arguments, which are paths, such as "WORKDIR";
        `main` gets them as a list. "" if the command takes none.
    """
    main = command.main
    flags.DEFINE_list(
        "trust",
        [],
        "packages of your own whose parts (my_package.module:Name) a run.json may name: to load "
        "such a run is to run their code. Also modules (gdn2) of a run whose record does not say "
        "with which of their versions it was trained",
    )

    def guarded(argv: Sequence[str]) -> int | None:
        if len(argv) > 1 and not arguments:
            return _report(
                f"unexpected argument {argv[1]!r}: expected flags of the form --name=value"
            )
        for package in flags.FLAGS.trust:
            registry.trust(package)
        try:
            for path in argv[1:]:
                require_path(path, path)
            return main(list(argv[1:])) if arguments else main()
        except UserError as error:
            return _report(str(error), error.exit_code)
        except NotImplementedError as error:
            from qwen3next_jax.ops.implementations import Unsupported  # this imports JAX

            if not isinstance(error, Unsupported):
                raise
            return _report(str(error))
        except KeyboardInterrupt:
            _report("interrupted")
            return ExitCode.INTERRUPTED
        except RuntimeError as error:
            if not (requested := out_of_memory(error)):
                raise
            return _report(
                f"out of memory ({requested}): give fewer rows or tokens at a time, or more "
                "devices; qwen3next plan shows what a training step needs"
            )

    keep_freed_memory()
    _Interrupts().start()
    # At INFO, JAX logs the accelerators that this machine does not have.
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(guarded, flags_parser=functools.partial(_parse, command.__doc__ or ""))
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        sys.exit(128 + signal.SIGPIPE)
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        if _reader_has_gone():  # otherwise Python reports unwritten output as an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it, as in `| head`."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Interrupts(threading.Thread):
    """Reacts to Ctrl-C while XLA compiles. Python raises KeyboardInterrupt only after the compile,
    which can take minutes; this thread prints a line at the first Ctrl-C and ends the process at
    the second. It does nothing while a command has its own handler of SIGINT.
    """

    def __init__(self):
        super().__init__(name="interrupts", daemon=True)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        first = True
        while received := self._reader.recv(1):
            if (
                received[0] != signal.SIGINT
                or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            ):
                continue
            if not first:
                os._exit(ExitCode.INTERRUPTED)
            first = False
            time.sleep(0.5)  # usually the command ends within this time
            os.write(2, b"interrupted: ends after the current operation; again to stop now\n")


def interrupt_at_sigterm() -> None:
    """Makes SIGTERM act like Ctrl-C. Without it the process ends without a line, for example where
    a scheduler's time is over. It is for commands that do not stay in compiled code for long.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _report(message: str, code: ExitCode = ExitCode.USER_ERROR) -> int:
    print(f"error: {escape_lines(message)}", file=sys.stderr)
    return code


def _parse(doc: str, argv: Sequence[str]) -> list[str]:
    """Parses the flags and returns the other arguments. Prints the help and exits if the user asks
    for it; exits with one line on standard error if a flag is wrong.
    """
    try:
        if asked := [argument for argument in argv[1:] if argument in _HELP]:
            word = "".join(argv[argv.index(asked[0]) + 1 :][:1])
            print(_help_on(word) if word and not word.startswith("-") else _help(doc))
            sys.exit(ExitCode.DONE)
        return flags.FLAGS(_take_overrides(argv))
    except UserError as error:
        sys.exit(_report(str(error)))
    except flags.UnrecognizedFlagError as error:
        hint = (
            (flags_hint(settings_called(error.flagname)) if _reads_settings else "")
            or did_you_mean(error.flagname, _own_flags()).replace("'", "--", 1).replace("'", "")
            or "; --help shows them"
        )
        sys.exit(_report(f"--{error.flagname}: no such flag{hint}"))
    except flags.Error as error:
        text = re.sub(
            r"invalid literal for int\(\) with base 10: .*", "expected a whole number", str(error)
        )
        text = re.sub(r"could not convert string to float: .*", "expected a number", text)
        sys.exit(_report(text.removeprefix("flag ")))


def _take_overrides(argv: Sequence[str]) -> list[str]:
    """Appends arguments of the form `--config.a.b=value` or `--config.a.b value` to `_overrides`,
    if the command reads config files. Returns the other arguments.

    Raises:
      UserError: a setting does not exist, or its value is missing.
    """
    rest, arguments = [argv[0]], collections.deque(argv[1:])
    while arguments:
        argument = arguments.popleft()
        name, equals, text = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name.startswith("config.") or not _reads_settings:
            rest.append(argument)
            continue
        name = name.removeprefix("config.")
        default = default_of(name)
        if not equals:
            # The type of a mixer's setting is not known yet; without a value it is a boolean.
            has_value = bool(arguments) and not arguments[0].startswith("--")
            if isinstance(default, bool) or isinstance(default, FlagText) and not has_value:
                text = "True"
            elif arguments:
                text = arguments.popleft()
            else:
                raise UserError(f"--config.{name}: a value is missing: expected --config.{name}=…")
        _overrides.append((name, text))
    return rest


_reads_settings = False  # whether the command accepts `--config.group.name=value`
_overrides: list[tuple[str, str]] = []
_file_values: dict[str, Any] = {}  # the settings of the file --config, without the overrides


def _own_flags() -> list[str]:
    """Returns the names of the flags that this package defines. Other flags are from libraries."""
    modules = {name: flags.FLAGS.find_module_defining_flag(name) for name in flags.FLAGS}
    return sorted(name for name, module in modules.items() if module.startswith("qwen3next_jax."))


def _help(doc: str) -> str:
    """Returns the text of `--help`: the command's docstring, its flags, and every setting."""
    width = _help_width()
    lines = [doc.strip(), "", "flags:"]
    for name, text in _flag_entries():
        lines += _entry(name, text, width)
    if _reads_settings:
        lines += ["", "settings, with their defaults (--help WORD shows those with this word):"]
        for _, entries in itertools.groupby(_setting_entries(), lambda entry: entry[0]):
            lines.append("")
            for _, name, text in entries:
                lines += _entry(name, text, width)
    return "\n".join(lines)


def _help_on(word: str) -> str:
    """Returns the text of `--help WORD`: the flags and settings that have the word in their name or
    meaning.

    Raises:
      UserError: none has it.
    """
    entries = _flag_entries()
    if _reads_settings:
        entries += [(name, text) for _, name, text in _setting_entries()]
    found = [entry for entry in entries if word.lower() in " ".join(entry).lower()]
    if not found:
        parts = {part for name, _ in entries for part in re.findall(r"\w+", name.partition("=")[0])}
        raise UserError(
            f"--help {word}: no flag or setting has this word{did_you_mean(word, sorted(parts))}; "
            "--help alone shows all"
        )
    return "\n".join(line for entry in found for line in _entry(*entry, _help_width()))


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _flag_entries() -> list[tuple[str, str]]:
    """Returns (flag, meaning) of the command's own flags."""
    entries = []
    for flag in map(flags.FLAGS.__getitem__, _own_flags()):
        default = (
            ""
            if flag.default in (None, "", False, []) or "(default" in flag.help
            else f" (default: {flag.default_as_str[1:-1]})"
        )
        entries.append(
            (f"--{flag.name}" + "=…" * (not flag.boolean), flag.help.partition(";\n")[0] + default)
        )
    return entries


def _setting_entries() -> Iterator[tuple[str, str, str]]:
    """Yields (group, flag with its default, meaning) of every setting, in the order of the
    groups.
    """
    for name, default, allowed, meaning in list_settings(Config):
        group = name.rpartition(".")[0]
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if isinstance(default, MixerConfig):
            yield group, f"--config.{name}.SETTING=…", meaning
            for mixer, own in mixer_settings().items():
                text = ", ".join(f"{setting.name}={setting.default}" for setting in own)
                yield group, f"  {mixer}:", text
            continue
        text = f"{allowed}: {meaning}" if allowed and meaning else allowed or meaning
        yield group, f"--config.{name}={default}", text


def _entry(name: str, text: str, width: int) -> list[str]:
    """Returns the lines of `--help` for one name. The text begins on the line of the name, or below
    it if the name is long.
    """
    if len(name) > 22:
        return [
            f"  {name}",
            *textwrap.wrap(text, width, initial_indent=" " * 25, subsequent_indent=" " * 25),
        ]
    return textwrap.wrap(text, width, initial_indent=f"  {name:22} ", subsequent_indent=" " * 25)


def define_config_flag() -> Callable[..., Config | None]:
    """Defines the flag `--config=FILE.py` and its overrides `--config.group.name=value`.

    Returns:
      A function (required, may_resume) that returns the validated Config. With `required=False` it
      returns None if the flag is not given. With `may_resume=True`, if `--workdir` has a run that
      has taken steps and `model.vocab_size` is 0, the Config gets the vocabulary size of that run.
    """
    accept_settings()
    holder = flags.DEFINE_string(
        "config",
        None,
        "Python file with get_config(), which is run, such as configs/tiny.py; a name such as tiny "
        "stands for a config that comes with this project",
    )

    def get(required: bool = True, may_resume: bool = False) -> Config | None:
        if holder.value is None and (required or _overrides):
            why = "" if required else f" (--config.{_overrides[0][0]} changes a setting of it)"
            raise UserError(
                f"--config is missing{why}: expected a file such as --config=configs/tiny.py"
            )
        if holder.value is None:
            return None
        values = load_config_file(find_file(holder.value))
        _file_values.update(copy.deepcopy(values))
        apply_overrides(values, _overrides)
        return _read(values, may_resume)

    return get


def accept_settings() -> None:
    """Makes the command accept flags of the form `--config.group.name=value`, and makes its
    `--help` list the settings.
    """
    global _reads_settings
    _reads_settings = True


def load_settings(path: str) -> dict[str, Any]:
    """Reads a config file, and applies the overrides of the command line. Returns the settings as a
    nested dict, which is not validated yet.

    Args:
      path: the path of the file, or the name of a config that comes with this project.

    Raises:
      UserError: the file cannot be read, or the text of an override is not a value of its type.
    """
    values = load_config_file(find_file(path), flag="")
    apply_overrides(values, _overrides)
    return values


def validate_settings(values: dict[str, Any]) -> Config:
    """Returns the configuration that the nested dict `values` describes.

    Raises:
      UserError: a setting does not exist or is not valid.
    """
    return _read(values, may_resume=False)


def given_settings(may_resume: bool = False) -> UserInput | None:
    """Returns the settings that the user gave by `--config` and its overrides; None without
    `--config`. `define_config_flag` explains `may_resume`.
    """
    file = flags.FLAGS["config"].value
    if file is None:
        return None
    try:
        file_config = _read(copy.deepcopy(_file_values), may_resume)
    except UserError:  # the file is valid only with the overrides
        file_config = None
    return UserInput(frozenset(name for name, _ in _overrides), find_file(file), file_config)


def _read(values: dict[str, Any], may_resume: bool) -> Config:
    """Makes the Config of the settings in the nested dict `values`, which the user wrote. It fills
    in the vocabulary size and trusts the packages that the settings name.
    """
    name = str(values.get("name", Config().name))
    fill_from_tokenizer(values, _workdir_of(name) if may_resume else None)
    registry.trust_user_settings(values)
    return from_dict(Config, values)


def define_workdir_flag(default_from_config: bool) -> Callable[..., pathlib.Path]:
    """Defines `--workdir`.

    Returns:
      A function (name) that returns the path. Its argument is the name of the configuration, from
      which the default path is made.
    """
    flags.DEFINE_string(
        "workdir",
        None,
        "folder of the run"
        + (" (default: runs/<name of the config>)" if default_from_config else ""),
    )
    return _workdir_of


def _workdir_of(name: str | None = None) -> pathlib.Path | BucketPath:
    """Returns the value of `--workdir`, or runs/`name` if the flag is not given."""
    if (path := flags.FLAGS["workdir"].value) is not None:
        require_path(f"--workdir={path}", path)
        return to_path(path, "--workdir=")
    if name is None:
        raise UserError(
            "--workdir is missing: expected the folder of a run, such as --workdir=runs/tiny"
        )
    require_path(f"name = {name[:120]!r}", name)
    return pathlib.Path("runs") / name


def define_launch_flags() -> Callable[[], Launch | None]:
    """Defines `--coordinator`, `--processes` and `--process`.

    Returns:
      A function that returns this process's `Launch`, from the flags or from the environment
      variables of SLURM, Open MPI or a TPU slice; it returns None if the run has one process.
    """
    coordinator = flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0, where the processes of a run meet; SLURM, "
        "Open MPI and TPU slices set it",
    )
    processes = flags.DEFINE_integer(
        "processes", None, "number of processes of the run", lower_bound=1
    )
    process = flags.DEFINE_integer("process", None, "number of this process, from 0", lower_bound=0)

    def get() -> Launch | None:
        return find_launch(
            os.environ, coordinator.value, processes.value, process.value, has_tpu_chips()
        )

    return get


class Loading(NamedTuple):
    """The values of the flags of `define_loading_flags`, for `trained.load`; a field is None if its
    flag is not given.
    """

    step: int | None
    mesh: MeshConfig | None
    dtype: str | None
    launch: Launch | None
    ema: bool


@functools.cache  # several commands in one process may define these flags
def define_loading_flags() -> Callable[[], Loading]:
    """Defines `--step`, `--ema`, `--mesh`, `--dtype` and the flags of `define_launch_flags`.
    Returns a function that returns the values of these flags.
    """
    step = flags.DEFINE_integer(
        "step",
        None,
        "of a run: the checkpoint after so many steps (default: the newest)",
        lower_bound=0,
    )
    ema = flags.DEFINE_bool(
        "ema", False, "of a run: the moving average of its parameters (train.ema), not the newest"
    )
    mesh = define_mesh_flag()
    dtype = flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "of a Hugging Face directory's weights, read or written (norms, "
        "A_log, dt_bias, routers, shared experts' gates: always float32)",
    )
    get_launch = define_launch_flags()

    def get() -> Loading:
        sizes = read_mesh(mesh.value)
        return Loading(
            step.value, MeshConfig(**sizes) if sizes else None, dtype.value, get_launch(), ema.value
        )

    return get


@functools.cache
def define_mesh_flag() -> flags.FlagHolder:
    """Defines `--mesh`, whose text `read_mesh` reads."""
    return flags.DEFINE_string(
        "mesh",
        None,
        "devices along each axis, such as data=2,tensor=4 (default: as the configuration or the "
        "run says; of a Hugging Face directory all devices as data; of a search any)",
    )


def read_mesh(text: str | None) -> dict[str, int]:
    """Returns axis → size, from a text such as "data=64,expert=8"; {} for None.

    Raises:
      UserError: an axis does not exist or is given twice, or a size is not a number.
    """
    sizes: dict[str, int] = {}
    for part in [] if text is None else text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or not re.fullmatch("-?[0-9]{1,9}", size):
            raise UserError(
                f"--mesh={text}: {part!r} is not AXIS=SIZE with one of "
                f"{', '.join(MESH_AXES)}{did_you_mean(axis, MESH_AXES)}"
            )
        if axis in sizes:
            raise UserError(f"--mesh={text}: {axis} is given twice")
        sizes[axis] = int(size)
    return sizes


def check_model(flag: str, path: str | pathlib.Path) -> ModelConfig:
    """Reads the model's settings from the run or the Hugging Face directory at `path`.

    Raises:
      UserError: `path` is neither a run nor a Hugging Face directory. This error is raised before
        anything is loaded.
    """
    require_path(f"--{flag}={path}", path)
    folder = to_path(path, f"--{flag}=")
    if not (folder / "run.json").exists() and not (folder / "config.json").exists():
        reason = "it has neither run.json nor config.json" if folder.exists() else "no such folder"
        raise UserError(
            f"--{flag}={path}: not the folder of a run, nor a Hugging Face directory ({reason})"
            f"{similar_folder(folder)}"
        )
    if (folder / "run.json").exists():
        from qwen3next_jax.runs.record import read_config

        return read_config(folder).model
    from qwen3next_jax.interop.hf_config import read_hf_config

    return read_hf_config(path)


def check_writable(flag: str, path: str) -> None:
    """Checks the path of a file for results before the results are computed.

    Raises:
      UserError: the path is a folder, or its folder does not exist.
    """
    require_path(f"--{flag}={path}", path)
    if is_bucket(path):
        check_bucket(f"--{flag}={path}", to_path(path, f"--{flag}="))
        return
    if path and (pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir()):
        reason = (
            "a folder: expected the name of a file"
            if pathlib.Path(path).is_dir()
            else "there is no such folder"
        )
        raise UserError(f"--{flag}={path}: {reason}")


def positive_integers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """Reads the numbers of a comma-separated flag.

    Raises:
      UserError: a value is not a positive number.
    """
    if not values or not all(
        value.strip().isdecimal() and 0 < len(value) < 10 and int(value) for value in values
    ):
        raise UserError(
            f"--{flag}={','.join(values)}: expected positive numbers separated by commas"
        )
    return tuple(int(value) for value in values)


def make_console() -> Console:
    """Makes the console on which a command prints its tables. In a pipe or a file lines have any
    length, because a program may read them: nothing is wrapped or cut.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def enable_compilation_cache() -> None:
    """Stores compiled programs in the user's cache folder, so a command compiles them only once. On
    a GPU, JAX stores there as well what XLA measured to choose the form of each operation. Another
    release of jaxlib may choose among other forms, so each release has its own folder.
    """
    import jax
    import jaxlib

    if jax.config.jax_compilation_cache_dir is None:
        folder = pathlib.Path.home() / ".cache" / "qwen3next_jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder / jaxlib.__version__))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system. Must be called before
    JAX starts its threads.

    On CPU each step allocates its buffers with malloc. By default malloc maps large buffers anew,
    so the kernel zeroes hundreds of megabytes per step. With reuse, a step of configs/tiny.py took
    0.46 instead of 0.60 s on 2 cores.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # constants of malloc.h
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_arena_max, 1)
