"""Experts split over the `expert` axis of the mesh: tokens go to the shards that hold their experts, and come back. Exact
and dropless at any imbalance.

Two exchanges, chosen by the number of shards n (the arithmetic is in docs/parallel.md):

- up to `GATHERED_SHARDS`, every shard gathers all tokens, computes its own experts' part of all of them, and the parts are
  summed where the tokens came from (reduce-scatter);
- beyond, every choice of an expert travels alone to the shard that holds it (`ragged_all_to_all`).

A shard may receive anything between nothing and everything. Buffers are static, so what arrives is worked off in rounds of
P rows, as many as the fullest shard needs (nearly always one), and tokens are walked in chunks. Only the inputs are kept
for the backward pass, which exchanges them again: under remat the experts then run once forward and once backward, and
the weights' gradients add up in float32 over rounds and chunks.

Letters: R tokens of this shard, N tokens that meet this shard's experts, D model, A choices per token, Q choices, P rows of
a round, E experts, L experts of this shard, S shards.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import expert_mlp

GATHERED_SHARDS = 8
CHUNK_CHOICES = 2**16  # choices of this shard's tokens in one chunk: 256 MiB of bfloat16 rows of width 2048
ROOM = 1.5  # rows of a round, as a multiple of what a shard receives under perfect balance


def split_experts(x_RD, weight_RA, expert_RA, gate_up_LD2I, down_LID, axis: str, axes: tuple[str, ...]):
    """Σ_a weight · SwiGLU_expert(x) for this shard's tokens, inside `shard_map`.

    Args:
      x_RD, weight_RA, expert_RA: this shard's tokens, and the weights and numbers of the experts they chose.
      gate_up_LD2I, down_LID: this shard's experts; over a `tensor` axis they may be a part of the width, and so is the result.
      axis: the mesh axis over which the experts are split in order.
      axes: all axes that split tokens; shards along them make the same number of rounds.

    Returns:
      [R, D] in x's dtype.
    """
    chunk = _divisor(x_RD.shape[0], max(CHUNK_CHOICES // expert_RA.shape[1], 1))
    form = _Gathered if jax.lax.axis_size(axis) <= GATHERED_SHARDS else _Exchanged
    return _experts(_Options(form, axis, axes, chunk), x_RD, weight_RA, expert_RA, gate_up_LD2I, down_LID)


class _Options(NamedTuple):
    form: type
    axis: str
    axes: tuple[str, ...]
    chunk: int


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return next(number // parts for parts in range(1, number + 1) if number % parts == 0 and number // parts <= limit)


# ---- one custom gradient around chunks and rounds ----------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(options, x_RD, weight_RA, expert_RA, gate_up, down):
    def chunk(_, inputs):
        x, weight, expert = inputs
        form = options.form(options, expert, gate_up.shape[0])
        rows = form.send((x, weight))

        def a_round(k, y):
            (x_PD, weight_P), sizes = form.receive(k, rows)
            return form.put_back(k, y, expert_mlp(x_PD, gate_up, down, sizes) * weight_P[:, None])
        y = jax.lax.fori_loop(0, form.rounds, a_round, form.empty(x))
        return None, form.collect(y).astype(x.dtype)
    return _walk(options.chunk, chunk, None, (x_RD, weight_RA, expert_RA))[1]


def _experts_forward(options, *inputs):
    return _experts(options, *inputs), inputs


def _experts_backward(options, inputs, dy_RD):
    x_RD, weight_RA, expert_RA, gate_up, down = inputs

    def chunk(totals, inputs):
        x, weight, expert, dy = inputs
        form = options.form(options, expert, gate_up.shape[0])
        rows = form.send((x, weight, dy))

        def a_round(k, carry):
            totals, dx, dweight = carry
            (x_PD, weight_P, dy_PD), sizes = form.receive(k, rows)
            y_PD, pullback = jax.vjp(lambda *a: expert_mlp(*a, sizes), x_PD, gate_up, down)
            dx_PD, *dw = pullback(dy_PD * weight_P[:, None])
            dweight_P = jnp.sum(y_PD.astype(jnp.float32) * dy_PD.astype(jnp.float32), axis=-1)
            totals = jax.tree.map(lambda total, d: total + d.astype(total.dtype), totals, tuple(dw))
            return totals, form.put_back(k, dx, dx_PD), form.put_back_weights(k, dweight, dweight_P)
        totals, dx, dweight = jax.lax.fori_loop(0, form.rounds, a_round, (totals, form.empty(x), form.empty_weights()))
        return totals, (form.collect(dx).astype(x.dtype), form.collect_weights(dweight).astype(weight.dtype))

    totals = tuple(jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype)) for w in (gate_up, down))
    (dgate_up, ddown), (dx_RD, dweight_RA) = _walk(options.chunk, chunk, totals, (x_RD, weight_RA, expert_RA, dy_RD))
    return dx_RD, dweight_RA, None, dgate_up.astype(gate_up.dtype), ddown.astype(down.dtype)


_experts.defvjp(_experts_forward, _experts_backward)


def _walk(size, step, carry, arrays):
    """`jax.lax.scan` of `step` over chunks of `size` rows."""
    chunks = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), arrays)
    if arrays[0].shape[0] == size:
        return step(carry, arrays)
    carry, outputs = jax.lax.scan(step, carry, chunks)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def _sizes(expert_Q, experts: int):
    """[E] how often each expert occurs; numbers beyond are not counted."""
    return jnp.sum(expert_Q[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)


def _room(balanced: int, most: int) -> int:
    """Rows of a round: some more than a balanced router sends, in whole tiles."""
    return min(most, -(-math.ceil(ROOM * balanced) // 128) * 128)


def _window(ends, first, size):
    """Rows of each sorted group (given by their ends) inside [first, first + size)."""
    inside = jnp.clip(jnp.concatenate([jnp.zeros(1, ends.dtype), ends]) - first, 0, size)
    return inside[1:] - inside[:-1]


# ---- all tokens to all shards ------------------------------------------------------------------------------------


class _Gathered:
    """Tokens gathered over the axis; the choices of this shard's experts sorted by expert, all others behind them."""

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis = options.axis
        shards = jax.lax.axis_size(self.axis)
        expert_NA = self._gather(expert_RA) - jax.lax.axis_index(self.axis) * experts
        expert_Q = jnp.where((expert_NA >= 0) & (expert_NA < experts), expert_NA, experts).reshape(-1)
        self.ends_L = jnp.cumsum(_sizes(expert_Q, experts))
        self.size = _room(expert_Q.shape[0] // shards, expert_Q.shape[0])
        self.rounds = -(-self.ends_L[-1] // self.size)  # of this shard: no collective is inside one
        order_Q = jnp.argsort(expert_Q, stable=True)
        self.order_Q = jnp.pad(order_Q, (0, -order_Q.shape[0] % self.size))
        place_NA = jnp.argsort(order_Q).reshape(expert_NA.shape)
        self.place_NA = jnp.where(place_NA < self.ends_L[-1], place_NA, -1)

    def _gather(self, x):
        return jax.lax.all_gather(x, self.axis, tiled=True)

    def send(self, arrays):
        return tuple(map(self._gather, arrays))

    def receive(self, k, rows):
        """(x, weight[, dy]) of the k-th P choices of these experts, and how many each expert has of them."""
        x_ND, weight_NA, *dy_ND = rows
        choice_P = jax.lax.dynamic_slice_in_dim(self.order_Q, k * self.size, self.size)
        token_P = choice_P // weight_NA.shape[1]
        taken = (x_ND[token_P], weight_NA.reshape(-1)[choice_P], *(dy[token_P] for dy in dy_ND))
        return taken, _window(self.ends_L, k * self.size, self.size)

    def _take(self, k, rows):
        """[N, A, …]: the row of every choice, zeros where this round does not have it."""
        index_NA = self.place_NA - k * self.size
        index_NA = jnp.where((self.place_NA >= 0) & (index_NA >= 0), index_NA, self.size)
        return jnp.take(rows, index_NA, axis=0, mode="fill", fill_value=0)

    def empty(self, x):
        return jnp.zeros((self.place_NA.shape[0], x.shape[1]), jnp.promote_types(jnp.float32, x.dtype))

    def empty_weights(self):
        return jnp.zeros(self.place_NA.shape, jnp.float32)

    def put_back(self, k, total_ND, rows_PD):
        return total_ND + jnp.sum(self._take(k, rows_PD), axis=1, dtype=total_ND.dtype)

    def put_back_weights(self, k, total_NA, rows_P):
        return total_NA + self._take(k, rows_P)

    def collect(self, total):
        return jax.lax.psum_scatter(total, self.axis, tiled=True)

    collect_weights = collect


# ---- every choice to its shard -----------------------------------------------------------------------------------


class _Exchanged:
    """This shard's choices sorted by expert, so that those for one shard lie together; each shard works off what it receives,
    in the order of the senders, P rows a round."""

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis, self.experts, self.shape = options.axis, experts, expert_RA.shape
        shards, self.shard = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        expert_Q = expert_RA.reshape(-1)
        self.order_Q = jnp.argsort(expert_Q, stable=True)
        self.inverse_Q = jnp.argsort(self.order_Q)
        sizes_SE = jax.lax.all_gather(_sizes(expert_Q, shards * experts), self.axis)
        self.sizes_SSL = sizes_SE.reshape(shards, shards, experts)  # sender, receiver, expert of the receiver
        sent_SS = jnp.sum(self.sizes_SSL, axis=-1)
        self.sent_SS = sent_SS
        self.first_SS = jnp.cumsum(sent_SS, axis=1) - sent_SS  # where a receiver's choices begin at the sender
        self.arrives_SS = jnp.cumsum(sent_SS, axis=0) - sent_SS  # where a sender's begin at the receiver
        self.size = _room(expert_Q.shape[0], shards * expert_Q.shape[0])
        fullest = jnp.max(jnp.sum(sent_SS, axis=0))
        # Every round is a collective: all shards take part in as many as the fullest of them all needs.
        self.rounds = jax.lax.pmax(-(-fullest // self.size), options.axes)

    def send(self, arrays):
        """(x, weight[, dy]) of every choice, sorted."""
        x_RD, weight_RA, *dy_RD = arrays
        token_Q = self.order_Q // self.shape[1]
        return (x_RD[token_Q], weight_RA.reshape(-1)[self.order_Q], *(dy[token_Q] for dy in dy_RD))

    def _round(self, k):
        """[S, S] of this round: where sender s starts to read for receiver d, how many rows, where they land."""
        low = jnp.maximum(self.arrives_SS, k * self.size)
        high = jnp.minimum(self.arrives_SS + self.sent_SS, (k + 1) * self.size)
        rows_SS = jnp.maximum(high - low, 0)
        # A pair that exchanges nothing would carry offsets far outside the buffers, which hardware need not forgive.
        read_SS, land_SS = (jnp.where(rows_SS > 0, x, 0) for x in (self.first_SS + low - self.arrives_SS, low - k * self.size))
        return read_SS, rows_SS, land_SS

    def _sorted(self, k):
        """(order of the received rows by expert, rows of each expert)."""
        ends_SL = jnp.cumsum(self.sizes_SSL[:, self.shard].reshape(-1))  # by sender, then expert
        row_P = k * self.size + jnp.arange(self.size)
        group_P = jnp.sum(row_P[:, None] >= ends_SL, axis=1)
        expert_P = jnp.where(row_P < ends_SL[-1], group_P % self.experts, self.experts)
        return jnp.argsort(expert_P, stable=True), _sizes(expert_P, self.experts)

    def receive(self, k, rows):
        order_P, sizes = self._sorted(k)
        read_SS, rows_SS, land_SS = self._round(k)
        received = (exchange(a, jnp.zeros((self.size, *a.shape[1:]), a.dtype), read_SS, rows_SS, land_SS, self.axis) for a in rows)
        return tuple(a[order_P] for a in received), sizes

    def empty(self, x):
        return jnp.zeros((self.order_Q.shape[0], x.shape[1]), x.dtype)

    def empty_weights(self):
        return jnp.zeros(self.order_Q.shape, jnp.float32)

    def put_back(self, k, total_Q, rows_P):
        order_P, _ = self._sorted(k)
        read_SS, rows_SS, land_SS = self._round(k)
        return exchange(rows_P[jnp.argsort(order_P)].astype(total_Q.dtype), total_Q, land_SS.T, rows_SS.T, read_SS.T, self.axis)

    put_back_weights = put_back

    def collect(self, total_QD):
        rows_QD = total_QD[self.inverse_Q]
        return jnp.sum(rows_QD.reshape(*self.shape, -1), axis=1, dtype=jnp.promote_types(jnp.float32, rows_QD.dtype))

    def collect_weights(self, total_Q):
        return total_Q[self.inverse_Q].reshape(self.shape)


def exchange(rows, output, read_SS, rows_SS, land_SS, axis: str):
    """`output` with the rows written into it that the shards of `axis` send each other.

    Args:
      rows: [Q, …], what this shard may send. output: [P, …].
      read_SS, rows_SS, land_SS: [S, S] int32, known to all: sender s sends receiver d its rows from read[s, d] on, so many, to
        d's output from land[s, d] on.
    """
    def ragged(rows, output, read_SS, rows_SS, land_SS):
        shard = jax.lax.axis_index(axis)
        return jax.lax.ragged_all_to_all(rows, output, read_SS[shard], rows_SS[shard], land_SS[shard], rows_SS[:, shard],
                                         axis_name=axis)

    def gathered(rows, output, read_SS, rows_SS, land_SS):
        shard = jax.lax.axis_index(axis)
        place_P1 = jnp.arange(output.shape[0])[:, None]
        into_PS = place_P1 - land_SS[:, shard]
        from_PS = (into_PS >= 0) & (into_PS < rows_SS[:, shard])
        index_PS = jnp.arange(rows_SS.shape[0]) * rows.shape[0] + read_SS[:, shard] + into_PS
        taken = jax.lax.all_gather(rows, axis, tiled=True)[jnp.sum(jnp.where(from_PS, index_PS, 0), axis=1)]
        arrived_P = jnp.any(from_PS, axis=1)
        return jnp.where(arrived_P.reshape(-1, *(1,) * (rows.ndim - 1)), taken, output)

    # XLA's CPU backend has no ragged_all_to_all.
    return jax.lax.platform_dependent(rows, output, *(a.astype(jnp.int32) for a in (read_SS, rows_SS, land_SS)),
                                      cpu=gathered, default=ragged)
