"""A program that renders one chat template.

It runs in a process of its own because a template may come from an untrusted source, and jinja2's
sandbox limits neither the time nor the memory that a template takes. `chat.ChatTemplate` runs this
file by its path, so that the process imports jinja2 and nothing of this package.

Standard input is a JSON object:
  template: the template's text.
  special: the tokenizer's special tokens by name.
  messages: a list of {"role", "content"}; null: only the template's syntax is checked.
  seconds, bytes, characters: the limits of processor time, memory and rendered text.

Standard output is a JSON object with one of:
  text: the rendered text, cut off one character after the limit.
  refused: why the template refuses the messages.
  error: why rendering failed.
"""

import json
import re
import resource
import sys

import jinja2.sandbox


class Refused(Exception):
    """Raised when the template calls raise_exception, with which templates refuse messages."""


def render(request: dict) -> str:
    """Returns the rendered text, cut off one character after the limit; "" without messages.

    Raises:
      Refused: the template refuses the messages.
      Exception: any error in the template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {name: value or "" for name, value in request["special"].items()}
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    template = environment.from_string(
        re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", request["template"])
    )
    if request["messages"] is None:
        return ""
    pieces, available = [], request["characters"] + 1
    for piece in template.generate(messages=request["messages"], add_generation_prompt=True):
        pieces.append(piece[:available])
        available -= len(pieces[-1])
        if not available:
            break
    return "".join(pieces)


def main() -> None:
    request = json.load(sys.stdin)
    _set_limit(resource.RLIMIT_AS, request["bytes"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + request["seconds"])
    try:
        answer = {"text": render(request)}
    except Refused as error:
        answer = {"refused": str(error)}
    except MemoryError:
        answer = {"error": f"it needs more than {request['bytes'] >> 20} MiB of memory"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    json.dump(answer, sys.stdout)


def _refuse(message: object):
    """Implements the function `raise_exception` of templates."""
    raise Refused(str(message)[:1000])


def _set_limit(which: int, maximum: int) -> None:
    """Lowers the limit of one of this process's resources to `maximum`, or to the system's own
    limit if that is lower.
    """
    _, hard_limit = resource.getrlimit(which)
    maximum = maximum if hard_limit == resource.RLIM_INFINITY else min(maximum, hard_limit)
    try:
        resource.setrlimit(which, (maximum, hard_limit))
    except (ValueError, OSError):  # macOS cannot limit the address space
        pass


if __name__ == "__main__":
    main()
