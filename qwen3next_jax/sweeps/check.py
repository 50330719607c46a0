"""Checks that every point of a sweep can run to its end: that the settings of the point have an
effect, and that its data and evaluations exist. All points are checked before any of them starts.
"""

from qwen3next_jax.common.errors import Mistakes, require
from qwen3next_jax.config.files import UserInput, find_user_or_shipped_file
from qwen3next_jax.runs.checks import check_without_devices
from qwen3next_jax.sweeps.points import Point, Sweep
from qwen3next_jax.training import unused_settings


def given_settings_of_point(sweep: Sweep, point: Point) -> UserInput:
    """Returns the settings that the user gave to a point: the settings in the base file, and the
    point's overrides.
    """
    return UserInput(
        frozenset(point.overrides), find_user_or_shipped_file(sweep.base_path), sweep.base_config
    )


def find_unused_settings(sweep: Sweep, point: Point) -> dict[str, str]:
    """Returns setting → why it has no effect, for each setting that the user gave to the point and
    that has no effect on the point.
    """
    given = given_settings_of_point(sweep, point)
    found: dict[str, str] = {}
    for find in (unused_settings.find_unused, unused_settings.find_unused_by_mixers_and_evals):
        found |= unused_settings.find_unused_given_by_user(point.config, given, find)
    return found


def check_settings_have_effect(sweep: Sweep) -> None:
    """Checks that each setting has an effect on at least one of the points to which the user gave
    it.

    Raises:
      UserError: a setting has no effect on any of the points to which the user gave it, or a point
        has no data or no tokens to predict.
    """
    found: dict[str, dict[str, str]] = {}
    mistakes = Mistakes()
    for point in sweep.points:
        with mistakes.collect(f"point {point.name}"):
            unused_settings.check_tokens_to_train_on(point.config)
        found[point.name] = find_unused_settings(sweep, point)
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


def check_points_can_run(sweep: Sweep) -> None:
    """Checks that every point can run to its end.

    Raises:
      UserError: a point cannot run. The message lists every mistake, each with the first point that
        has this mistake.
    """
    mistakes = Mistakes()
    for point in sweep.points:
        with mistakes.collect(f"point {point.name}"):
            check_without_devices(point.config)
    mistakes.raise_any()
