"""Checks that this code computes the modules of a run's model in the same way as the code that
trained the run.

The class of a module has a `version`, which is increased if the module computes another function of
its weights than before. run.json holds the versions of the modules of the run's model. Weights that
were trained with another version would give other results without an error, so they are refused.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.version import git
from qwen3next_jax.config import ModelConfig, OptimizerConfig
from qwen3next_jax.config.registry import is_trusted


class _Change(NamedTuple):
    """A change of what a module or an optimizer computes, made before run.json recorded versions.

    Attributes:
      name: the module or setting that changed, for messages.
      trust: the value of --trust with which a user states that a run of unknown code was trained
        after the change.
      commit: the first commit with the change.
      in_weights: whether old weights give other results after the change; if false, only training
        gives other results.
      affects: whether the change affects a run with this model and optimizer. The optimizer is None
        only if `in_weights` is true.
    """

    name: str
    trust: str
    commit: str
    in_weights: bool
    affects: Callable[[ModelConfig, OptimizerConfig | None], bool]


def _mtp_layer_is(mixer: str) -> Callable[[ModelConfig, OptimizerConfig | None], bool]:
    return lambda model, optimizer: model.mtp_depth > 0 and model.full_mixer == mixer


def _splits_heads_side_by_side(model: ModelConfig, optimizer: OptimizerConfig) -> bool:
    """Whether Muon orthogonalises each head separately, and the model has a parameter in which
    several heads lie side by side.
    """
    from qwen3next_jax.model import declared

    return (optimizer.name, optimizer.muon.per_head) == ("muon", True) and any(
        part.heads > 1 for parameter in declared(model).values() for part in parameter.parts
    )


_LAST_LAYER_IN_MTP = "d1e200e27e16cb4a9e8d51613a7ffba123cc47e6"
_CHANGES = (
    _Change(
        "gdn2",
        "gdn2",
        "c4831c447c9daa4279017641b02c9c77a02be147",
        True,
        lambda model, optimizer: "gdn2" in {name for name, _ in model.layer_kinds},
    ),
    *(
        _Change(
            f"{mixer} in multi-token prediction",
            mixer,
            _LAST_LAYER_IN_MTP,
            True,
            _mtp_layer_is(mixer),
        )
        for mixer in ("lightning", "hgrn2")
    ),
    _Change(
        "optimizer.muon.per_head", "muon", _LAST_LAYER_IN_MTP, False, _splits_heads_side_by_side
    ),
)


def check_versions(
    where: pathlib.Path,
    record: Mapping[str, Any],
    model: ModelConfig,
    optimizer: OptimizerConfig | None = None,
) -> None:
    """Checks that this code computes the modules of a run's model, and optionally its optimizer, in
    the same way as the code that trained the run.

    Args:
      where: the folder of the record, for messages.
      record: the content of run.json or dump.json; the keys "versions" and "code" are read.
      model: the model of the recorded run.
      optimizer: the optimizer with which the training of the recorded run continues, which is then
        checked, too; None if only the weights are used.

    Raises:
      UserError: a version differs, or cannot be derived from the record.
    """
    from qwen3next_jax.model.block import versions

    code = record.get("code", "unknown")
    advice = "use the run with that code, or train anew in another --workdir"
    recorded = record.get("versions")
    for name, version in versions(model).items():
        theirs = (recorded or {}).get(name, 1)
        require(
            theirs == version,
            f"{where}: its model was trained with version {theirs} of {name} (code {code}), and "
            f"this code has version {version}, with other mathematics: {advice}",
        )
    if recorded:  # the code that wrote the record is newer than all of _CHANGES
        return
    for change in _CHANGES:
        if optimizer is None and not change.in_weights:
            continue
        if not change.affects(model, optimizer):
            continue
        is_older = _is_older(str(code), change.commit)
        if is_older is None and is_trusted(change.trust):
            continue
        require(
            is_older is not None,
            f"{where}: unknown whether it was trained with the mathematics that {change.name} has "
            "here: its record has no versions, and this checkout's history lacks its code "
            f"({code}) or the change (commit {change.commit[:12]}). If its code is newer than that "
            f"commit, give --trust={change.trust}; otherwise {advice}",
        )
        require(
            not is_older,
            f"{where}: it was trained with version 0 of {change.name} (code {code}), and this code "
            f"has version 1, with other mathematics (since commit {change.commit[:12]}): {advice}",
        )


def _is_older(code: str, commit: str) -> bool | None:
    """Whether the commit `code`, which a record names, is older than `commit`; None if the history
    of the checkout lacks one of them.
    """
    code = code.removesuffix("+")
    if not re.fullmatch("[0-9a-f]{7,40}", code):
        return None
    if None in (git("cat-file", "-e", f"{known}^{{commit}}") for known in (code, commit)):
        return None
    return git("merge-base", "--is-ancestor", commit, code) is None
