"""With which mathematics a run was trained.

A module whose mathematics changes counts up its `version`, and run.json holds the versions of the
run's model. Weights that were trained with another version would silently mean something else, so
they are refused.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.version import git
from qwen3next_jax.config import Config
from qwen3next_jax.config.registry import is_trusted


class _Change(NamedTuple):
    """A change of mathematics from before versions were written down.

    Attributes:
      name: of what changed, as messages show it.
      trust: the word after --trust with which a user vouches for a run of unknown code.
      commit: the first one with the new mathematics.
      in_weights: whether it changed what weights mean; if not, only how they are trained.
      affects: whether it changed anything for a run of this configuration.
    """

    name: str
    trust: str
    commit: str
    in_weights: bool
    affects: Callable[[Config], bool]


def _mtp_layer_is(mixer: str) -> Callable[[Config], bool]:
    return lambda config: config.model.mtp_depth > 0 and config.model.full_mixer == mixer


def _splits_heads_side_by_side(config: Config) -> bool:
    """Whether Muon takes heads alone that lie side by side in a part of a parameter."""
    from qwen3next_jax.model import declared

    optimizer = config.optimizer
    return (optimizer.name, optimizer.muon.per_head) == ("muon", True) and any(
        part.heads > 1 for parameter in declared(config.model).values() for part in parameter.parts
    )


_LAST_LAYER_IN_MTP = "d1e200e27e16cb4a9e8d51613a7ffba123cc47e6"
_CHANGES = (
    _Change(
        "gdn2",
        "gdn2",
        "c4831c447c9daa4279017641b02c9c77a02be147",
        True,
        lambda config: "gdn2" in {name for name, _ in config.model.layer_kinds},
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
    where: pathlib.Path, record: Mapping[str, Any], config: Config, trains: bool = False
) -> None:
    """Raises UserError where a run was trained with another version of its model's mathematics
    than this code has, or with code of which nobody can say it.

    Args:
      where: the folder of the record, for messages.
      record: "versions" and "code", as run.json and the dump of a step hold them.
      config: of the recorded run.
      trains: whether its training goes on, so that the optimizer's mathematics counts as well.
    """
    from qwen3next_jax.model.block import versions

    code = record.get("code", "unknown")
    advice = "use the run with that code, or train anew in another --workdir"
    recorded = record.get("versions")
    for name, version in versions(config.model).items():
        theirs = (recorded or {}).get(name, 1)
        require(
            theirs == version,
            f"{where}: its model was trained with version {theirs} of {name} (code {code}), and "
            f"this code has version {version}, with other mathematics: {advice}",
        )
    if recorded:  # by code that is newer than all of _CHANGES
        return
    for change in _CHANGES:
        if not (change.in_weights or trains) or not change.affects(config):
            continue
        is_older = _is_older(str(code), change.commit)
        if is_older is None and is_trusted(change.trust):
            continue
        require(
            is_older is not None,
            f"{where}: nothing tells whether it was trained with the mathematics that "
            f"{change.name} has here: it names no versions, and this checkout's history does not "
            f"hold both its code ({code}) and the change (commit {change.commit[:12]}). If it was "
            f"trained with newer code than that, give --trust={change.trust}; otherwise {advice}",
        )
        require(
            not is_older,
            f"{where}: it was trained with version 0 of {change.name} (code {code}), and this code "
            f"has version 1, with other mathematics (since commit {change.commit[:12]}): {advice}",
        )


def _is_older(code: str, commit: str) -> bool | None:
    """Whether the `code` that a record names is older than `commit`; None where the checkout's
    history does not tell.
    """
    code = code.removesuffix("+")
    if not re.fullmatch("[0-9a-f]{7,40}", code):
        return None
    if None in (git("cat-file", "-e", f"{known}^{{commit}}") for known in (code, commit)):
        return None
    return git("merge-base", "--is-ancestor", commit, code) is None
