"""Numerical guards: a part of the compiled step that decides whether the step's update is applied.

The update is skipped if the loss or the gradient norm is not finite. The update is also skipped if
the batch has no token to predict; such a batch never ends the run, and its loss of 0 does not enter
the window of past losses.

A spike is a loss or a gradient norm whose robust z-score, relative to a window of past steps,
exceeds the threshold `guards.spike_z`. The gradient norm of a batch whose loss is close to 0 never
counts as a spike. The setting `guards.on_spike` says what follows a spike: the step's update is
applied ("continue") or skipped ("skip"), or the step halts the run ("rewind", "stop"). The compiled
steps after a halt change neither the parameters nor the optimizer state. So the host process may
notice the halt one step late: the parameters and the optimizer state are still as they were before
the bad batch. After a halt the host process returns to a checkpoint ("rewind") or ends the run
("stop").

The state of the guards is part of the train state, so a resumed run makes the same decisions as a
run that was not interrupted.

Letter: W steps in the window.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.config import GuardConfig

NON_FINITE, SPIKE, SKIPPED, HALTED = 1, 2, 4, 8  # bits of a step's flags
NO_TARGETS = 16  # the batch had no token to predict

# A z-score divides by the spread of the window. The spread counts as at least _MIN_RELATIVE_SPREAD
# × max(|median|, m), where m is _MIN_LOSS for losses and _MIN_NORM for gradient norms. Without this
# bound, every increase after a window of equal values would be a spike. With m = 0, tiny changes
# would be spikes once a task is solved and its losses and gradients are close to 0.
_MIN_RELATIVE_SPREAD = 1e-3
_MIN_LOSS, _MIN_NORM = 1.0, 1e-3
# In a normal distribution, the standard deviation divided by the median absolute deviation.
_MAD_TO_SIGMA = 1.4826


def init_guards(config: GuardConfig) -> dict[str, jax.Array]:
    """Returns the guards' part of the train state before the first step.

    Returns:
      A dict with these entries:
        losses: float32 [W], ring buffer of the last finite losses, of batches with targets.
        grad_norms: float32 [W], ring buffer of the gradient norms of the same steps.
        entries: int32, the number of values that were written to each ring buffer so far.
        skipped: int32, the number of steps whose update was skipped.
        skipped_in_a_row: int32, the number of consecutive steps, up to the last one, that were
          skipped because of their own loss or gradient norm.
        spikes: int32, the number of steps with a spike.
        halted: int32, 1 after the step that halted the run; 0 before.
        data_offset: int32, the number of batches (of the current stage's size) that rewinds have
          skipped. In a run with a single stage, the step after `step` steps reads batch number
          step + data_offset; the first batch has the number 0.
    """
    counts = ("entries", "skipped", "skipped_in_a_row", "spikes", "halted", "data_offset")
    rings = {name: jnp.zeros(config.window, jnp.float32) for name in ("losses", "grad_norms")}
    return rings | {name: jnp.zeros((), jnp.int32) for name in counts}


def reset_for_stage(
    config: GuardConfig, guards: dict[str, jax.Array], data_offset: int, reads_same_stream: bool
) -> dict[str, jax.Array]:
    """Returns the guards' part of the train state with which a new stage, or a branch of a run,
    begins.

    Args:
      config: the settings of the guards.
      guards: the guards' part of the train state at the end of the previous stage or of the parent
        run.
      data_offset: the new `data_offset`.
      reads_same_stream: whether the new stage reads batches of the same size from the same data as
        the stage before it; if not, the new stage begins with an empty window of past losses.
    """
    sharding = guards["data_offset"].sharding
    if not reads_same_stream:
        # The number of skipped steps is kept: the number of updates, which the learning-rate
        # schedule counts, is the number of steps minus this number.
        counts = {name: guards[name] for name in ("skipped", "spikes")}
        guards = init_guards(config) | counts
    return jax.device_put(guards | {"data_offset": jnp.int32(data_offset)}, sharding)


def check_step(
    config: GuardConfig,
    guards: dict,
    loss: jax.Array,
    grad_norm: jax.Array,
    has_targets: jax.Array | bool = True,
) -> tuple[jax.Array, dict, dict]:
    """Decides whether the update of a step is applied.

    Args:
      config: the settings of the guards.
      guards: the guards before the step.
      loss, grad_norm: the step's total loss and gradient norm, float32 scalars.
      has_targets: whether the batch has a token to predict, bool.

    Returns:
      (skip, new guards, metrics). skip is a bool: whether the update is skipped. metrics has the
      entries `flags` (the sum of bits such as NON_FINITE), `loss_z` and `grad_norm_z` (the
      z-scores; 0 until the window is full), and `skipped` (the number of skipped updates so far).
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    comparable = (guards["entries"] >= config.window) & finite & has_targets
    loss_z = jnp.where(comparable, _robust_z_score(loss, guards["losses"], _MIN_LOSS), 0.0)
    grad_norm_z = jnp.where(
        comparable, _robust_z_score(grad_norm, guards["grad_norms"], _MIN_NORM), 0.0
    )
    is_learning = loss > _smallest_spike_loss(config)
    spike = (loss_z > config.spike_z) | (is_learning & (grad_norm_z > config.spike_z))

    was_halted = guards["halted"] > 0
    bad = ~finite if config.on_spike == "continue" else ~finite | spike
    in_a_row = guards["skipped_in_a_row"]
    in_a_row = jnp.where(bad, in_a_row + 1, jnp.where(has_targets, 0, in_a_row))
    halts = in_a_row >= config.max_skips
    if config.on_spike in ("rewind", "stop"):
        halts |= spike
    skip = bad | was_halted | jnp.logical_not(has_targets)

    record = finite & has_targets & ~was_halted & ~halts
    slot = guards["entries"] % config.window
    new = {
        "losses": jnp.where(record, guards["losses"].at[slot].set(loss), guards["losses"]),
        "grad_norms": jnp.where(
            record, guards["grad_norms"].at[slot].set(grad_norm), guards["grad_norms"]
        ),
        "entries": guards["entries"] + record,
        "skipped": guards["skipped"] + skip,
        "skipped_in_a_row": in_a_row,
        "spikes": guards["spikes"] + spike,
        "halted": (was_halted | halts).astype(jnp.int32),
        "data_offset": guards["data_offset"],
    }
    flags = (
        _bit_if(NON_FINITE, ~finite)
        | _bit_if(SPIKE, spike)
        | _bit_if(SKIPPED, skip)
        | _bit_if(HALTED, was_halted | halts)
        | _bit_if(NO_TARGETS, jnp.logical_not(has_targets))
    )
    metrics = {"flags": flags, "loss_z": loss_z, "grad_norm_z": grad_norm_z}
    return skip, new, metrics | {"skipped": new["skipped"]}


def _smallest_spike_loss(config: GuardConfig) -> float:
    """Returns the smallest loss that counts as a spike after a window of losses of 0: the threshold
    `guards.spike_z` times the smallest spread of losses. With the default settings this loss is 10
    · 0.001 = 0.01 nats.

    Once the model has solved a task, the gradient depends on the few tokens that the model does not
    yet predict with certainty, and the gradient norm varies by orders of magnitude from batch to
    batch. So the gradient norm of a batch whose loss is smaller than the returned value is no sign
    of trouble.
    """
    return config.spike_z * _MIN_RELATIVE_SPREAD * _MIN_LOSS


def _bit_if(bit: int, is_set: jax.Array) -> jax.Array:
    return jnp.where(is_set, jnp.int32(bit), jnp.int32(0))


def keep_old_if(skip: jax.Array, old: dict, new: dict) -> dict:
    """Returns the tree `old` if `skip` is true, else the tree `new`. `skip` is a traced bool. An
    array object that is in both trees is returned without `jnp.where`, which would copy it.
    """
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(skip, a, b), old, new)


def _robust_z_score(value: jax.Array, window_W: jax.Array, min_median: float) -> jax.Array:
    """Returns (value - median) / spread. The median and the spread are those of the values in the
    window [W]. The spread is the robust standard deviation, but at least _MIN_RELATIVE_SPREAD ·
    max(|median|, `min_median`).
    """
    median = jnp.median(window_W)
    spread = _MAD_TO_SIGMA * jnp.median(jnp.abs(window_W - median))
    return (value - median) / jnp.maximum(
        spread, _MIN_RELATIVE_SPREAD * jnp.maximum(jnp.abs(median), min_median)
    )
