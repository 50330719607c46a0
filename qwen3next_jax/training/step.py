"""The train step: a pure function of (state, batch), compiled once, its state donated.

The state is a plain dict: params (float32), opt_state, step (int32, steps taken so far), guards
(see `guards`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.config import Config
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import check_divides
from qwen3next_jax.sharding.rules import activation_spec, constrain, shardings
from qwen3next_jax.training.diagnostics import norms_by_layer
from qwen3next_jax.training.guards import init_guards, judge, keep_if
from qwen3next_jax.training.loss import Counts, count_targets, expert_load, total_loss
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.router_bias import balanced

State = dict
Batch = dict[str, jax.Array]


def abstract_model(config: Config) -> tuple[nnx.GraphDef, dict]:
    """(graph definition, parameters as shapes): the structure of the model without its memory."""
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: Qwen3Next(config.model, rngs=nnx.Rngs(config.train.seed)))
    )
    return graphdef, nnx.to_pure_dict(params)


def abstract_train_state(config: Config, mesh: Mesh) -> State:
    """Shapes, dtypes and places on `mesh` of the train state, without its memory."""
    check_divides(config, mesh, *split_sizes(config.model))
    _, params = abstract_model(config)
    optimizer = make_optimizer(config)
    state = jax.eval_shape(
        lambda params: {
            "params": params,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "guards": init_guards(config.guards),
        },
        params,
    )
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        shardings(state, declared(config.model), mesh),
    )


def init_state(config: Config, mesh: Mesh, params: dict | None = None) -> State:
    """The state before the first step, each device drawing its own part; `params` None draws
    them from `train.seed`, the same on every mesh.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_train_state(config, mesh))
    if params is None:
        params = jax.jit(
            lambda: nnx.to_pure_dict(
                nnx.state(Qwen3Next(config.model, rngs=nnx.Rngs(config.train.seed)), nnx.Param)
            ),
            out_shardings=places["params"],
        )()
    else:
        params = jax.device_put(params, places["params"])
    optimizer = make_optimizer(config)
    opt_state = jax.jit(optimizer.init, out_shardings=places["opt_state"])(params)
    rest = {"step": jnp.zeros((), jnp.int32), "guards": init_guards(config.guards)}
    return {"params": params, "opt_state": opt_state} | jax.device_put(
        rest, {name: places[name] for name in rest}
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where tokens and segment ids [B, T] lie on `mesh`."""
    return NamedSharding(mesh, activation_spec("batch", "time"))


def make_train_step(
    config: Config, mesh: Mesh, begins: int = 0
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """→ jitted `train_step(state, batch)` → (state, metrics); `state` is donated. Its schedule
    begins after `begins` steps.

    state: as `abstract_train_state` places it. metrics: scalars, but for expert_load [L, E] and
    grad_norms (see `norms_by_layer`; before clipping). batch: tokens and segment_ids, [B, T]
    int32, as `batch_sharding` places them. With gradient accumulation the rows are taken as k
    micro-batches whose sum equals the one batch. Only the balance loss is not a sum over rows:
    it multiplies the whole batch's expert load into each token's probability. So the load is
    counted first, in a forward pass without gradients (skipped where `balance_loss_weight` is
    0), which costs up to a third of a step.
    """
    gradients = make_gradients(config, mesh)
    optimizer = make_optimizer(config, compute_mesh(mesh), begins)
    schedule = learning_rate_schedule(config.optimizer, config.train.steps, begins)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_train_state(config, mesh))

    def train_step(state: State, batch: Batch):
        grads, parts, tokens = gradients(state["params"], batch)
        grad_norm = optax.tree.norm(grads)
        skip, guards, judged = judge(config.guards, state["guards"], parts["total_loss"], grad_norm)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = balanced(
            config, optax.apply_updates(state["params"], updates), parts.get("expert_load")
        )
        # The optimizer has not seen the skipped steps, and so neither has its schedule.
        metrics = (
            parts
            | judged
            | {
                "grad_norm": grad_norm,
                "grad_norms": norms_by_layer(config.model, grads),
                "tokens": tokens,
                "learning_rate": schedule(state["step"] - state["guards"]["skipped"]),
            }
        )
        return {
            "params": keep_if(skip, state["params"], params),
            "opt_state": keep_if(skip, state["opt_state"], opt_state),
            "step": state["step"] + 1,
            "guards": guards,
        }, metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(places, batch_sharding(mesh)),
        compiler_options=compiler_options(config.parallel, mesh) or None,
        out_shardings=(places, NamedSharding(mesh, PartitionSpec())),
    )


def compute_mesh(mesh: Mesh) -> Mesh | None:
    """What the model is given: None for one device, whose program then has nothing of sharding
    in it.
    """
    return mesh if mesh.size > 1 else None


def make_gradients(
    config: Config, mesh: Mesh
) -> Callable[[dict, Batch], tuple[dict, dict[str, jax.Array], jax.Array]]:
    """→ `gradients(params, batch)` → (gradients, parts of the loss, tokens) of the whole batch,
    not jitted.
    """
    graphdef, abstract_params = abstract_model(config)
    shared = compute_mesh(mesh)

    def of(params, batch, counts, load=None):
        def loss(params):
            return total_loss(
                nnx.merge(graphdef, params), batch, config, counts=counts, load=load, mesh=shared
            )

        (_, parts), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, parts

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(config.model, batch)
        counts = count_targets(batch, config.model.mtp_depth)
        if config.train.gradient_accumulation == 1:
            grads, parts = of(params, batch, counts)
        else:
            grads, parts = _accumulate(
                config, graphdef, of, params, batch, counts=counts, mesh=shared
            )
        if shared is not None:
            grads = jax.lax.with_sharding_constraint(
                grads, shardings(abstract_params, declared(config.model), shared)
            )
        return grads, parts, counts.tokens

    return gradients


def _accumulate(
    config: Config,
    graphdef,
    gradients: Callable,
    params: dict,
    batch: Batch,
    *,
    counts: Counts,
    mesh: Mesh | None,
):
    """(gradients, parts) of the whole batch as the sum over its micro-batches."""
    k = config.train.gradient_accumulation
    micro_batches = jax.tree.map(
        lambda x: constrain(
            x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
        ),
        batch,
    )

    def summed(f: Callable):
        shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micro_batches))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(
            lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zeros, micro_batches
        )[0]

    load = None
    if config.train.balance_loss_weight and config.model.has_experts:
        load = summed(
            lambda b: expert_load(
                nnx.merge(graphdef, params).features(b["tokens"], b["segment_ids"], mesh=mesh),
                config,
                counts,
            )
        )
    return summed(lambda b: gradients(params, b, counts, load))
