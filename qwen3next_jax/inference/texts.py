"""What stands beside a model's weights for those who talk to it: the tokens that end a text, the
template of a chat.
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

_LONGEST = 1 << 20  # characters of a template, and of what it makes
_MEMORY = 1 << 30  # bytes that it may take
_SECONDS = 10  # of processor time that it may take
_PATIENCE = 60  # seconds until its process has ended, however busy the machine is


def end_tokens(folder: epath.PathLike, vocab_size: int) -> set[int]:
    """All `eos_token_id`s of config.json and generation_config.json in `folder`, one or several
    each; the set is empty for a run.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = epath.Path(folder) / name
        if not file.exists():
            continue
        with as_user_error(f"{file}: cannot be read", OSError, ValueError):
            fields = json_files.read(file)
        inner = fields.get("text_config")
        if "eos_token_id" not in fields and isinstance(inner, dict):
            fields = inner
        ids = fields.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids
        ):
            raise UserError(
                f"{file}: eos_token_id = {short_repr(ids)}: expected a token's number, 0 … "
                f"{vocab_size - 1}, or a list of them"
            )
        found |= set(ids)
    return found


class ChatTemplate:
    """The template of a tokenizer (jinja2, in its sandbox and without a loader: it sees the
    messages and no file; in a process of its own, of bounded time and memory).
    """

    def __init__(self, folder: epath.PathLike):
        """Reads `chat_template.jinja`, or `chat_template` of tokenizer_config.json, in `folder`."""
        folder = epath.Path(folder)
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        fields = {}
        if config.exists():
            with as_user_error(f"{config}: cannot be read", OSError, ValueError):
                fields = json_files.read(config)
        text = fields.get("chat_template")
        if isinstance(text, list):  # several, by name
            text = next(
                (
                    entry.get("template")
                    for entry in text
                    if isinstance(entry, dict) and entry.get("name") == "default"
                ),
                None,
            )
        self._where = config
        if file.exists():
            self._where = file
            with as_user_error(f"{file}: cannot be read", OSError, ValueError):
                with json_files.open_regular(file) as opened:
                    content = opened.read(4 * _LONGEST + 1)
                if len(content) > 4 * _LONGEST:
                    raise ValueError(f"more than {4 * _LONGEST >> 20} MiB")
                text = content.decode()
        if not isinstance(text, str):
            raise UserError(
                f"{folder}: no chat template there (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): a model "
                "that was not trained to chat has none; use --prompt"
            )
        if len(text) > _LONGEST:
            raise UserError(
                f"{self._where}: a chat template of more than {_LONGEST} characters: expected at "
                "most as many"
            )
        self._text = text
        self._special = {
            name: value.get("content") if isinstance(value := fields.get(name), dict) else value
            for name in ("bos_token", "eos_token")
        }
        self._rendered(None)

    def __call__(self, messages: Sequence[dict[str, str]]) -> str:
        """The text that asks for an answer to `messages`, each with a role and content.

        Raises:
          UserError: the template fails, or reaches for what it may not.
        """
        text = self._rendered(list(messages))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self._where}: the chat template makes a lone surrogate, which no tokenizer can "
                "read: correct the template"
            ) from error
        if not text or len(text) > _LONGEST:
            count = f"more than {_LONGEST}" if text else "0"
            raise UserError(
                f"{self._where}: the chat template makes {count} characters: expected 1 … "
                f"{_LONGEST}"
            )
        return text

    def _rendered(self, messages: list[dict[str, str]] | None) -> str:
        """What the template makes of `messages`; "" without, where it is only checked."""
        request = {
            "template": self._text,
            "special": self._special,
            "messages": messages,
            "seconds": _SECONDS,
            "bytes": _MEMORY,
            "characters": _LONGEST,
        }
        # -P: the modules beside it are not the standard library's
        program = [
            sys.executable,
            "-P",
            str(pathlib.Path(__file__).with_name("render_template.py")),
        ]
        try:
            ended = subprocess.run(
                program, input=json.dumps(request).encode(), capture_output=True, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{self._where}: the chat template takes more than {_PATIENCE} seconds"
            ) from error
        if ended.returncode == -signal.SIGXCPU:
            raise UserError(
                f"{self._where}: the chat template takes more than {_SECONDS} seconds of processor "
                "time"
            )
        if ended.returncode:
            last = " ".join(ended.stderr.decode(errors="replace").split())[-200:]
            raise UserError(
                f"{self._where}: the chat template fails (its process ended with "
                f"{ended.returncode}: {last})"
            )
        answer = json.loads(ended.stdout)
        if "refused" in answer:
            told_by = " ".join(answer["refused"].split())[:200]
            raise UserError(f"{self._where}: the chat template refuses these messages ({told_by})")
        if "error" in answer:
            what = " ".join(answer["error"].split())[:200]
            raise UserError(f"{self._where}: the chat template fails ({what})")
        return answer["text"]
