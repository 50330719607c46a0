"""Feed-forward layers: the sparse mixture of experts with a gated shared expert, and the dense
SwiGLU.

Letters: B batch, T time, D model, R = B·T tokens, A choices per token, E experts, I expert width.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.expert_parallelism import split_experts, whole_experts
from qwen3next_jax.model.layers import Context, keeping_inputs, token_mean
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.router import over_sum, rank_experts, score_experts
from qwen3next_jax.model.row_groups import joined
from qwen3next_jax.ops import expert_mlp
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.preferences import (
    experts_in_caches,
    experts_in_tiles,
    float32_precision,
)
from qwen3next_jax.ops.used_experts import few_tokens, used_experts
from qwen3next_jax.sharding.rules import (
    EXPERTS,
    TENSOR,
    TOKENS,
    activation_spec,
    gather_local,
    local,
    shards,
    storage_spec,
)


class DenseMLP(nnx.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, config: ModelConfig, make: Make):
        d, i = config.hidden_size, config.intermediate_size
        self.gate_up = make.matrix((d, 2, i), "embed -> * mlp")
        self.down = make.matrix((i, d), "mlp -> embed")

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        return _swiglu(x_BTD, self.gate_up[...], self.down[...]), {}


class SparseMoE(nnx.Module):
    """Σ over the top experts of p_e · SwiGLU_e(x), plus σ(w·x) · SwiGLU_shared(x). No token is
    ever dropped. Other routers: `MoEConfig`.

    Auxiliary output, summed (not averaged) over the counted tokens so that micro-batches and
    devices add up exactly:
      load [E]: choices of each expert; probability [E]: router probability of each; z []:
      logsumexp(logits)²; tokens []: counted tokens. `router_logits` [B, T, E] as well, for
      whoever asks for them. Diagnostics, means over the counted tokens: router_entropy [], of a
      token's probabilities over ln E; router_z [].
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = c = config
        d, e, i, s = (
            c.hidden_size,
            c.num_experts,
            c.moe_intermediate_size,
            c.shared_expert_intermediate_size,
        )
        self.router = make.matrix((d, e), "embed -> router", kind="router", gathered="operator")
        if c.moe.router_bias:
            self.router_bias = make.parameter(jnp.zeros, (e,), ".", kind="balance")
        self.expert_gate_up = make.matrix(
            (e, d, 2, i), "experts | embed -> * mlp", gathered="operator"
        )
        self.expert_down = make.matrix((e, i, d), "experts | mlp_in -> embed", gathered="operator")
        if s:
            self.shared_gate_up = make.matrix((d, 2, s), "embed -> * mlp")
            self.shared_down = make.matrix((s, d), "mlp -> embed")
            if c.moe.shared_expert_gate:
                self.shared_gate = make.matrix((d,), ". ->", kind="vector")

    def __call__(
        self, xs_BTD: Sequence[jax.Array], contexts: Sequence[Context]
    ) -> tuple[Sequence[jax.Array], dict]:
        """Of groups of rows, each with its context, which the routed experts take as one → (of
        each the result, auxiliary output).
        """
        context, dtype, mesh = contexts[0], xs_BTD[0].dtype, contexts[0].mesh
        tokens = activation_spec("batch", context.time)
        gate_up_ED2I, down_EID = (
            self.expert_gate_up[...].astype(dtype),
            self.expert_down[...].astype(dtype),
        )
        weights = tuple(
            (p.declared, p.shape) for p in (self.router, self.expert_gate_up, self.expert_down)
        )
        stored = (
            (None,) * 3
            if mesh is None
            else tuple(storage_spec(declared, shape, mesh) for declared, shape in weights)
        )
        # decoding has those of all layers of the stack
        layer = (context.layer,) * (gate_up_ED2I.ndim - 4)
        routed = local(
            functools.partial(_routed, self.config, mesh, weights, layer),
            mesh,
            (tokens, *stored, tokens, P()),
            (tokens, P(), tokens),
        )
        bias_E = self.router_bias[...] if self.config.moe.router_bias else None
        ys_BTD, statistics, logits = routed(
            xs_BTD,
            self.router[...],
            gate_up_ED2I,
            down_EID,
            [c.stats_mask for c in contexts],
            bias_E,
        )
        if self.config.shared_expert_intermediate_size:
            ys_BTD = [y_BTD + self._shared(x_BTD) for x_BTD, y_BTD in zip(xs_BTD, ys_BTD)]
        aux = statistics | {"router_logits": joined(logits, context)}
        if context.collect_stats:
            aux["diagnostics"] = _diagnostics(self.config, aux["router_logits"], context.stats_mask)
        return ys_BTD, aux

    def _shared(self, x_BTD):
        shared_BTD = _swiglu(x_BTD, self.shared_gate_up[...], self.shared_down[...])
        if not self.config.moe.shared_expert_gate:
            return shared_BTD
        openness_BT1 = jax.nn.sigmoid(
            (x_BTD @ self.shared_gate[...].astype(x_BTD.dtype))[..., None].astype(jnp.float32)
        )
        return openness_BT1.astype(x_BTD.dtype) * shared_BTD


def _routed(
    config: ModelConfig,
    mesh: Mesh | None,
    weights: tuple,
    layer: tuple,
    xs_BTD,
    router_DE,
    gate_up_ED2I,
    down_EID,
    counted,
    bias_E,
):
    """One device's tokens, in groups → (of each the routed experts' sum, router statistics of
    all devices, router logits of each).
    """
    dtype = xs_BTD[0].dtype
    in_tiles = shards(mesh, EXPERTS) > 1 or experts_in_tiles()
    few = few_tokens(
        sum(x.shape[0] * x.shape[1] for x in xs_BTD),
        config.num_experts_per_tok,
        config.num_experts,
        layer,
    )
    if layer and (in_tiles or not few):
        gate_up_ED2I, down_EID, layer = gate_up_ED2I[layer], down_EID[layer], ()
    if in_tiles:  # flat before it is gathered: a TPU would copy the whole to another layout
        gate_up_ED2I = gate_up_ED2I.reshape(*gate_up_ED2I.shape[:2], -1)
    if mesh is not None:
        router_DE, gate_up_ED2I, down_EID = (
            gather_local(w, declared, shape, mesh)
            for w, (declared, shape) in zip((router_DE, gate_up_ED2I, down_EID), weights)
        )
    # weights first, then rows travel: gathered together they wait for each other, and so do their
    # gradients
    if shards(mesh, EXPERTS) > 1:
        first_BTD, gate_up_ED2I, down_EID = jax.lax.optimization_barrier(
            (xs_BTD[0], gate_up_ED2I, down_EID)
        )
        xs_BTD = [first_BTD, *xs_BTD[1:]]
    # Float32 throughout: a bfloat16 router flips choices near ties.
    precision = float32_precision(dtype)

    def route(x_BTD, counted_BT):
        x_RD = x_BTD.reshape(-1, config.hidden_size)
        logits_RE = save_for_backward(
            keeping_inputs(
                lambda x, w: jnp.dot(
                    x.astype(jnp.float32), w.astype(jnp.float32), precision=precision
                ),
                x_RD,
                router_DE,
            )
        )
        share_RE, weight_RA, expert_RA = choose(config, logits_RE, bias_E)
        statistics = _router_statistics(logits_RE, share_RE, expert_RA, counted_BT)
        return (
            (x_RD, weight_RA.astype(dtype), expert_RA),
            statistics,
            logits_RE.reshape(*x_BTD.shape[:2], -1),
        )

    rows, statistics, logits = zip(*map(route, xs_BTD, counted))
    statistics = jax.tree.map(lambda first, *more: sum(more, first), *statistics)
    if shards(mesh, EXPERTS) > 1:
        run = functools.partial(split_experts, axis=EXPERTS, axes=TOKENS)
    elif in_tiles:
        run = whole_experts
    elif layer:
        run = functools.partial(_few_tokens_of_a_stack, *layer)
    elif few:
        run = _used_experts if experts_in_caches() else _sorted_experts
    elif dtype.itemsize >= 4:
        run = _sorted_experts
    else:  # saves its inputs alone for the backward pass
        run = functools.partial(
            whole_experts, form=_sorted_experts if experts_in_caches() else None
        )
    y_RD = run(*map(jnp.concatenate, zip(*rows)), gate_up_ED2I, down_EID)
    if mesh is not None:
        y_RD = jax.lax.psum(y_RD, TENSOR)  # each shard held a part of every expert's width
        statistics = jax.lax.psum(statistics, TOKENS)
    return (
        [y.reshape(x.shape) for x, y in zip(xs_BTD, jnp.split(y_RD, len(xs_BTD)))],
        statistics,
        list(logits),
    )


def choose(
    config: ModelConfig, logits_RE: jax.Array, bias_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(scores over their sum [R, E], weights and experts of every token's choices [R, A]);
    `bias_E`: of `MoEConfig.router_bias`.
    """
    score_RE, share_RE = score_experts(config.moe, logits_RE)
    rank_RE = rank_experts(config.moe, score_RE, bias_E)
    weight_RA, expert_RA = jax.lax.top_k(rank_RE, config.num_experts_per_tok)
    if rank_RE is not score_RE:
        weight_RA = jnp.take_along_axis(score_RE, expert_RA, axis=-1)
    if config.norm_topk_prob:
        weight_RA = over_sum(weight_RA)
    return (
        share_RE,
        weight_RA
        if config.moe.routed_scaling_factor == 1
        else weight_RA * config.moe.routed_scaling_factor,
        expert_RA,
    )


def _swiglu(x: jax.Array, gate_up_D2I: jax.Array, down_ID: jax.Array) -> jax.Array:
    gate_up = save_for_backward(jnp.einsum("...d,dci->...ci", x, gate_up_D2I.astype(x.dtype)))
    hidden = keeping_inputs(
        lambda gate_up: jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], gate_up
    )
    return hidden @ down_ID.astype(x.dtype)


def _sorted_experts(x_RD, weight_RA, expert_RA, gate_up_ED2I, down_EID):
    """Every token through its chosen experts, with a row for each choice, which CPUs do fastest:
    sort the choices by expert, one grouped SwiGLU, unsort, weigh, sum.
    """
    r, a = expert_RA.shape
    expert_Q = expert_RA.reshape(-1)  # Q = R·A choices
    order_Q = jnp.argsort(expert_Q, stable=True)
    inverse_Q = jnp.argsort(order_Q)
    group_sizes_E = _counts(expert_Q, gate_up_ED2I.shape[0])
    x_QD = _permute(jnp.repeat(x_RD, a, axis=0), order_Q, inverse_Q)
    y_QD = expert_mlp(x_QD, gate_up_ED2I, down_EID, group_sizes_E)
    y_RAD = _permute(y_QD, inverse_Q, order_Q).reshape(r, a, -1)
    return jnp.einsum("rad,ra->rd", y_RAD, weight_RA)


def _few_tokens_of_a_stack(layer, x, weight, expert, gate_up, down):
    """For decoding, without a gradient: with the experts of one layer of a stack."""
    if experts_in_caches():
        return used_experts(x, weight, expert, gate_up, down, layer=(layer,))
    return _sorted_experts(x, weight, expert, gate_up[layer], down[layer])


_used_experts = jax.custom_vjp(lambda *inputs: used_experts(*inputs))
_used_experts.defvjp(
    lambda *inputs: jax.vjp(_sorted_experts, *inputs), lambda pullback, dy: pullback(dy)
)


def _counts(expert: jax.Array, experts: int, weight: jax.Array | None = None) -> jax.Array:
    """How often each of `experts` occurs in `expert` [Q] (int32), or the sum of `weight` [Q]
    over its occurrences. A comparison and a sum, which fuse; a scatter-add would run serially on
    CPU and TPU.
    """
    hit_QE = expert[:, None] == jnp.arange(experts)
    return (
        jnp.sum(hit_QE, axis=0, dtype=jnp.int32)
        if weight is None
        else weight @ hit_QE.astype(weight.dtype)
    )


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[order] for a permutation whose inverse is known: its gradient is a gather too, not a
    scatter.
    """
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse), lambda inverse, dy: (dy[inverse], None, None)
)


def _diagnostics(config: ModelConfig, logits_BTE, counted_BT) -> dict[str, jax.Array]:
    entropy_BT = jnp.sum(jax.scipy.special.entr(score_experts(config.moe, logits_BTE)[1]), axis=-1)
    z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    return {
        "router_entropy": token_mean(entropy_BT, counted_BT)
        / math.log(max(logits_BTE.shape[-1], 2)),
        "router_z": token_mean(z_BT, counted_BT),
    }


def _router_statistics(logits_RE, probability_RE, expert_RA, counted_BT) -> dict[str, jax.Array]:
    tokens, a = expert_RA.shape
    counted_R = (
        jnp.ones(tokens, jnp.float32)
        if counted_BT is None
        else counted_BT.reshape(-1).astype(jnp.float32)
    )
    z_R = jnp.square(jax.nn.logsumexp(logits_RE, axis=-1))
    return {
        "load": _counts(expert_RA.reshape(-1), logits_RE.shape[-1], jnp.repeat(counted_R, a)),
        "probability": counted_R @ probability_RE,
        "z": counted_R @ z_R,
        "tokens": jnp.sum(counted_R),
    }
