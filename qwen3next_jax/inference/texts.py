"""What stands beside a model's weights for those who talk to it: the tokens that end a text, the
template of a chat.
"""

import json
import re
from collections.abc import Sequence

from etils import epath

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, reason, short, told

_LONGEST = 1 << 20  # characters that a template may make


def end_tokens(folder: epath.PathLike, vocab_size: int) -> set[int]:
    """All `eos_token_id`s of config.json and generation_config.json in `folder`, one or several
    each; the set is empty for a run.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = epath.Path(folder) / name
        if not file.exists():
            continue
        with told(f"{file}: cannot be read", OSError, ValueError):
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
                f"{file}: eos_token_id = {short(ids)}: expected a token's number, 0 … "
                f"{vocab_size - 1}, or a list of them"
            )
        found |= set(ids)
    return found


class ChatTemplate:
    """The template of a tokenizer (jinja2, in its sandbox and without a loader: it sees the
    messages and no file).
    """

    def __init__(self, folder: epath.PathLike):
        """Reads `chat_template.jinja`, or `chat_template` of tokenizer_config.json, in `folder`."""
        import jinja2.sandbox

        folder = epath.Path(folder)
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        fields = {}
        if config.exists():
            with told(f"{config}: cannot be read", OSError, ValueError):
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
            with told(f"{file}: cannot be read", OSError, ValueError):
                text = file.read_text()
        if not isinstance(text, str):
            raise UserError(
                f"{folder}: no chat template there (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): a model "
                "that was not trained to chat has none; use --prompt"
            )
        special = {
            name: value.get("content") if isinstance(value := fields.get(name), dict) else value
            for name in ("bos_token", "eos_token")
        }
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {name: value or "" for name, value in special.items()} | {
            "raise_exception": self._raise
        }
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        self._template = self._guarded(
            lambda: environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text))
        )

    def __call__(self, messages: Sequence[dict[str, str]]) -> str:
        """The text that asks for an answer to `messages`, each with a role and content.

        Raises:
          UserError: the template fails, or reaches for what it may not.
        """
        text = self._guarded(
            lambda: self._template.render(messages=list(messages), add_generation_prompt=True)
        )
        if not text or len(text) > _LONGEST:
            raise UserError(
                f"{self._where}: the chat template makes {len(text)} characters: expected 1 … "
                f"{_LONGEST}"
            )
        return text

    def _guarded[T](self, work) -> T:
        try:
            return work()
        except UserError:
            raise
        # whatever a template does ends in its writer's line, not in a traceback
        except Exception as error:
            raise UserError(
                f"{self._where}: the chat template fails ({type(error).__name__}: {reason(error)})"
            ) from error

    def _raise(self, message: object):
        raise UserError(
            f"{self._where}: the chat template refuses these messages "
            f"({' '.join(str(message).split())[:200]})"
        )
