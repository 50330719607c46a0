"""A program that renders a chat template: the prompt of a conversation, or whole conversations with
the positions of the assistant's turns.

The program runs in a process of its own because a template may come from an untrusted source, and
jinja2's sandbox limits neither the time nor the memory that a template takes.
`chat_template.ChatTemplate` runs render_template.py by its path, so that the process imports jinja2
and nothing of qwen3next_jax.

Standard input is a JSON object:
  template: the template's text.
  special: name → text of the tokenizer's special tokens.
  date: the day that the template is told, such as "2026-01-31"; "" for none.
  prompt: a list of messages; the program renders the prompt of the next answer; or
  conversations: a list of conversations; the program renders each. Without `prompt` and
    `conversations`, the program only checks the template's syntax.
  seconds: the limit of the processor time for the prompt, or for each conversation.
  bytes: the limit of the memory of the program.
  characters: the limit of the length of a rendered text.

Standard output is a JSON object with `error`, the reason why the program failed, or with:
  rendered: a list with an object for the prompt or for each conversation. Each object has one of:
    text: the rendered text, cut off one character after the limit. A conversation also has `turns`,
      [first character, end] of each turn of the assistant.
    refused: why the template refuses the messages.
    error: why rendering failed.
    unclear: why the assistant's turns cannot be told from the other text.
    dateless: true, if the template asks for the date and there is none.
"""

import datetime
import json
import resource
import sys

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# They stand in the rendered text where the block {% generation %} begins and ends. No message that
# is trained on contains NUL.
_BEGIN, _END = "\0begin\0", "\0end\0"


class MessagesRefused(Exception):
    """Raised when the template calls raise_exception, with which templates refuse messages."""


class TurnsUnclear(Exception):
    """Raised if the assistant's turns cannot be told from the other text of a conversation."""


class MissingDate(Exception):
    """Raised if the template asks for the date and the request names no date."""


class GenerationBlock(jinja2.ext.Extension):
    """The block {% generation %} … {% endgeneration %}, in which chat templates write the text of
    the assistant. If `environment.marks` is true, the block writes a mark before and after the text
    of the assistant.
    """

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True
        if not self.environment.marks:
            return body

        def mark(text: str) -> jinja2.nodes.Output:
            return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)

        return [mark(_BEGIN), *body, mark(_END)]


class Renderer:
    """A compiled template.

    Args:
      text: the template.
      special: name of a special token, such as "eos_token" → its text or None. The template may
        read the tokens by name.
      date: the day that the function `strftime_now` formats; "" for none.
      marks: whether the blocks {% generation %} of the template write marks around their content.
      characters: the largest number of characters of a rendered text.

    Attributes:
      has_marks: whether the template marks the assistant's turns.
    """

    def __init__(self, text: str, special: dict, date: str, marks: bool, characters: int):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        environment.marks, environment.has_marks = marks, False
        environment.globals |= {name: value or "" for name, value in special.items()}
        environment.globals["raise_exception"] = _raise_refused
        environment.globals["strftime_now"] = _strftime_now_for(date)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(text)
        self.has_marks = environment.has_marks
        self._characters = characters

    def render_text(self, messages: list, prompt: bool) -> str:
        """Returns the rendered text, cut off one character after the limit `characters`.

        Args:
          messages: the messages.
          prompt: whether to add the beginning of the assistant's next turn to the end of the text.

        Raises:
          MessagesRefused: the template refuses the messages.
          Exception: any error in the template.
        """
        pieces, available = [], self._characters + 1
        for piece in self._template.generate(messages=messages, add_generation_prompt=prompt):
            pieces.append(piece[:available])
            available -= len(pieces[-1])
            if not available:
                break
        return "".join(pieces)

    def render_conversation(self, messages: list) -> dict:
        """Returns {"text", "turns"} of a conversation.

        Raises:
          TurnsUnclear: the assistant's turns cannot be told from the other text.
        """
        whole = self.render_text(messages, prompt=False)
        if len(whole) > self._characters:
            return {"text": whole, "turns": []}
        if self.has_marks:
            return self._remove_turn_marks(whole)
        return {"text": whole, "turns": self._find_turns_by_prompts(messages, whole)}

    def _remove_turn_marks(self, whole: str) -> dict:
        text, turns = "", []
        for i, piece in enumerate(whole.split(_BEGIN)):
            inside, found, outside = piece.partition(_END)
            if i and not found or not i and found or _END in outside:
                raise TurnsUnclear("its blocks {% generation %} do not stand one after the other")
            if i:
                turns.append([len(text), len(text) + len(inside)])
            text += inside + outside
        return {"text": text, "turns": turns}

    def _find_turns_by_prompts(self, messages: list, whole: str) -> list:
        """Returns [first character, end] of each turn of the assistant. A turn is the text that a
        message of the assistant adds to the prompt before this message.
        """
        turns = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render_text(messages[:i], prompt=True)
            after = self.render_text(messages[: i + 1], prompt=False)
            for name, begin, text in (
                ("the prompt before it", before, after),
                ("the conversation up to it", after, whole),
            ):
                if not text.startswith(begin):
                    raise TurnsUnclear(
                        f"{name} (message {i + 1}) is not the beginning of what follows, and the "
                        "template has no {% generation %} blocks"
                    )
            turns.append([len(before), len(after)])
        return turns


def render_request(request: dict) -> list[dict]:
    """Returns the list `rendered` of the program's output (described at the top of this file)."""
    limit, conversations = request["characters"], request.get("conversations")
    marks = conversations is not None
    renderer = Renderer(request["template"], request["special"], request["date"], marks, limit)
    if conversations is not None:
        found = []
        for messages in conversations:
            _limit_cpu_time(request["seconds"])
            found.append(_render_or_explain(renderer.render_conversation, messages))
        return found
    if request.get("prompt") is None:
        return []
    return [
        _render_or_explain(
            lambda messages: {"text": renderer.render_text(messages, True)}, request["prompt"]
        )
    ]


def _render_or_explain(render_one, messages: list) -> dict:
    try:
        return render_one(messages)
    except MessagesRefused as error:
        return {"refused": str(error)}
    except TurnsUnclear as error:
        return {"unclear": str(error)}
    except MissingDate:
        return {"dateless": True}
    except MemoryError:
        raise
    except Exception as error:
        return {"error": _describe_error(error)}


def main() -> None:
    request = json.load(sys.stdin)
    _set_resource_limit(resource.RLIMIT_AS, request["bytes"])
    _limit_cpu_time(request["seconds"])
    try:
        answer = {"rendered": render_request(request)}
    except MemoryError:
        answer = {"error": f"it needs more than {request['bytes'] >> 20} MiB of memory"}
    except Exception as error:
        answer = {"error": _describe_error(error)}
    json.dump(answer, sys.stdout)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _raise_refused(message: object):
    """Implements the function `raise_exception` of templates."""
    raise MessagesRefused(str(message)[:1000])


def _strftime_now_for(date: str):
    """Returns the function `strftime_now` of templates, which formats `date` instead of the present
    time.
    """

    def strftime_now(form: str) -> str:
        if not date:
            raise MissingDate
        return datetime.datetime.fromisoformat(date).strftime(form)

    return strftime_now


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Implements the filter `tojson` of templates. Unlike jinja2's own filter, this filter does not
    escape HTML, and takes the arguments of transformers' filter.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _limit_cpu_time(seconds: int) -> None:
    """Makes the system end this process after `seconds` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_resource_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)


def _set_resource_limit(which: int, maximum: int) -> None:
    """Sets this process's limit of the resource `which` to `maximum`, or to the hard limit of the
    system if the hard limit is lower.
    """
    _, hard_limit = resource.getrlimit(which)
    maximum = maximum if hard_limit == resource.RLIM_INFINITY else min(maximum, hard_limit)
    try:
        resource.setrlimit(which, (maximum, hard_limit))
    except (ValueError, OSError):  # macOS cannot limit the address space
        pass


if __name__ == "__main__":
    main()
