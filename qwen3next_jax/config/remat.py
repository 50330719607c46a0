"""The setting `train.remat`: which results of the forward pass the backward pass finds saved."""

from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require

# policies that have a name (`model/remat.py` describes them)
POLICIES = ("none", "block", "full", "dots", "offload")
# {part of a block: what is saved of it}, for `train.remat` = "keep=… offload=…"
PARTS = {
    "input": "the input of the block",
    "queries": "attention: the result of the queries' projection, with that of the gates",
    "keys": "attention: the result of the keys' projection",
    "values": "attention: the result of the values' projection",
    "attention": "attention: its result and the logsumexp, so that its kernel runs once",
    "mixer": "the residual stream after attention or the recurrence, so after the projection of "
    "the mixer's output",
    "gate_up": "dense MLPs and shared experts: the result of the first product",
    "router": "the router's choices",
    "rows": "the rows that expert parallelism gathered in one chunk",
}


class Saved(NamedTuple):
    """What "keep=… offload=…" asks for.

    Attributes:
      keep: the parts that are saved in the device's memory.
      offload: the parts that are saved in the host's memory.
    """

    keep: frozenset[str]
    offload: frozenset[str]


def parse_remat(text: str) -> Saved | None:
    """Reads "keep=PART,PART offload=PART,PART", of which either half may be missing. Returns None
    if the text is the name of a policy.

    Raises:
      UserError: the text is neither, or names a part that does not exist, or names one twice.
    """
    if text in POLICIES:
        return None
    found = {"keep": [], "offload": []}
    for half in text.split():
        where, equals, parts = half.partition("=")
        if where not in found or not equals:
            raise UserError(
                f"train.remat = {text!r}: expected one of {', '.join(POLICIES)}, or "
                "'keep=PART,… offload=PART,…' with parts of a block that are saved on the device "
                f"and on the host{did_you_mean(text, POLICIES)}"
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
    return Saved(frozenset(found["keep"]), frozenset(found["offload"]))
