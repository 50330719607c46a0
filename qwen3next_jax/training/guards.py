"""Numerical guards inside the compiled step: what happens to an update whose loss or gradient
went wrong.

A non-finite loss or gradient norm never reaches the parameters. A spike (robust z-score of the
loss or of the gradient norm against a window of the steps before) is counted, skipped, or halts
the run, as `guards.on_spike` says. A halted state no longer changes: the host may look a step
later and still finds what the offending batch met.

The guards' memory is part of the train state, so that a resumed run decides as the undisturbed
one would have. W: steps in the window.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.config import GuardConfig

NON_FINITE, SPIKE, SKIPPED, HALTED = 1, 2, 4, 8  # bits of a step's flags
NO_TARGETS = 16  # one more: the batch had no token to predict, which the step itself sees

# A window without spread would make a spike of any change: spread counts as at least this share of
# the median, and of what follows, so that a solved task, whose losses and gradients are near 0, has
# no spikes of a hundredth of a nat.
_LEAST_SPREAD = 1e-3
_LEAST_LOSS, _LEAST_NORM = 1.0, 1e-3
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


def init_guards(config: GuardConfig) -> dict[str, jax.Array]:
    """The guards' part of the train state before the first step.

    losses, grad_norms: float32 [W], the last finite ones, as a ring; entries: how many were ever
    put in. skipped, skipped_in_a_row, spikes: int32 counts. halted: int32, 1 from the step on
    that ended the run. data_offset: int32, batches that rewinds passed over: the step after
    `step` steps takes batch step + data_offset.
    """
    counts = ("entries", "skipped", "skipped_in_a_row", "spikes", "halted", "data_offset")
    rings = {name: jnp.zeros(config.window, jnp.float32) for name in ("losses", "grad_norms")}
    return rings | {name: jnp.zeros((), jnp.int32) for name in counts}


def reset(
    config: GuardConfig, guards: dict[str, jax.Array], data_offset: int, same_stream: bool
) -> dict[str, jax.Array]:
    """The guards of a stage, or of a branch, that takes over `guards`.

    Args:
      data_offset: the new one.
      same_stream: whether the batches are of the same kind as before. If not, the window is
        empty: losses of another kind are no measure of spikes.
    """
    place = guards["data_offset"].sharding
    if not same_stream:
        # The optimizer counts its own updates, which are the steps less the skipped ones: that
        # count stays.
        counts = {name: guards[name] for name in ("skipped", "spikes")}
        guards = init_guards(config) | counts
    return jax.device_put(guards | {"data_offset": jnp.int32(data_offset)}, place)


def check(
    config: GuardConfig, guards: dict, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, dict, dict]:
    """→ (skip, new guards, metrics) for a step with this `loss` and `grad_norm` (float32 scalars).

    skip: bool, whether the update is dropped. metrics: `flags` (bits), `loss_z`,
    `grad_norm_z`, `skipped` (total).
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    armed = guards["entries"] >= config.window
    loss_z = jnp.where(armed & finite, _robust_z(loss, guards["losses"], _LEAST_LOSS), 0.0)
    grad_norm_z = jnp.where(
        armed & finite, _robust_z(grad_norm, guards["grad_norms"], _LEAST_NORM), 0.0
    )
    spike = jnp.maximum(loss_z, grad_norm_z) > config.spike_z

    was_halted = guards["halted"] > 0
    bad = ~finite if config.on_spike == "continue" else ~finite | spike
    in_a_row = jnp.where(bad, guards["skipped_in_a_row"] + 1, 0)
    halts = in_a_row >= config.max_skips
    if config.on_spike in ("rewind", "stop"):
        halts |= spike
    skip = bad | was_halted

    put = finite & ~was_halted & ~halts
    place = guards["entries"] % config.window
    new = {
        "losses": jnp.where(put, guards["losses"].at[place].set(loss), guards["losses"]),
        "grad_norms": jnp.where(
            put, guards["grad_norms"].at[place].set(grad_norm), guards["grad_norms"]
        ),
        "entries": guards["entries"] + put,
        "skipped": guards["skipped"] + skip,
        "skipped_in_a_row": in_a_row,
        "spikes": guards["spikes"] + spike,
        "halted": (was_halted | halts).astype(jnp.int32),
        "data_offset": guards["data_offset"],
    }
    flags = (
        NON_FINITE * ~finite + SPIKE * spike + SKIPPED * skip + HALTED * (was_halted | halts)
    ).astype(jnp.int32)
    return (
        skip,
        new,
        {
            "flags": flags,
            "loss_z": loss_z,
            "grad_norm_z": grad_norm_z,
            "skipped": new["skipped"],
        },
    )


def keep_if(skip: jax.Array, old: dict, new: dict) -> dict:
    """`old` where `skip`, else `new`, leaf by leaf: a selection that the compiler fuses into the
    update.
    """
    return jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)


def _robust_z(value: jax.Array, window_W: jax.Array, least: float) -> jax.Array:
    """How many (robust) standard deviations `value` lies above the median of the window."""
    median = jnp.median(window_W)
    spread = _MAD_TO_SIGMA * jnp.median(jnp.abs(window_W - median))
    return (value - median) / jnp.maximum(
        spread, _LEAST_SPREAD * jnp.maximum(jnp.abs(median), least)
    )
