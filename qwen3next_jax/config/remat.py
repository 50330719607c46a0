"""The setting `train.remat`: which results of the forward pass are saved for the backward pass. The
backward pass recomputes the results that are not saved.
"""

from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require

# policies that have a name (`model/remat.py` describes them)
POLICIES = ("none", "block", "full", "dots", "offload")
# policies that save more with "keep=… offload=…" behind them, as in "dots keep=experts"
EXTENDED = ("block", "full", "dots")
# {part of a block: what is saved of it}, for `train.remat` = "keep=… offload=…"
PARTS = {
    "input": "the input of the block",
    "queries": "attention: the result of the queries' projection, with that of the gates",
    "keys": "attention: the result of the keys' projection",
    "values": "attention: the result of the values' projection",
    "attention": "attention: its result and the logsumexp, so that its kernel runs once",
    "mixer": "the residual stream after attention or the recurrence, so after the projection of "
    "the mixer's output",
    "convolution": "recurrent layers: queries, keys and values after the short convolution",
    "gated": "recurrent layers: the result after its norm and gate, before the last projection",
    "gate_up": "dense MLPs and shared experts: the result of the first product",
    "router": "the router's choices, and their order by expert",
    "rows": "the rows that expert parallelism gathered in one chunk",
    "experts": "routed experts: the result of the first product, gate and up",
}


class SavedActivations(NamedTuple):
    """The value of `train.remat`, parsed from a text such as "dots keep=… offload=…".

    Attributes:
      policy: the name of a policy; "full" if the text names none.
      kept_on_device: the parts of a block that are saved in the device's memory.
      offloaded_to_host: the parts of a block that are saved in the host's memory.
    """

    policy: str
    kept_on_device: frozenset[str] = frozenset()
    offloaded_to_host: frozenset[str] = frozenset()


def parse_remat(text: str) -> SavedActivations:
    """Parses the value of `train.remat`: the name of a policy, or a text such as "keep=PART,PART
    offload=PART,PART". Either "keep=…" or "offload=…" may be missing, and a policy in EXTENDED may
    come before them.

    Raises:
      UserError: the text is neither a policy nor a valid list of parts, names a part that does not
        exist, or names a part twice.
    """
    if text in POLICIES:
        return SavedActivations(text)
    found = {"keep": [], "offload": []}
    words = text.split()
    policy = words.pop(0) if words and words[0] in EXTENDED else "full"
    for half in words:
        where, equals, parts = half.partition("=")
        if where not in found or not equals:
            raise UserError(
                f"train.remat = {text!r}: expected one of {', '.join(POLICIES)}, or "
                "'keep=PART,… offload=PART,…' with parts of a block that are saved on the device "
                f"and on the host, alone or behind {', '.join(EXTENDED)}"
                f"{did_you_mean(text, POLICIES)}"
            )
        found[where] += parts.split(",")
    named = found["keep"] + found["offload"]
    for part in named:
        require(
            part in PARTS,
            f"train.remat = {text!r}: no part {part!r}: expected some of {', '.join(PARTS)}"
            f"{did_you_mean(part, PARTS)}",
        )
        require(named.count(part) == 1, f"train.remat = {text!r}: {part} is there twice")
    require(
        "router" not in found["offload"],
        f"train.remat = {text!r}: the router's choices are small: expected keep=router",
    )
    require(bool(named), f"train.remat = {text!r}: expected one of {', '.join(POLICIES)}")
    return SavedActivations(policy, frozenset(found["keep"]), frozenset(found["offload"]))
