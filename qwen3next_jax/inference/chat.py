"""Reads two things that text generation needs from the files beside a model's weights: the tokens
that end a text, and the chat template.
"""

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from etils import epath

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, short_repr, as_user_error
from qwen3next_jax.common.storage import to_path

_MAX_CHARACTERS = 1 << 20  # the most characters of a template, and of the text that it renders
# The limits of the process that renders a template: bytes of memory, seconds of processor time, and
# seconds of elapsed time. The last limit is larger, because other processes may keep the machine
# busy.
_MAX_BYTES = 1 << 30
_MAX_CPU_SECONDS = 10
_TIMEOUT = 60


def end_tokens(folder: epath.PathLike, vocab_size: int) -> set[int]:
    """Returns all `eos_token_id`s in config.json and generation_config.json of `folder`.

    In each file the field may be missing, an id, or a list of ids. The folder of a run has neither
    file.

    Raises:
      UserError: a file cannot be read, or an id is not in the vocabulary.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = to_path(folder) / name
        if not file.exists():
            continue
        with as_user_error(f"{file}: cannot be read", OSError, ValueError):
            fields = json_files.read(file)
        inner = fields.get("text_config")
        if "eos_token_id" not in fields and isinstance(inner, dict):
            fields = inner
        ids = fields.get("eos_token_id")
        if ids is None:
            ids = []
        elif not isinstance(ids, list):
            ids = [ids]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise UserError(
                f"{file}: eos_token_id = {short_repr(ids)}: expected a token's number, 0 … "
                f"{vocab_size - 1}, or a list of them"
            )
        found |= set(ids)
    return found


class ChatTemplate:
    """The chat template of a tokenizer. It renders messages to the text that the model continues.

    A template is a program in jinja2's language. A separate process with limited time and memory
    renders it, in jinja2's sandbox and without access to files.
    """

    def __init__(self, folder: epath.PathLike):
        """Reads chat_template.jinja, or `chat_template` of tokenizer_config.json, in `folder`.

        Raises:
          UserError: there is no template, or it cannot be read, is too long, or has a syntax error.
        """
        folder = to_path(folder)
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        fields = {}
        if config.exists():
            with as_user_error(f"{config}: cannot be read", OSError, ValueError):
                fields = json_files.read(config)
        if file.exists():
            self._source = file
            text = _read_template_file(file)
        else:
            self._source = config
            text = _default_template(fields.get("chat_template"))
        if not isinstance(text, str):
            raise UserError(
                f"{folder}: no chat template there (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): a model that was not trained to chat has none; use "
                "--prompt"
            )
        if len(text) > _MAX_CHARACTERS:
            raise UserError(
                f"{self._source}: a chat template of more than {_MAX_CHARACTERS} characters: "
                "expected at most as many"
            )
        self._text = text
        self._special = {}
        for name in ("bos_token", "eos_token"):
            token = fields.get(name)
            self._special[name] = token.get("content") if isinstance(token, dict) else token
        self._render(None)

    def __call__(self, messages: Sequence[dict[str, str]]) -> str:
        """Returns the text that the model continues with its answer to the messages.

        Args:
          messages: the conversation so far; each message has "role" and "content".

        Raises:
          UserError: the template fails, refuses the messages, does what the sandbox forbids, or
            renders no text or too much.
        """
        text = self._render(list(messages))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self._source}: the chat template makes a lone surrogate, which no tokenizer can "
                "read: correct the template"
            ) from error
        if not text or len(text) > _MAX_CHARACTERS:
            count = f"more than {_MAX_CHARACTERS}" if text else "0"
            raise UserError(
                f"{self._source}: the chat template makes {count} characters: expected 1 … "
                f"{_MAX_CHARACTERS}"
            )
        return text

    def _render(self, messages: list[dict[str, str]] | None) -> str:
        """Renders the messages. Without messages, only checks the template's syntax, and returns
        "".

        If the text is longer than allowed, it is cut off one character after the limit.

        Raises:
          UserError: the template has an error, refuses the messages, or exceeds a limit of its
            process.
        """
        request = {
            "template": self._text,
            "special": self._special,
            "messages": messages,
            "seconds": _MAX_CPU_SECONDS,
            "bytes": _MAX_BYTES,
            "characters": _MAX_CHARACTERS,
        }
        renderer = pathlib.Path(__file__).with_name("render_template.py")
        # -P: Python must not import the files beside the renderer in place of the standard library.
        command = [sys.executable, "-P", str(renderer)]
        try:
            process = subprocess.run(
                command, input=json.dumps(request).encode(), capture_output=True, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{self._source}: the chat template takes more than {_TIMEOUT} seconds"
            ) from error
        if process.returncode == -signal.SIGXCPU:
            raise UserError(
                f"{self._source}: the chat template takes more than {_MAX_CPU_SECONDS} seconds of "
                "processor time"
            )
        if process.returncode:
            end = " ".join(process.stderr.decode(errors="replace").split())[-200:]
            raise UserError(
                f"{self._source}: the chat template fails (its process ended with "
                f"{process.returncode}: {end})"
            )
        answer = json.loads(process.stdout)
        if "refused" in answer:
            reason = " ".join(answer["refused"].split())[:200]
            raise UserError(f"{self._source}: the chat template refuses these messages ({reason})")
        if "error" in answer:
            reason = " ".join(answer["error"].split())[:200]
            raise UserError(f"{self._source}: the chat template fails ({reason})")
        return answer["text"]


def _default_template(template: object) -> object:
    """Returns `template` itself, unless it is a list of named templates. From a list it returns the
    template named "default", or None if there is none.
    """
    if not isinstance(template, list):
        return template
    for entry in template:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return entry.get("template")
    return None


def _read_template_file(file: epath.Path) -> str:
    max_bytes = 4 * _MAX_CHARACTERS  # a UTF-8 character has at most 4 bytes
    with as_user_error(f"{file}: cannot be read", OSError, ValueError):
        with json_files.open_regular(file) as opened:
            content = opened.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"more than {max_bytes >> 20} MiB")
        return content.decode()
