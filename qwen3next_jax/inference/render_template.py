"""A program that renders one chat template and ends: others wrote the template, and no sandbox
bounds how long it takes or how much it makes. `texts.ChatTemplate` starts it as a file, so that it
imports jinja2 and nothing of this package.

Standard input is a JSON object: template; special, the tokenizer's special tokens by name;
messages, null to check the template alone; seconds of processor time, bytes of memory and
characters of text at most. Standard output is a JSON object with one of: text, of at most one
character more than allowed; refused, what the template says against the messages; error.
"""

import json
import re
import resource
import sys

import jinja2.sandbox


class Refused(Exception):
    """The template calls raise_exception."""


def render(request: dict) -> str:
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
    pieces, room = [], request["characters"] + 1
    for piece in template.generate(messages=request["messages"], add_generation_prompt=True):
        pieces.append(piece[:room])
        room -= len(pieces[-1])
        if not room:
            break
    return "".join(pieces)


def main() -> None:
    request = json.load(sys.stdin)
    _limit(resource.RLIMIT_AS, request["bytes"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + request["seconds"])
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
    raise Refused(str(message)[:1000])


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(what, (most, hard))
    except (ValueError, OSError):  # macOS bounds no address space
        pass


if __name__ == "__main__":
    main()
