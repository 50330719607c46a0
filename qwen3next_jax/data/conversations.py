"""Conversations: records with messages. A chat template writes the messages as text, and the loss
counts the text of the assistant.

A record of JSON has a list of messages in the field `data.messages_field`:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

The first message may have the role "system" or "developer". The following messages have the roles
"user" and "assistant" in turn; messages of the role "tool" may stand between two messages of the
assistant. The last message is the assistant's. A message of the assistant may have a "weight": the
loss weight of its tokens. A weight is 0 or within `LEAST_WEIGHT` … `LARGEST_WEIGHT`; the default is
1. The template may read every field of a message except "weight". A record with a list of "tools"
is refused, because the rendered text would lack the description of the tools.

Each turn of the assistant, and each text between two of its turns, is encoded by itself, as the
prompt is in generation. A conversation ends with the tokenizer's end token.

Generation stops at the end token, so the assistant has to learn to write this token. If a turn of
the assistant contains no end token, but an end token follows directly, the end token counts as part
of the turn. Templates differ: some end a turn with the marker of the next role, and some write
nothing after the last turn. Outside of the assistant's turns, the end token has the loss weight 0.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.common.storage import is_bucket, to_path
from qwen3next_jax.data.chat_template import REASONING, ChatTemplate, Message, RenderedConversation
from qwen3next_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from qwen3next_jax.data.tokens import Tokenizer

# The loss weights that a message may have, besides 0. The loss divides each weight by the sum S of
# all weights in a batch, in float32, whose normal numbers are 2^-126 … 2^128. With weights within
# 2^-30 … 2^30 (about 10^9) and up to 2^31 targets in a batch, S is at most 2^61, and a weight's
# share of S at least 2^-91. The gradient multiplies this share by probabilities, which are exact to
# 2^-24, and by other factors, for which 2^11 is left.
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-9, 1e9

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
class ChatFormat:
    """How the conversations of a source become tokens: the field of the messages, and the chat
    template. A `ChatFormat` can be pickled.

    Attributes:
      messages_field: the field of a record that holds the messages.
      template: the chat template of the tokenizer.
    """

    messages_field: str
    template: ChatTemplate

    @functools.cached_property
    def identity(self) -> dict[str, str]:
        """JSON values that, together with the tokenizer, determine the tokens and loss weights of
        every record.
        """
        return {
            "format": "2",  # raise it when the same messages no longer give the same tokens
            "field": self.messages_field,
            "template": self.template.digest,
            "jinja2": importlib.metadata.version("jinja2"),
            "tokenizers": importlib.metadata.version("tokenizers"),
        }

    def record_fault(self, messages: Any, objects_on_path: Sequence[Mapping[str, Any]]) -> str:
        """Returns what is wrong with the messages of a record, or with the objects on the path to
        them; "" if nothing is.
        """
        tools = next(filter(None, map(tools_field_fault, objects_on_path)), "")
        return conversation_fault(messages) or tools

    def encode(
        self, conversations: Sequence[Sequence[Message]], tokenizer: HuggingFaceTokenizer
    ) -> "list[EncodedConversation]":
        """Encodes conversations in which `record_fault` finds no fault.

        Raises:
          UserError: rendering exceeds the time or the memory that its process may take.
        """
        return encode_conversations(conversations, tokenizer, self.template)


def load_chat_format(field: str, spec: str, tokenizer: Tokenizer, date: str = "") -> ChatFormat:
    """Returns the `ChatFormat` of a source of conversations.

    Args:
      field: `data.messages_field` of the source.
      spec: `data.tokenizer`.
      tokenizer: the tokenizer that `spec` names.
      date: `data.template_date`.

    Raises:
      UserError: the tokenizer has no chat template, or puts a space before every text, so that a
        turn cannot be encoded by itself.
    """
    where = f"data.messages_field = {field!r}"
    remedy = "expected a tokenizer with a chat template in data.tokenizer"
    require(
        isinstance(tokenizer, HuggingFaceTokenizer),
        f"{where}: the tokenizer {spec or 'bytes'!r} has no chat template: {remedy}",
    )
    path = to_path(spec) if is_bucket(spec) else epath.Path(spec)
    template = ChatTemplate.of_folder(path if path.is_dir() else path.parent, remedy, date)
    twice = np.concatenate([tokenizer.encode("x"), tokenizer.encode("x")])
    require(
        tokenizer.decode(twice) == "xx",
        f"{where}: the tokenizer {spec} puts a space before a text, so that a turn of a "
        "conversation cannot be encoded by itself: expected a byte-level tokenizer",
    )
    return ChatFormat(field, template)


def conversation_fault(messages: Any) -> str:
    """Returns what is wrong with a record's messages; "" if the messages are a conversation."""
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else short_repr(messages)
        return f"is {what}: expected a list of messages"
    before = None
    for i, message in enumerate(messages, start=1):
        fault = _message_fault(message)
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


def tools_field_fault(record: dict[str, Any]) -> str:
    """Returns what is wrong with a record that has a list of "tools"; "" if the record has no
    tools. The assistant's turns depend on the tools, but the rendered text would not describe the
    tools.
    """
    if record.get("tools"):
        return (
            "stands beside 'tools', which are not written into the text: expected their "
            "description in the first message, with the role 'system', and no 'tools'"
        )
    return ""


def _message_fault(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {short_repr(message)}: expected an object with role and content"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _NEXT:
        roles = ", ".join(name for name in _NEXT if name)
        return f"has the role {short_repr(role)}: expected one of {roles}"
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        return f"has the content {short_repr(content)}: expected a string"
    if not (content or "").strip() and not message.get("tool_calls"):
        return "is empty or blank: expected content"
    if any("\0" in text for text in _strings_in_json(message)):
        return "contains NUL, which is no text"
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        return f"has the weight {short_repr(weight)}: expected a number"
    if weight != 0 and not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
        return (
            f"has a weight out of range ({short_repr(weight)}): expected 0 or a number from "
            f"{LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}, whose sums float32 holds"
        )
    if "weight" in message and role != "assistant":
        return f"of the role {role!r} has a weight: expected one in messages of the assistant alone"
    reasoning = [message[name] for name in REASONING if message.get(name) is not None]
    for text in reasoning:
        if not isinstance(text, str):
            return f"has the reasoning {short_repr(text)}: expected a string"
    if len(set(reasoning)) > 1:
        return f"has two different texts in {' and '.join(REASONING)}, which name one thing"
    return ""


class EncodedConversation(NamedTuple):
    """A conversation as N tokens, or the reason why it has no tokens.

    Attributes:
      text: the text; "" if there is a fault.
      tokens: int32 [N], with the end token.
      loss_weights: float32 [N], the loss weight of each token.
      fault: what is wrong with the conversation; "" if nothing is.
    """

    text: str
    tokens: np.ndarray
    loss_weights: np.ndarray
    fault: str = ""


def encode_conversations(
    conversations: Sequence[Sequence[Message]],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
) -> list[EncodedConversation]:
    """Encodes conversations in which `conversation_fault` finds no fault.

    Raises:
      UserError: rendering exceeds the time or the memory that its process may take.
    """
    without_weights = [
        [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        for messages in conversations
    ]
    return [
        _encode_conversation(messages, rendered, tokenizer)
        for messages, rendered in zip(
            conversations, template.render_conversations(without_weights), strict=True
        )
    ]


def _encode_conversation(
    messages: Sequence[Message], rendered: RenderedConversation, tokenizer: HuggingFaceTokenizer
) -> EncodedConversation:
    def faulty(fault: str) -> EncodedConversation:
        return EncodedConversation("", np.zeros(0, np.int32), np.zeros(0, np.float32), fault)

    if rendered.fault:
        return faulty(f"the chat template {rendered.fault}")
    weights = [float(m.get("weight", 1)) for m in messages if m["role"] == "assistant"]
    turns = rendered.assistant_spans
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
    for i, message in enumerate(messages, start=1):
        for text in _strings_in_json(message):
            if found := tokenizer.find_special_token(text):
                return faulty(
                    f"message {i} writes out the special token {found!r}: name it in "
                    "data.parse_tokens if it is to be this token"
                )
    ids, loss_weights = _encode_turns(rendered, weights, tokenizer)
    if not loss_weights.any():
        return faulty("no token of it counts in the loss: the assistant's turns have no tokens")
    return EncodedConversation(rendered.text, ids, loss_weights)


def _encode_turns(
    rendered: RenderedConversation, weights: Sequence[float], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the tokens of a conversation, int32 [N]; their loss weights, float32 [N]).

    Args:
      rendered: the conversation.
      weights: the loss weight of each turn.
      tokenizer: the tokenizer.
    """
    ids, loss_weights, position = [], [], 0
    unended = 0.0  # the weight of the turn before, if it does not contain the end token

    def add(tokens: np.ndarray, weight: float) -> None:
        ids.append(tokens)
        loss_weights.append(np.full(len(tokens), weight, np.float32))

    def add_between(tokens: np.ndarray) -> None:
        add(tokens, 0.0)
        if len(tokens) and tokens[0] == tokenizer.eos_id:
            loss_weights[-1][0] = unended

    for weight, (start, stop) in zip(weights, rendered.assistant_spans, strict=True):
        add_between(tokenizer.encode(rendered.text[position:start]))
        turn = tokenizer.encode(rendered.text[start:stop])
        add(turn, weight)
        unended = weight if len(turn) and tokenizer.eos_id not in turn else 0.0
        position = stop
    add_between(np.append(tokenizer.encode(rendered.text[position:]), tokenizer.eos_id))
    weights_N = np.concatenate(loss_weights)
    weights_N[0] = 0.0  # the first token is not predicted, because no token comes before it
    return np.concatenate(ids).astype(np.int32), weights_N


def _strings_in_json(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings_in_json(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings_in_json(inner)
