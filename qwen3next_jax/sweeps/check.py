"""Checks that every point of a sweep can run to its end: that its settings have an effect, and that
its data and evaluations exist. It checks all points before any of them starts, and trains nothing.
"""

from qwen3next_jax.common.errors import Mistakes, require
from qwen3next_jax.config.files import UserInput, find_file
from qwen3next_jax.runs.checks import check_without_devices
from qwen3next_jax.sweeps.points import Point, Sweep
from qwen3next_jax.training import unused_settings


def point_settings(sweep: Sweep, point: Point) -> UserInput:
    """Returns the settings that the user gave to a point: the settings in the base file, and the
    point's overrides.
    """
    return UserInput(frozenset(point.overrides), find_file(sweep.base), sweep.base_config)


def find_unused(sweep: Sweep, point: Point) -> dict[str, str]:
    """Returns setting → why it has no effect, for each setting that the user gave to a point and
    that has no effect on it.
    """
    given = point_settings(sweep, point)
    found: dict[str, str] = {}
    for find in (unused_settings.find_unused, unused_settings.find_unused_by_mixers_and_evals):
        found |= unused_settings.find_unused_given_by_user(point.config, given, find)
    return found


def check_settings(sweep: Sweep) -> None:
    """Checks that each setting that the user gave has an effect on at least one of the points to
    which the user gave it.

    Raises:
      UserError: a setting has no effect on any of these points, or a point has nothing to train on.
    """
    found: dict[str, dict[str, str]] = {}
    mistakes = Mistakes()
    for point in sweep.points:
        with mistakes.collect(f"point {point.name}"):
            unused_settings.check_tokens_to_train_on(point.config)
        found[point.name] = find_unused(sweep, point)
    for point in sweep.points:
        for name, why in found[point.name].items():
            setting = name.partition("[")[0]
            # An axis gives a setting only to some points; the base file gives it to all.
            given_to = [
                other
                for other in sweep.points
                if setting in other.overrides or setting not in point.overrides
            ]
            has_effect = any(name not in found[other.name] for other in given_to)
            with mistakes.collect(f"point {point.name}"):
                require(has_effect, why)
    mistakes.raise_any()


def check_points(sweep: Sweep) -> None:
    """Checks that every point can run to its end.

    Raises:
      UserError: a point cannot; the message names every mistake, and the first point that has it.
    """
    mistakes = Mistakes()
    for point in sweep.points:
        with mistakes.collect(f"point {point.name}"):
            check_without_devices(point.config)
    mistakes.raise_any()
