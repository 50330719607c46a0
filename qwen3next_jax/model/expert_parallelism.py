"""Expert parallelism: tokens travel to the shards that hold their experts, and back. Every token
is computed, at any imbalance; none is dropped.

Where the experts are split over the `expert` axis there are two exchanges, chosen by the number
of shards n (the arithmetic is in docs/parallel.md):

- up to `GATHERED_SHARDS`, every shard gathers all tokens, computes its own experts' part of all
  of them, and the parts are summed where the tokens came from (reduce-scatter);
- beyond, every choice of an expert travels alone to the shard that holds it (`ragged_all_to_all`).

A shard may receive anything between no token and all tokens, but buffers are static. Their capacity
is a little more than a balanced router sends. The rest goes through loops that a balanced router
never enters: for the first exchange they are in `ops/routed_experts/`, for the second they are
further rounds, below. Long inputs are processed in chunks of tokens. The backward pass saves the
inputs alone and exchanges them again; only tokens that were gathered all at once are saved by
remat `dots` and `none`.

Letters: R tokens of this shard, N tokens that meet this shard's experts, D model, A choices per
token, Q choices, P rows of a round, E experts, L experts of this shard, S shards.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.preferences import row_major
from qwen3next_jax.ops.ragged_exchange import exchange
from qwen3next_jax.ops.routed_experts import routed_experts, routed_experts_gradients, sum_by_token

GATHERED_SHARDS = 8
# A chunk's choices take so many bytes of rows, or this part of the device's memory if that is more.
CHUNK_BYTES = 2**29
CHUNK_PART = 64  # every further chunk reads and writes the float32 gradients of all weights
OVERFLOW_PART = 8  # a further round of the ragged exchange has an eighth of the first round's rows
# The gathered exchange goes in two overlapping chunks if each expert then has so many rows.
OVERLAP_ROWS = 512
# capacity of a buffer, as a multiple of the rows that a shard receives under perfect balance
CAPACITY_FACTOR = 1.125


def local_moe(x_RD, weight_RA, expert_RA, gate_up_ED2I, down_EID, form: Callable | None = None):
    """`expert_parallel_moe` for a device that holds all experts.

    Args:
      form: computes a chunk, with the same arguments; None: `routed_experts`.
    """
    options = _Options(_LocalExperts, _chunk(x_RD, expert_RA), form=form)
    return _experts(options, x_RD, weight_RA, expert_RA, gate_up_ED2I, down_EID)


def expert_parallel_moe(
    x_RD, weight_RA, expert_RA, gate_up_LD2I, down_LID, axis: str, axes: tuple[str, ...]
):
    """Σ_a weight · SwiGLU_expert(x) for this shard's tokens, inside `shard_map`.

    Args:
      x_RD, weight_RA, expert_RA: this shard's tokens, and the weights and numbers of the experts
        that they chose.
      gate_up_LD2I, down_LID: this shard's experts. A `tensor` axis may split their width; the
        result is then a part of the sum.
      axis: the mesh axis over which the experts are split in order.
      axes: all axes that split tokens; shards along them make the same number of rounds.

    Returns:
      [R, D] in x's dtype.
    """
    chunk, experts = _chunk(x_RD, expert_RA), gate_up_LD2I.shape[0]
    if jax.lax.axis_size(axis) > GATHERED_SHARDS:
        return _experts(
            _Options(_AllToAllExperts, chunk, axis, axes),
            x_RD,
            weight_RA,
            expert_RA,
            gate_up_LD2I,
            down_LID,
        )
    if overlap_chunks(longer := _chunk(x_RD, expert_RA, 2), expert_RA.shape[1], experts) == 2:
        chunk = longer
    elif chunk == x_RD.shape[0]:
        # All at once: gathered outside of `_experts`, so that remat can keep it. A second gather
        # would begin a layer's gradients, with nothing beside it.
        x_ND, weight_NA, expert_NA = (
            save_for_backward(gather(a, axis), "gathered rows")
            for gather, a in ((_gather_rows, x_RD), (_gather_rows, weight_RA), (_gather, expert_RA))
        )
        here = _Options(_LocalExperts, x_ND.shape[0], capacity=_capacity(expert_RA.size))
        expert_NA -= jax.lax.axis_index(axis) * experts
        return _sum_rows(_experts(here, x_ND, weight_NA, expert_NA, gate_up_LD2I, down_LID), axis)
    return _experts(
        _Options(_AllGatherExperts, chunk, axis, axes),
        x_RD,
        weight_RA,
        expert_RA,
        gate_up_LD2I,
        down_LID,
    )


def overlap_chunks_of_all(tokens: int, width: int, choices: int, experts: int, dtype) -> int:
    """How many overlapping chunks the gathered exchange makes of a shard's tokens; 1 if the tokens
    have to go in several chunks one after another.
    """
    x_RD, expert_RA = (jax.ShapeDtypeStruct((tokens, n), dtype) for n in (width, choices))
    parts = overlap_chunks(tokens, choices, experts)
    return parts if _chunk(x_RD, expert_RA, parts) == tokens else 1


class _Options(NamedTuple):
    exchange: type
    chunk: int
    axis: str = ""
    axes: tuple[str, ...] = ()
    form: Callable | None = None
    capacity: int | None = None  # of a chunk's buffers; None: all choices


def _chunk(x_RD, expert_RA, parts: int = 1) -> int:
    """Tokens in a chunk: the largest divisor of all tokens whose rows fit into the bytes of a
    chunk, if its `parts` are in memory one after another.
    """
    tokens, choices = expert_RA.shape
    chunk_bytes = max(CHUNK_BYTES, (compile_target().memory_bytes or 0) // CHUNK_PART)
    most = max(parts * chunk_bytes // (x_RD.shape[1] * x_RD.dtype.itemsize * choices), 1)
    return next(
        tokens // n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n <= most
    )


# ---- one custom gradient around chunks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(options, x_RD, weight_RA, expert_RA, gate_up, down):
    def chunk(_, inputs):
        x, weight, expert = inputs
        return None, options.exchange(options, expert, gate_up.shape[0]).forward(
            x, weight, gate_up, down
        )

    return _walk(options.chunk, chunk, None, (x_RD, weight_RA, expert_RA))[1]


def _experts_forward(options, *inputs):
    return _experts(options, *inputs), inputs


def _experts_backward(options, inputs, dy_RD):
    x_RD, weight_RA, expert_RA, gate_up, down = inputs

    def chunk(totals, inputs):
        x, weight, expert, dy = inputs
        dx, dweight, *dw = options.exchange(options, expert, gate_up.shape[0]).backward(
            x, weight, gate_up, down, dy
        )
        return _add(totals, dw) if totals else dw, (dx, dweight.astype(weight.dtype))

    one = options.chunk == x_RD.shape[0]  # its gradients stay in the weights' dtype
    totals = None if one else [_zeros_wide(w) for w in (gate_up, down)]
    (dgate_up, ddown), (dx_RD, dweight_RA) = _walk(
        options.chunk, chunk, totals, (x_RD, weight_RA, expert_RA, dy_RD)
    )
    return dx_RD, dweight_RA, None, dgate_up.astype(gate_up.dtype), ddown.astype(down.dtype)


_experts.defvjp(_experts_forward, _experts_backward)


def _walk(size, step, carry, arrays):
    """`jax.lax.scan` of `step` over chunks of `size` rows."""
    if arrays[0].shape[0] == size:
        return step(carry, arrays)
    chunks = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), arrays)
    carry, outputs = jax.lax.scan(step, carry, chunks)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def _zeros_wide(w):
    return jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype))


def _add(totals, terms):
    return [total + term.astype(total.dtype) for total, term in zip(totals, terms)]


def _capacity(balanced: int) -> int:
    return math.ceil(CAPACITY_FACTOR * balanced)


# ---- all experts here


class _LocalExperts:
    def __init__(self, options: _Options, expert_RA, experts: int):
        self.expert = expert_RA
        self.form = options.form
        self.capacity = options.capacity or expert_RA.size

    def forward(self, x, weight, gate_up, down):
        if self.form:
            return self.form(x, weight, self.expert, gate_up, down)
        return routed_experts(x, weight, self.expert, gate_up, down, capacity=self.capacity)

    def backward(self, x, weight, gate_up, down, dy):
        if not self.form:
            return routed_experts_gradients(
                x, weight, self.expert, gate_up, down, dy, capacity=self.capacity
            )
        form = lambda x, weight, *w: self.form(x, weight, self.expert, *w)
        _, pullback = jax.vjp(form, x, weight, gate_up, down)
        dx, dweight, *dw = pullback(dy)
        return dx, dweight.astype(jnp.promote_types(jnp.float32, dweight.dtype)), *dw


# ---- all tokens to all shards


def overlap_chunks(tokens: int, choices: int, experts: int) -> int:
    """In how many overlapping chunks a shard's tokens are exchanged.

    Args:
      tokens, choices: of one shard; all shards together send one shard as many choices.
      experts: of one shard.
    """
    return 2 if tokens * choices >= 2 * OVERLAP_ROWS * experts and tokens % 2 == 0 else 1


class _AllGatherExperts:
    """Every shard gathers all tokens; the shards' parts of a result are summed where its token came
    from. If that leaves enough rows for each expert, the tokens go in two chunks: the rows of one
    travel while the other is computed.
    """

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis = options.axis
        self.chunks = overlap_chunks(*expert_RA.shape, experts)
        self.capacity = _capacity(expert_RA.size // self.chunks)
        self.expert_RA = expert_RA
        self.first = jax.lax.axis_index(self.axis) * experts

    def forward(self, x, weight, gate_up, down):
        def step(_, expert, x, weight):
            return (), [routed_experts(x, weight, expert, gate_up, down, capacity=self.capacity)]

        return self._each_chunk(step, x, weight)[1][0]

    def backward(self, x, weight, gate_up, down, dy):
        def step(dw, expert, x, weight, dy):
            dx, dweight, *dw = routed_experts_gradients(
                x, weight, expert, gate_up, down, dy, *dw, capacity=self.capacity
            )
            return dw, [dx, dweight]

        dw, (dx, dweight) = self._each_chunk(step, x, weight, dy, back=True)
        return dx, dweight, *dw

    def _each_chunk(self, step, *arrays, back: bool = False):
        """Runs `step(carry, experts, *rows)` → (carry, parts of sums) over the chunks, with the
        experts and rows of all shards → (the last carry, the sums for this shard's tokens).

        `back`: from the last chunk to the first, which is the order in which gradients come back
        through the mixers of `row_groups`.
        """
        gathered = [
            [_gather(part, self.axis) for part in jnp.split(array, self.chunks)]
            for array in (self.expert_RA, *arrays)
        ]
        chunks = list(zip(*gathered))
        if back:
            chunks.reverse()
        carry = ()
        parts = []
        for expert, *rows in chunks:
            # The rows are read when the chunk before is done; until then they may travel.
            if parts:
                rows, parts[-1] = jax.lax.optimization_barrier((rows, parts[-1]))
            carry, part = step(carry, expert - self.first, *rows)
            parts.append(part)
        if back:
            parts.reverse()
        sums = [
            jnp.concatenate([_sum(part, self.axis) for part in of_all]) for of_all in zip(*parts)
        ]
        return carry, sums


def _gather(x, axis):
    return jax.lax.all_gather(row_major(x), axis, tiled=True)


def _sum(part, axis):
    return row_major(jax.lax.psum_scatter(part, axis, tiled=True))


_gather_rows, _sum_rows = (jax.custom_vjp(f, nondiff_argnums=(1,)) for f in (_gather, _sum))
_gather_rows.defvjp(lambda x, axis: (_gather(x, axis), None), lambda axis, _, dx: (_sum(dx, axis),))
_sum_rows.defvjp(
    lambda part, axis: (_sum(part, axis), None), lambda axis, _, dy: (_gather(dy, axis),)
)


# ---- every choice to its shard


class _AllToAllExperts:
    """This shard's choices sorted by expert, so that those for one shard lie together; each
    shard works off what it receives, in the order of the senders: one round of a balanced
    shard's rows and some more, then rounds of a part of them.
    """

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis = options.axis
        self.experts = experts
        self.shape = expert_RA.shape
        shards = jax.lax.axis_size(self.axis)
        self.shard = jax.lax.axis_index(self.axis)
        expert_Q = expert_RA.reshape(-1)
        self.order_Q = jnp.argsort(expert_Q, stable=True)
        self.token_Q = self.order_Q // self.shape[1]
        sizes_E = jnp.sum(
            expert_Q[:, None] == jnp.arange(shards * experts), axis=0, dtype=jnp.int32
        )
        # sender, receiver, expert of the receiver
        self.sizes_SSL = jax.lax.all_gather(sizes_E, self.axis).reshape(shards, shards, experts)
        self.sent_SS = jnp.sum(self.sizes_SSL, axis=-1)
        # where a receiver's choices begin at the sender
        self.first_SS = jnp.cumsum(self.sent_SS, axis=1) - self.sent_SS
        # where a sender's begin at the receiver
        self.arrives_SS = jnp.cumsum(self.sent_SS, axis=0) - self.sent_SS
        self.capacity = min(_capacity(expert_Q.size), shards * expert_Q.size)
        self.more = -(-self.capacity // OVERFLOW_PART)
        fullest = jnp.max(jnp.sum(self.sent_SS, axis=0))
        # Every round is a collective: all shards take part in as many as the fullest of them all
        # needs.
        self.rounds = jax.lax.pmax(
            -(-jnp.maximum(fullest - self.capacity, 0) // self.more), options.axes
        )

    def forward(self, x, weight, gate_up, down):
        rows = x[self.token_Q], weight.reshape(-1)[self.order_Q]

        def a_round(low, size, y_QD):
            (x_P, weight_P), expert_P = self._receive(low, size, rows)
            y_PD = routed_experts(
                x_P, weight_P[:, None], expert_P[:, None], gate_up, down, capacity=size
            )
            return self._return(low, y_PD, y_QD)

        return self._collect(self._rounds(a_round, jnp.zeros_like(rows[0])))

    def backward(self, x, weight, gate_up, down, dy):
        rows = x[self.token_Q], weight.reshape(-1)[self.order_Q], dy[self.token_Q]

        def a_round(low, size, carry):
            dw, dx_QD, dweight_Q = carry
            (x_P, weight_P, dy_P), expert_P = self._receive(low, size, rows)
            dx_P, dweight_P1, *terms = routed_experts_gradients(
                x_P, weight_P[:, None], expert_P[:, None], gate_up, down, dy_P, capacity=size
            )
            return (
                _add(dw, terms),
                self._return(low, dx_P, dx_QD),
                self._return(low, dweight_P1[:, 0], dweight_Q),
            )

        zeros = (
            [_zeros_wide(w) for w in (gate_up, down)],
            jnp.zeros_like(rows[0]),
            _zeros_wide(rows[1]),
        )
        dw, dx_QD, dweight_Q = self._rounds(a_round, zeros)
        return self._collect(dx_QD), dweight_Q[jnp.argsort(self.order_Q)].reshape(self.shape), *dw

    def _rounds(self, a_round, carry):
        carry = a_round(0, self.capacity, carry)
        return jax.lax.fori_loop(
            0,
            self.rounds,
            lambda k, carry: a_round(self.capacity + k * self.more, self.more, carry),
            carry,
        )

    def _receive(self, low, size, rows):
        """(each of `rows` for this shard's choices from `low` on, their experts' numbers here; L
        where there is none).
        """
        ends_SL = jnp.cumsum(self.sizes_SSL[:, self.shard].reshape(-1))  # by sender, then expert
        row_P = low + jnp.arange(size)
        group_P = jnp.sum(row_P[:, None] >= ends_SL, axis=1)
        read_SS, rows_SS, land_SS = self._round(low, size)
        received = tuple(
            exchange(
                a, jnp.zeros((size, *a.shape[1:]), a.dtype), read_SS, rows_SS, land_SS, self.axis
            )
            for a in rows
        )
        return received, jnp.where(row_P < ends_SL[-1], group_P % self.experts, self.experts)

    def _return(self, low, rows_P, total_Q):
        read_SS, rows_SS, land_SS = self._round(low, rows_P.shape[0])
        return exchange(
            rows_P.astype(total_Q.dtype), total_Q, land_SS.T, rows_SS.T, read_SS.T, self.axis
        )

    def _round(self, low, size):
        """[S, S] of the rows from `low` on: where sender s starts to read for receiver d, how
        many rows, where they land.
        """
        start = jnp.maximum(self.arrives_SS, low)
        end = jnp.minimum(self.arrives_SS + self.sent_SS, low + size)
        rows_SS = jnp.maximum(end - start, 0)
        # A pair that exchanges nothing would carry offsets far outside the buffers, which hardware
        # need not forgive.
        read_SS, land_SS = (
            jnp.where(rows_SS > 0, x, 0)
            for x in (self.first_SS + start - self.arrives_SS, start - low)
        )
        return read_SS, rows_SS, land_SS

    def _collect(self, rows_QD):
        return sum_by_token(rows_QD, self.order_Q, self.shape)
