"""Conversations: records with messages, which a chat template writes as text, and of which the loss
counts what the assistant says.

A record of JSON has a list of messages in the field `data.messages_field`:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

The first message may have the role "system" or "developer". After it, "user" and "assistant" take
turns; messages of the role "tool" may stand between two messages of the assistant. The last message
is the assistant's. A message of the assistant may have a "weight", a number of 0 or more: the loss
weight of its tokens, 1 by default. All else in a message is the template's to read. A record with
"tools" beside its messages is refused, because the text would not say which tools there are.

The text of a turn is encoded by itself, and so is the text between two turns, as generation encodes
its prompt. A conversation ends with the tokenizer's end token, whose loss weight is 0.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.common.storage import is_bucket, to_path
from qwen3next_jax.data.chat_template import ChatTemplate, Message, Rendered
from qwen3next_jax.data.tokens import HuggingFaceTokenizer, Tokenizer

# The roles that may follow a role; None is the beginning.
_NEXT = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclasses.dataclass(frozen=True)
class Chat:
    """How the conversations of a source become tokens. It can be pickled.

    Attributes:
      field: the field of a record that holds the messages.
      template: the chat template of the tokenizer.
    """

    field: str
    template: ChatTemplate

    @functools.cached_property
    def identity(self) -> dict[str, str]:
        """JSON values that determine, with the tokenizer, the tokens and weights of a record."""
        return {
            "format": "1",  # raise it when the same messages no longer give the same tokens
            "field": self.field,
            "template": self.template.digest,
            "jinja2": importlib.metadata.version("jinja2"),
            "tokenizers": importlib.metadata.version("tokenizers"),
        }


def open_chat(field: str, spec: str, tokenizer: Tokenizer) -> Chat:
    """Returns how the conversations of a source become tokens.

    Args:
      field: `data.messages_field` of the source.
      spec: `data.tokenizer`.
      tokenizer: the tokenizer that it names.

    Raises:
      UserError: the tokenizer has no chat template, or encodes no piece of a text by itself.
    """
    where = f"data.messages_field = {field!r}"
    remedy = "expected a tokenizer with a chat template in data.tokenizer"
    require(
        isinstance(tokenizer, HuggingFaceTokenizer),
        f"{where}: the tokenizer {spec or 'bytes'!r} has no chat template: {remedy}",
    )
    path = to_path(spec) if is_bucket(spec) else epath.Path(spec)
    template = ChatTemplate.of_folder(path if path.is_dir() else path.parent, remedy)
    twice = np.concatenate([tokenizer.encode("x"), tokenizer.encode("x")])
    require(
        tokenizer.decode(twice) == "xx",
        f"{where}: the tokenizer {spec} puts a space before a text, so that a turn of a "
        "conversation cannot be encoded by itself: expected a byte-level tokenizer",
    )
    return Chat(field, template)


def find_fault(messages: Any) -> str:
    """Returns what is wrong with the messages of a record; "" if they are a conversation."""
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else short_repr(messages)
        return f"is {what}: expected a list of messages"
    before = None
    for i, message in enumerate(messages, start=1):
        fault = _fault_of_message(message)
        if fault:
            return f"message {i} {fault}"
        role = message["role"]
        if role not in _NEXT[before]:
            place = f"follows the role {before!r}" if before else "is the first"
            return (
                f"message {i} of the role {role!r} {place}: expected the role "
                f"{' or '.join(map(repr, _NEXT[before]))} there"
            )
        before = role
    if before != "assistant":
        return f"ends with a message of the role {before!r}: expected the role 'assistant'"
    return ""


def find_unread(record: dict[str, Any]) -> str:
    """Returns what a record has beside its messages that the assistant's turns depend on and the
    text would lack; "" if it has nothing such.
    """
    if record.get("tools"):
        return (
            "stands beside 'tools', which are not written into the text: expected their "
            "description in the first message, with the role 'system', and no 'tools'"
        )
    return ""


def _fault_of_message(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {short_repr(message)}: expected an object with role and content"
    role, content = message.get("role"), message.get("content")
    if role not in _NEXT or role is None:
        roles = ", ".join(name for name in _NEXT if name)
        return f"has the role {short_repr(role)}: expected one of {roles}"
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        return f"has the content {short_repr(content)}: expected a string"
    if not content and not message.get("tool_calls"):
        return "is empty: expected content"
    if any("\0" in text for text in _texts(message)):
        return "contains NUL, which is no text"
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        return f"has the weight {short_repr(weight)}: expected a number"
    if not (math.isfinite(weight) and weight >= 0) or "weight" in message and role != "assistant":
        return (
            f"of the role {role!r} has the weight {weight}: expected 0 or more, and a message of "
            "the assistant"
        )
    return ""


class Encoded(NamedTuple):
    """A conversation as N tokens, or why there are none.

    Attributes:
      text: the text; "" if there is a fault.
      tokens: int32 [N], with the end token.
      weights: float32 [N], the loss weight of each token.
      fault: what is wrong with the conversation; "" if nothing is.
    """

    text: str
    tokens: np.ndarray
    weights: np.ndarray
    fault: str = ""


def encode(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, template: ChatTemplate
) -> list[Encoded]:
    """Encodes conversations in which `find_fault` finds no fault.

    Raises:
      UserError: rendering exceeds a limit of its process.
    """
    without_weights = [
        [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        for messages in conversations
    ]
    return [
        _encode_one(messages, rendered, tokenizer)
        for messages, rendered in zip(
            conversations, template.conversations(without_weights), strict=True
        )
    ]


def _encode_one(messages: Sequence[Message], rendered: Rendered, tokenizer: Tokenizer) -> Encoded:
    def faulty(fault: str) -> Encoded:
        return Encoded("", np.zeros(0, np.int32), np.zeros(0, np.float32), fault)

    if rendered.fault:
        return faulty(f"the chat template {rendered.fault}")
    weights = [float(m.get("weight", 1)) for m in messages if m["role"] == "assistant"]
    turns = rendered.turns
    if len(turns) != len(weights):
        if set(weights) != {1.0}:
            return faulty(
                f"the chat template marks {len(turns)} turns for {len(weights)} messages of the "
                "assistant, so that their weights have no place: expected no weights"
            )
        weights = [1.0] * len(turns)
    if not any(weight and stop > start for weight, (start, stop) in zip(weights, turns)):
        return faulty(
            "no token of it counts in the loss: expected a message of the assistant with a weight "
            "above 0, which the chat template writes"
        )
    known = [t for t in tokenizer.special_tokens if t not in tokenizer.parse_tokens]
    for i, message in enumerate(messages, start=1):
        for text in _texts(message):
            if found := next((token for token in known if token in text), None):
                return faulty(
                    f"message {i} writes out the special token {found!r}: name it in "
                    "data.parse_tokens if it is to be this token"
                )
    ids, loss_weights, position = [], [], 0
    for weight, (start, stop) in zip(weights, turns, strict=True):
        for text, its_weight in (
            (rendered.text[position:start], 0.0),
            (rendered.text[start:stop], weight),
        ):
            ids.append(tokenizer.encode(text))
            loss_weights.append(np.full(len(ids[-1]), its_weight, np.float32))
        position = stop
    ids.append(np.append(tokenizer.encode(rendered.text[position:]), tokenizer.eos_id))
    loss_weights.append(np.zeros(len(ids[-1]), np.float32))
    return Encoded(
        rendered.text, np.concatenate(ids).astype(np.int32), np.concatenate(loss_weights)
    )


def parse(text: str) -> list[dict[str, Any]]:
    """Returns the messages in the text that `as_text` returned."""
    return json.loads(text)


def as_text(messages: Sequence[Message]) -> str:
    """Returns messages as one text, as a `readers.Record` holds them."""
    return json.dumps(messages, ensure_ascii=False)


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
