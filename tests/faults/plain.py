"""The plain stack beside ours: the same model and optimizer, a loop as the libraries' examples
have it, Orbax as it is.
"""

import os
import pathlib
import time


def train_plain(
    folder: str, config: dict, steps: int, pace: float = 0.0, stall: int = -1, poison: int = -1
) -> None:
    """Trains `steps` steps on random rows, saving with Orbax's CheckpointManager every 4."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    from qwen3next_jax.config import Config, from_dict
    from qwen3next_jax.model import parameter_declarations
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.gradients import make_gradients
    from qwen3next_jax.training.loss import total_loss
    from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
    from qwen3next_jax.training.resolve import resolve_run

    config = from_dict(Config, config)
    run = resolve_run(config, single_device_mesh())
    (stage,) = run.stages
    loss_of = total_loss
    if poison >= 0:
        from tests.faults import worker

        loss_of = worker.poisoned_loss
    gradients = make_gradients(run, stage, loss_of)
    schedule = learning_rate_schedule(config.optimizer, config.train.steps)
    optimizer = make_optimizer(config.optimizer, parameter_declarations(config.model), schedule)

    @jax.jit
    def step(params, opt_state, batch):
        grads, parts, *_ = gradients(params, batch)
        updates, opt_state = optimizer.update(grads.main_group, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts["loss"]

    rng = np.random.default_rng(0)
    state = run.init_state()
    params, opt_state = state["params"], state["opt_state"]
    manager = ocp.CheckpointManager(
        pathlib.Path(folder).absolute() / "checkpoints",
        options=ocp.CheckpointManagerOptions(max_to_keep=3),
    )
    progress = os.open(pathlib.Path(folder) / "progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for i in range(1, steps + 1):
        time.sleep(3600 if i == stall else pace)
        tokens = rng.integers(0, 256, (8, 64))
        batch = {
            "tokens": jnp.asarray(tokens, jnp.int32),
            "segment_ids": jnp.full((8, 64), 101 if i == poison else 1, jnp.int32),
        }
        params, opt_state, loss = step(params, opt_state, batch)
        loss = float(loss)
        os.write(progress, f"step {i}\n".encode())
        if i % 4 == 0:
            manager.save(i, args=ocp.args.StandardSave({"params": params}))
    manager.wait_until_finished()
    finite = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params))
    (pathlib.Path(folder) / "finite").write_text(str(finite))
