"""Chat templates. A chat template is a jinja2 program in the folder of a tokenizer. It writes a
conversation as text. Generation renders its prompts with the chat template, and
`data.conversations` renders the conversations of training data with it.
"""

import dataclasses
import functools
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error
from qwen3next_jax.common.storage import to_path

# A message of a conversation: "role" and "content", and whatever else the template reads.
Message = Mapping[str, Any]
# The names under which templates read the reasoning before an answer.
REASONING = ("reasoning_content", "thinking")

_MAX_CHARACTERS = 1 << 20  # the most characters of a template, and of the text that it renders
# The limits of the process that renders a template: bytes of memory; and for each conversation
# seconds of processor time, and seconds of elapsed time. The last limit is larger, because other
# processes may keep the machine busy.
_MAX_BYTES = 1 << 30
_MAX_CPU_SECONDS = 10
_TIMEOUT = 60


class RenderedConversation(NamedTuple):
    """A conversation as text, or the reason why it has no text.

    Attributes:
      text: the text.
      assistant_spans: (index of the first character, end) of each turn of the assistant, in order.
      fault: what is wrong with the conversation or the template; "" if nothing is.
    """

    text: str
    assistant_spans: tuple[tuple[int, int], ...] = ()
    fault: str = ""


class TemplateFile(NamedTuple):
    """A chat template as a tokenizer's folder holds it.

    Attributes:
      path: the file that holds the template.
      text: the template.
      special_tokens: name → text of the tokens that a template may name: bos_token and eos_token.
    """

    path: epath.Path
    text: str
    special_tokens: dict[str, str | None]


def read_template(folder: epath.PathLike) -> TemplateFile | None:
    """Reads the chat template in `folder`: the file chat_template.jinja or, without it, the field
    `chat_template` of tokenizer_config.json. Returns None if the folder has neither.

    Raises:
      UserError: the template cannot be read, or is too long.
    """
    folder = to_path(folder)
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    fields = {}
    if config.exists():
        with as_user_error(f"{config}: cannot be read", OSError, ValueError):
            fields = json_files.read(config)
    if path.exists():
        text = _read_template_file(path)
    else:
        path, text = config, _template_named_default(fields.get("chat_template"))
    if not isinstance(text, str):
        return None
    if len(text) > _MAX_CHARACTERS:
        raise UserError(
            f"{path}: a chat template of more than {_MAX_CHARACTERS} characters: expected at most "
            "as many"
        )
    special = {}
    for name in ("bos_token", "eos_token"):
        token = fields.get(name)
        special[name] = token.get("content") if isinstance(token, dict) else token
    return TemplateFile(path, text, special)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer. It can be pickled.

    A separate process renders the template, with limited time and memory, in jinja2's sandbox and
    without access to files.

    Templates read the reasoning before an answer from the field "reasoning_content" or "thinking"
    of a message. The template gets every message with the reasoning in both fields or in neither.
    """

    _file: TemplateFile
    _date: str = ""

    @classmethod
    def of_folder(cls, folder: epath.PathLike, remedy: str, date: str = "") -> "ChatTemplate":
        """Reads the template of the tokenizer in `folder`, and checks its syntax.

        Args:
          folder: the folder.
          remedy: what to do if the folder has no template: the end of the error message.
          date: the day, such as "2026-01-31", that a template gets if it asks for the date. If
            `date` is "", a template that asks for the date fails.

        Raises:
          UserError: the folder has no template, or the template cannot be read, is too long, or has
            a syntax error.
        """
        file = read_template(folder)
        if file is None:
            raise UserError(
                f"{folder}: no chat template there (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json): {remedy}"
            )
        template = cls(file, date)
        template._run_renderer({})
        return template

    @functools.cached_property
    def digest(self) -> str:
        """A digest of everything that determines the rendered text, except jinja2's version."""
        # A template that does not ask for the date writes the same on any day.
        date = self._date if "strftime_now" in self._file.text else ""
        return digests.sha256_json([self._file.text, self._file.special_tokens, date])

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Renders the prompt: the messages as text, which the model continues with its answer.

        Args:
          messages: the conversation so far.

        Raises:
          UserError: the template fails, refuses the messages, does what the sandbox forbids, or
            renders no text or too much.
        """
        (rendered,) = self._render({"prompt": _with_both_reasoning_names(messages)})
        if rendered.fault:
            raise UserError(f"{self._file.path}: the chat template {rendered.fault}")
        return rendered.text

    def render_conversations(
        self, conversations: Iterable[Sequence[Message]]
    ) -> list[RenderedConversation]:
        """Renders whole conversations, and finds the assistant's turns in the text. A turn is the
        text of a {% generation %} block of the template. If the template has no {% generation %}
        block, a turn is the text that a message of the assistant adds to the prompt before this
        message.

        Raises:
          UserError: rendering exceeds the time or the memory that its process may take, or the
            template asks for the date and there is none.
        """
        return self._render({"conversations": list(map(_with_both_reasoning_names, conversations))})

    def _render(self, request: dict[str, Any]) -> list[RenderedConversation]:
        answers = self._run_renderer(request)
        if any("dateless" in answer for answer in answers):
            raise UserError(
                f"{self._file.path}: the chat template writes the date: name the day to write with "
                "data.template_date = 'YYYY-MM-DD', so that prepared data are the same every day"
            )
        return list(map(_parse_rendering, answers))

    def _run_renderer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs the program render_template.py with the JSON object `request`, and returns the field
        `rendered` of the program's output. An empty request checks the template's syntax.

        Raises:
          UserError: the template has an error, or exceeds the time or the memory of its process.
        """
        request = request | {
            "template": self._file.text,
            "special": self._file.special_tokens,
            "date": self._date,
            "seconds": _MAX_CPU_SECONDS,
            "bytes": _MAX_BYTES,
            "characters": _MAX_CHARACTERS,
        }
        renderer = pathlib.Path(__file__).with_name("render_template.py")
        # -P: Python must not import the files beside the renderer in place of the standard library.
        command = [sys.executable, "-P", str(renderer)]
        where = self._file.path
        timeout = _TIMEOUT * max(len(request.get("conversations", ())), 1)
        try:
            process = subprocess.run(
                command, input=json.dumps(request).encode(), capture_output=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{where}: the chat template takes more than {timeout} seconds"
            ) from error
        if process.returncode == -signal.SIGXCPU:
            raise UserError(
                f"{where}: the chat template takes more than {_MAX_CPU_SECONDS} seconds of "
                "processor time"
            )
        if process.returncode:
            end = " ".join(process.stderr.decode(errors="replace").split())[-200:]
            raise UserError(
                f"{where}: the chat template fails (its process ended with "
                f"{process.returncode}: {end})"
            )
        answer = json.loads(process.stdout)
        if "error" in answer:
            raise UserError(f"{where}: the chat template fails ({_shortened(answer['error'])})")
        return answer["rendered"]


def _with_both_reasoning_names(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with their reasoning in both fields, "reasoning_content" and "thinking".
    A message whose reasoning is null gets neither of the two fields, because templates test whether
    a field exists.
    """
    found = []
    for message in messages:
        rest = {name: value for name, value in message.items() if name not in REASONING}
        texts = [message[name] for name in REASONING if message.get(name) is not None]
        found.append(rest | (dict.fromkeys(REASONING, texts[0]) if texts else {}))
    return found


def _parse_rendering(answer: Mapping[str, Any]) -> RenderedConversation:
    """Converts the output of render_template.py for one conversation."""
    if "refused" in answer:
        return RenderedConversation(
            "", fault=f"refuses these messages ({_shortened(answer['refused'])})"
        )
    if "error" in answer:
        return RenderedConversation("", fault=f"fails ({_shortened(answer['error'])})")
    if "unclear" in answer:
        return RenderedConversation(
            "", fault=f"does not tell the assistant's turns: {answer['unclear']}"
        )
    text = answer["text"]
    try:
        text.encode()
    except UnicodeEncodeError:
        return RenderedConversation(
            "", fault="makes a lone surrogate, which no tokenizer can read: correct the template"
        )
    if not text or len(text) > _MAX_CHARACTERS:
        count = f"more than {_MAX_CHARACTERS}" if text else "0"
        return RenderedConversation(
            "", fault=f"makes {count} characters: expected 1 … {_MAX_CHARACTERS}"
        )
    return RenderedConversation(
        text, tuple((start, stop) for start, stop in answer.get("turns", ()))
    )


def _shortened(reason: str) -> str:
    return " ".join(reason.split())[:200]


def _template_named_default(template: object) -> object:
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
        with json_files.open_regular_file(file) as opened:
            content = opened.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"more than {max_bytes >> 20} MiB")
        return content.decode()
