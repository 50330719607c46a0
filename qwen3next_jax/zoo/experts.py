"""Experts other than the released model's SwiGLU, chosen by `model.moe.experts`: experts without a
gate (Nemotron 3 Nano), and clipped experts with biases (gpt-oss).

The function `sorted_moe` of `model.expert_implementations` computes the routed experts, in plain
XLA. If the mesh splits the experts over shards, every shard gathers the tokens of all shards and
computes the outputs of its own experts, and a reduce-scatter sums the outputs. No token is dropped:
all chosen experts are computed.

Letters: R tokens, D model, A choices per token, Q rows sorted by expert, E experts of this shard, I
expert width, F width of a bias.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.model.expert_implementations import sorted_moe
from qwen3next_jax.model.layers import call_saving_only_inputs
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.ops.grouped_matmul import grouped_matmul
from qwen3next_jax.sharding.rules import EXPERT, TENSOR, num_shards

# For each value of `model.moe.experts`, settings of an example model for the tests, with the router
# that a published model with such experts has.
EXAMPLES = {
    "swiglu": {},
    "relu2": {
        "moe": {
            "experts": "relu2",
            "scoring_func": "sigmoid",
            "router_bias": True,
            "routed_scaling_factor": 2.5,
            "shared_expert_gate": False,
        },
    },
    "clipped_swiglu": {
        "moe": {"experts": "clipped_swiglu"},
        "shared_expert_intermediate_size": 0,
    },
}
ALPHA, LIMIT = 1.702, 7.0  # constants of the clipped SwiGLU, as in gpt-oss


def routed_experts_from_mlp(mlp, mesh, dtype, *, in_tiles, few_tokens, layer, keep_hidden):
    """Returns a function with the arguments and the result that `model.expert_implementations`
    describes. The returned function computes the weighted sum of each token's chosen experts; `mlp`
    computes the experts.

    Args:
      mlp: (number of shards of the mesh axis `tensor`, x [Q, D], *experts, group_sizes [E]) →
        [Q, D], computes the experts of rows that are sorted by expert. `experts` are the arrays of
        the experts' parameters.
      mesh, layer: see `model.expert_implementations.choose_expert_implementation`.
      dtype, in_tiles, few_tokens, keep_hidden: ignored; the caller passes the same arguments to
        every class of experts.
    """
    run_one_layer = functools.partial(
        sorted_moe, mlp=functools.partial(mlp, num_shards(mesh, TENSOR))
    )

    def run(x_RD, weight_RA, expert_RA, *experts):
        if layer is not None:
            experts = [weight[layer] for weight in experts]
        return run_one_layer(x_RD, weight_RA, expert_RA, *experts)

    if num_shards(mesh, EXPERT) == 1:
        return run
    return functools.partial(_run_on_tokens_of_all_shards, run)


def _run_on_tokens_of_all_shards(run, x_RD, weight_RA, expert_RA, *experts):
    """Gathers the tokens of all shards along the mesh axis `expert`, and applies `run` with this
    shard's experts to the gathered tokens. Then a reduce-scatter sums the results of all shards.
    Returns the sums for this shard's tokens, [R, D].
    """
    x_RD, weight_RA, expert_RA = (
        jax.lax.all_gather(a, EXPERT, tiled=True) for a in (x_RD, weight_RA, expert_RA)
    )
    count = experts[0].shape[0]
    expert_RA -= jax.lax.axis_index(EXPERT) * count
    here_RA = (expert_RA >= 0) & (expert_RA < count)
    # A choice of another shard's expert gets an index past the last expert. `sorted_moe` sorts its
    # row to the end, where it belongs to no group.
    expert_RA = jnp.where(here_RA, expert_RA, count)
    part_RD = run(x_RD, jnp.where(here_RA, weight_RA, 0), expert_RA, *experts)
    return jax.lax.psum_scatter(part_RD, EXPERT, tiled=True)


# ---- without a gate
# --------------------------------------------------------------------------------------------------


class SquaredReLUExperts(SparseMoE):
    """Experts without a gate, as in Nemotron 3 Nano (2512.20848). Each routed expert and the shared
    expert compute down(max(0, up x)²) (2109.08668) with two matrices, up and down.
    """

    expert_parameter_names = ("expert_up", "expert_down")

    def make_experts(self, make, d, e, i):
        self.expert_up = make.matrix((e, d, i), "experts | embed -> mlp", gathered_by="operator")
        self.expert_down = make.matrix(
            (e, i, d), "experts | mlp_in -> embed", gathered_by="operator"
        )

    def make_shared_expert(self, make, d, i):
        self.shared_up = make.matrix((d, i), "embed -> mlp")
        self.shared_down = make.matrix((i, d), "mlp -> embed")

    def shared_expert_output(self, x_BTD):
        dtype = x_BTD.dtype
        hidden_BTI = call_saving_only_inputs(
            _squared_relu, x_BTD @ self.shared_up[...].astype(dtype)
        )
        return hidden_BTI @ self.shared_down[...].astype(dtype)

    @staticmethod
    def choose_expert_implementation(*args, **how):
        return routed_experts_from_mlp(_squared_relu_experts, *args, **how)


def _squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def _squared_relu_experts(tensor_shards, x_QD, up_EDI, down_EID, sizes_E):
    """Computes the routed experts of `SquaredReLUExperts`. `routed_experts_from_mlp` gets this
    function as its argument `mlp`.
    """
    hidden_QI = call_saving_only_inputs(_squared_relu, grouped_matmul(x_QD, up_EDI, sizes_E))
    return grouped_matmul(hidden_QI, down_EID, sizes_E)


# ---- clipped, with biases
# --------------------------------------------------------------------------------------------------


class ClippedSwiGLUExperts(SparseMoE):
    """The experts of gpt-oss (2508.10925, and the published code of gpt-oss). Each routed expert
    computes down(g σ(1.702 g) (u + 1)) + b, with g = min(gate x + b', 7) and u = up x + b'' clipped
    to -7 … 7; gate, up and down are matrices, and b, b' and b'' are biases. The router adds a
    learned bias to its logits. A shared expert, which gpt-oss does not have, is a SwiGLU. Biases
    start at 0 and have no weight decay.
    """

    expert_parameter_names = (
        "expert_gate_up",
        "expert_gate_up_bias",
        "expert_down",
        "expert_down_bias",
    )

    def __init__(self, config, make):
        super().__init__(config, make)
        self.logit_bias = make.parameter(jnp.zeros, (config.num_experts,), ".", kind="rate")

    def make_experts(self, make, d, e, i):
        super().make_experts(make, d, e, i)
        self.expert_gate_up_bias = make.parameter(
            jnp.zeros, (e, 2, i), "experts | -> * mlp", kind="rate", gathered_by="operator"
        )
        self.expert_down_bias = make.parameter(
            jnp.zeros, (e, d), "experts | -> embed", kind="rate", gathered_by="operator"
        )

    @staticmethod
    def choose_expert_implementation(*args, **how):
        return routed_experts_from_mlp(_clipped_swiglu_experts, *args, **how)


def _clipped_swiglu(gate_up):
    """Returns g σ(1.702 g) (u + 1) [Q, I], with g = min(gate, 7) and u = up clipped to -7 … 7.
    `gate_up` [Q, 2 I] holds the gate in its first half and up in its second half.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate = jnp.minimum(gate, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (jnp.clip(up, -LIMIT, LIMIT) + 1)


def _clipped_swiglu_experts(tensor_shards, x_QD, gate_up, gate_up_bias, down_EID, bias_ED, sizes_E):
    """Computes the routed experts of `ClippedSwiGLUExperts`. `routed_experts_from_mlp` gets this
    function as its argument `mlp`.
    """
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)  # [E, D, 2, I] or [E, D, 2·I]
    gate_up_bias = gate_up_bias.reshape(len(sizes_E), -1)
    hidden_QI = call_saving_only_inputs(
        _clipped_swiglu,
        grouped_matmul(x_QD, gate_up, sizes_E) + _bias_of_rows(gate_up_bias, sizes_E, len(x_QD)),
    )
    # The results of the shards along the mesh axis `tensor` are summed later, so each shard adds an
    # equal share of the bias.
    bias_QD = _bias_of_rows(bias_ED, sizes_E, len(x_QD)) / tensor_shards
    return grouped_matmul(hidden_QI, down_EID, sizes_E) + bias_QD


def _bias_of_rows(bias_EF, sizes_E, rows):
    """Returns the bias of each row's expert, [rows, F]. The biases are computed as a product with a
    one-hot matrix, because the gradient of the lookup `bias[expert]` would be a scatter-add, which
    in bfloat16 loses most of the sum to rounding.

    Args:
      bias_EF: the biases of all experts.
      sizes_E: number of rows of each expert; the rows are sorted by expert.
      rows: number of rows.
    """
    experts = len(sizes_E)
    expert_Q = jnp.repeat(jnp.arange(experts), sizes_E, total_repeat_length=rows)
    is_own_QE = jax.nn.one_hot(expert_Q, experts, dtype=bias_EF.dtype)
    return jnp.matmul(is_own_QE, bias_EF, precision=jax.lax.Precision.HIGHEST)


# ---- references
# --------------------------------------------------------------------------------------------------


def experts_reference(config, params, x):
    """Computes the mixture of experts of one row, [T, D] → [T, D]. The reference computes all
    experts for every token, and gives experts that are not chosen the weight 0.
    """
    c = config.moe
    logits = x @ params["router"] + params.get("logit_bias", 0)
    scores = jax.nn.softmax(logits, axis=-1)
    if c.scoring_func == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
    rank = scores + params.get("router_bias", 0)
    least = jnp.sort(rank, axis=-1)[:, -config.num_experts_per_tok, None]
    weight = jnp.where(rank >= least, scores, 0)
    weight = c.routed_scaling_factor * weight / jnp.sum(weight, axis=-1, keepdims=True)
    y = 0
    for e in range(config.num_experts):
        expert = {
            name.removeprefix("expert_"): parameter[e]
            for name, parameter in params.items()
            if name.startswith("expert_")
        }
        y = y + weight[:, e, None] * _expert_reference(c.experts, expert, x)
    if config.shared_expert_intermediate_size:
        shared = {
            name.removeprefix("shared_"): parameter
            for name, parameter in params.items()
            if name.startswith("shared_")
        }
        opened = (
            1 / (1 + jnp.exp(-x @ shared["gate"])) if c.shared_expert_gate else jnp.ones(len(x))
        )
        y = y + opened[:, None] * _expert_reference(c.experts, shared, x)
    return y


def _expert_reference(kind, p, x):
    if kind == "relu2":
        up = x @ p["up"]
        return jnp.where(up > 0, up, 0) ** 2 @ p["down"]
    gate, up = x @ p["gate_up"][:, 0], x @ p["gate_up"][:, 1]
    if kind == "swiglu":
        return (gate / (1 + jnp.exp(-gate)) * up) @ p["down"]
    gate, up = gate + p["gate_up_bias"][0], up + p["gate_up_bias"][1]
    gate, up = jnp.where(gate > 7, 7, gate), jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
    hidden = gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)
    return hidden @ p["down"] + p["down_bias"]
