"""What a point needs beyond a valid configuration: its evaluations and its data must be able to
run. Checked for all points before the first starts; nothing is computed.
"""

import pathlib

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config.files import UserInput
from qwen3next_jax.runs import unread
from qwen3next_jax.runs.start import check_settings_alone
from qwen3next_jax.sweeps.points import Point, Sweep


def given(sweep: Sweep, point: Point) -> UserInput:
    """The settings that the command of a point gives."""
    return UserInput(frozenset(point.overrides), pathlib.Path(sweep.base), sweep.alone)


def unread_settings(sweep: Sweep, point: Point) -> dict[str, str]:
    """The settings given to a point that it does not read → what is wrong."""
    settings = given(sweep, point)
    return {
        name: why
        for find in (unread.unread, unread.by_layers)
        for name, why in unread.refused(point.config, settings, find).items()
    }


def check_settings(sweep: Sweep) -> None:
    """Raises UserError where no point reads a setting that points are given, or a point has
    nothing to train on.
    """
    found = {}
    for point in sweep.points:
        try:
            unread.check_targets(point.config)
        except UserError as error:
            raise UserError(f"point {point.name}: {error}") from error
        found[point.name] = unread_settings(sweep, point)
    for point in sweep.points:
        for name, why in found[point.name].items():
            setting = name.partition("[")[0]
            several = [
                other.name
                for other in sweep.points
                if setting in other.overrides or setting not in point.overrides
            ]
            require(
                any(name not in found[other] for other in several), f"point {point.name}: {why}"
            )


def check_points(sweep: Sweep) -> None:
    """Raises: UserError that names the first point which could not run to its end."""
    for point in sweep.points:
        try:
            check_settings_alone(point.config)
        except UserError as error:
            raise UserError(f"point {point.name}: {error}") from error
