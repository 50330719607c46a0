"""Runs a command: parses its flags, and turns an error into one line and an exit code."""

import contextlib
import functools
import os
import re
import select
import signal
import sys
import types
from collections.abc import Sequence

from absl import app, flags, logging

from qwen3next_jax.commands.config_flags import command_accepts_setting_flags, split_off_overrides
from qwen3next_jax.commands.help import flags_of_this_package, help_on_word, help_text
from qwen3next_jax.commands.interrupts import InterruptThread
from qwen3next_jax.commands.process_setup import keep_freed_memory
from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    did_you_mean,
    escape_control_in_lines,
    out_of_memory_message,
    require_path,
)
from qwen3next_jax.config import registry
from qwen3next_jax.config.files import setting_flags_hint, settings_ending_in

_STDOUT = 1
_HELP = ("-h", "-?", "--help", "-help", "--helpshort", "--helpfull")  # flags that ask for help


def run_command(command: types.ModuleType, arguments: str = "") -> None:
    """Parses the flags, runs `command.main()`, and exits with the code that `main` returns. A
    `UserError` becomes one line on standard error and an exit code. `--help` shows the command's
    docstring.

    Args:
      command: the module of the command.
      arguments: the name of the command's positional arguments, such as "WORKDIR"; "" if the
        command takes none. The positional arguments are paths, and `main` gets them as a list.
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
            return _report_error(
                f"unexpected argument {argv[1]!r}: expected flags of the form --name=value"
            )
        for package in flags.FLAGS.trust:
            registry.trust(package)
        try:
            for path in argv[1:]:
                require_path(path, path)
            return main(list(argv[1:])) if arguments else main()
        except UserError as error:
            return _report_error(str(error), error.exit_code)
        except NotImplementedError as error:
            from qwen3next_jax.ops.implementations import Unsupported  # this imports JAX

            if not isinstance(error, Unsupported):
                raise
            return _report_error(str(error))
        except KeyboardInterrupt:
            _report_error("interrupted")
            return ExitCode.INTERRUPTED
        except RuntimeError as error:
            if not (requested := out_of_memory_message(error)):
                raise
            return _report_error(
                f"out of memory ({requested}): give fewer rows or tokens at a time, or more "
                "devices; qwen3next plan shows what a training step needs"
            )

    keep_freed_memory()
    InterruptThread().start()
    # At INFO, JAX logs the accelerators that this machine does not have.
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(guarded, flags_parser=functools.partial(_parse_flags, command.__doc__ or ""))
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


def _report_error(message: str, code: ExitCode = ExitCode.USER_ERROR) -> int:
    print(f"error: {escape_control_in_lines(message)}", file=sys.stderr)
    return code


def _split_help(argument: str) -> list[str]:
    """Returns ["--help", "WORD"] for "--help=WORD", and [argument] for any other argument."""
    flag, equals, word = argument.partition("=")
    return [flag, word] if equals and flag in _HELP else [argument]


def _parse_flags(doc: str, argv: Sequence[str]) -> list[str]:
    """Parses the flags and returns the arguments that are not flags. If the user asks for help,
    prints the help and exits. If a flag is wrong, prints one line on standard error and exits.
    """
    argv = [part for argument in argv for part in _split_help(argument)]
    try:
        if asked := [argument for argument in argv[1:] if argument in _HELP]:
            word = "".join(argv[argv.index(asked[0]) + 1 :][:1])
            print(help_on_word(word) if word and not word.startswith("-") else help_text(doc))
            sys.exit(ExitCode.DONE)
        return flags.FLAGS(split_off_overrides(argv))
    except UserError as error:
        sys.exit(_report_error(str(error)))
    except flags.UnrecognizedFlagError as error:
        hint = (
            (
                setting_flags_hint(settings_ending_in(error.flagname))
                if command_accepts_setting_flags()
                else ""
            )
            or did_you_mean(error.flagname, flags_of_this_package())
            .replace("'", "--", 1)
            .replace("'", "")
            or "; --help shows them"
        )
        sys.exit(_report_error(f"--{error.flagname}: no such flag{hint}"))
    except flags.Error as error:
        text = re.sub(
            r"invalid literal for int\(\) with base 10: .*", "expected a whole number", str(error)
        )
        text = re.sub(r"could not convert string to float: .*", "expected a number", text)
        text = re.sub(r"\('Non-boolean argument .*", "expected true or false", text)
        sys.exit(_report_error(text.removeprefix("flag ")))
