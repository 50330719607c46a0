"""Makes the text of `--help`: a command's docstring, its flags, and the settings if the command
reads configs.
"""

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator

from absl import flags

from qwen3next_jax.commands.config_flags import command_accepts_setting_flags
from qwen3next_jax.common.errors import UserError, did_you_mean
from qwen3next_jax.config import Config, MixerConfig
from qwen3next_jax.config.describe import list_settings, settings_by_mixer


def help_text(doc: str) -> str:
    """Returns the text of `--help`: the command's docstring, its flags, and every setting."""
    width = _help_width()
    lines = [doc.strip(), "", "flags:"]
    for name, text in _flag_entries():
        lines += _format_entry(name, text, width)
    if command_accepts_setting_flags():
        lines += ["", "settings, with their defaults (--help WORD shows those with this word):"]
        for _, entries in itertools.groupby(_setting_entries(), lambda entry: entry[0]):
            lines.append("")
            for _, name, text in entries:
                lines += _format_entry(name, text, width)
    return "\n".join(lines)


def help_on_word(word: str) -> str:
    """Returns the text of `--help WORD`: the flags and settings whose name or meaning contains the
    word.

    Raises:
      UserError: no flag and no setting contains the word.
    """
    entries = _flag_entries()
    if command_accepts_setting_flags():
        entries += [(name, text) for _, name, text in _setting_entries()]
    found = [entry for entry in entries if word.lower() in " ".join(entry).lower()]
    if not found:
        parts = {part for name, _ in entries for part in re.findall(r"\w+", name.partition("=")[0])}
        raise UserError(
            f"--help {word}: no flag or setting has this word{did_you_mean(word, sorted(parts))}; "
            "--help alone shows all"
        )
    return "\n".join(line for entry in found for line in _format_entry(*entry, _help_width()))


def flags_of_this_package() -> list[str]:
    """Returns the names of the flags that this package defines. Libraries define other flags."""
    modules = {name: flags.FLAGS.find_module_defining_flag(name) for name in flags.FLAGS}
    return sorted(name for name, module in modules.items() if module.startswith("qwen3next_jax."))


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _flag_entries() -> list[tuple[str, str]]:
    """Returns (flag, meaning) for each flag that this package defines."""
    entries = []
    for flag in map(flags.FLAGS.__getitem__, flags_of_this_package()):
        default = (
            ""
            if flag.default in (None, "", False, []) or "(default" in flag.help
            else f" (default: {flag.default_as_str[1:-1]})"
        )
        name = f"--{flag.name}" if flag.boolean else f"--{flag.name}=…"
        entries.append((name, flag.help.partition(";\n")[0] + default))
    return entries


def _setting_entries() -> Iterator[tuple[str, str, str]]:
    """Yields (group, flag with the default value, meaning) of every setting, group by group."""
    for name, default, allowed, meaning in list_settings(Config):
        group = name.rpartition(".")[0]
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if isinstance(default, MixerConfig):
            yield group, f"--config.{name}.SETTING=…", meaning
            for mixer, mixer_settings in settings_by_mixer().items():
                text = ", ".join(f"{setting.name}={setting.default}" for setting in mixer_settings)
                yield group, f"  {mixer}:", text
            continue
        text = f"{allowed}: {meaning}" if allowed and meaning else allowed or meaning
        yield group, f"--config.{name}={default}", text


def _format_entry(name: str, text: str, width: int) -> list[str]:
    """Returns the lines of `--help` for one flag or setting. The explanation begins on the line of
    the name, or on the next line if the name is long.
    """
    if len(name) > 22:
        return [
            f"  {name}",
            *textwrap.wrap(text, width, initial_indent=" " * 25, subsequent_indent=" " * 25),
        ]
    return textwrap.wrap(text, width, initial_indent=f"  {name:22} ", subsequent_indent=" " * 25)
