"""Expert parallelism: tokens travel to the shards that hold their experts, and the results travel
back. No token is dropped, however unevenly the tokens choose the experts.

If the mesh axis `expert` splits the experts, the tokens travel by one of two exchanges. The number
of shards along the axis decides which exchange (docs/notes/many_devices.md has the arithmetic):

- The gathered exchange, for up to `GATHERED_SHARDS` shards: every shard gathers the tokens of all
  shards and computes what its own experts contribute to each token. A reduce-scatter sums the
  contributions on the shard that the token came from.
- The ragged exchange, for more shards: each token is sent once for each of its choices, to the
  shard that holds the chosen expert (`ragged_all_to_all`).

A shard may receive any number of tokens, from none to all, but buffers have a static size. The
capacity of a buffer is a little more than the number of rows that a balanced router sends. If a
shard receives more rows than the capacity, loops process the rows beyond it. The loops of the
gathered exchange are in `ops/routed_experts/`; those of the ragged exchange are the later rounds of
`_AllToAllExperts`.

Long inputs are processed in chunks of tokens. The forward pass saves its inputs and the order of
the choices; the backward pass exchanges the rows again. A remat policy (`model/remat.py`) may save
more: the experts' hidden layer and, if all tokens are gathered in a single chunk, the gathered
rows.

Letters: R tokens of this shard, N tokens that reach this shard's experts, D model, A choices per
token, Q choices, P rows that a shard receives in a round, E experts, L experts of this shard, S
shards.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.preferences import device_memory_bytes, require_row_major
from qwen3next_jax.ops.ragged_exchange import exchange_rows
from qwen3next_jax.ops.routed_experts import (
    SavedForBackward,
    routed_experts,
    routed_experts_gradients,
    sum_by_token,
)

GATHERED_SHARDS = 8
# A chunk has one row for each choice of its tokens. These rows take at most CHUNK_BYTES bytes, or 1
# / CHUNK_PART of the device's memory if that is more. More chunks would be slower, because each one
# reads and writes the float32 gradients of all weights.
CHUNK_BYTES = 2**29
CHUNK_PART = 64
# The memory that the backward pass of a chunk needs, divided by the bytes of the chunk's rows. All
# tokens of `local_moe` are one chunk where that needs no more memory than several chunks, which
# also need the float32 gradients of all weights.
CHUNK_MEMORY = 5
# In the ragged exchange, each round after the first has 1 / OVERFLOW_PART as many rows as the
# first.
OVERFLOW_PART = 8
# The gathered exchange splits the tokens into two overlapping chunks if each expert then has at
# least this many rows per chunk.
OVERLAP_ROWS = 512
# The capacity of a buffer, divided by the number of rows that a shard receives under perfect
# balance.
CAPACITY_FACTOR = 1.125


def local_moe(
    x_RD,
    weight_RA,
    expert_RA,
    gate_up_ED2I,
    down_EID,
    implementation: Callable | None = None,
    keep_hidden: bool = False,
):
    """Computes Σ_a weight · SwiGLU_expert(x) for the tokens of one device, which holds all experts.

    Args:
      x_RD, weight_RA, expert_RA: as in `expert_parallel_moe`.
      gate_up_ED2I, down_EID: the weights of all experts.
      implementation: a function of the five arrays that computes a chunk of tokens; None:
        `ops.routed_experts`.
      keep_hidden: as in `expert_parallel_moe`.
    """
    row_bytes = expert_RA.size * x_RD.shape[1] * x_RD.dtype.itemsize
    gradient_bytes = 4 * (gate_up_ED2I.size + down_EID.size)
    at_once = row_bytes <= _max_chunk_bytes() + gradient_bytes / CHUNK_MEMORY
    chunk = x_RD.shape[0] if at_once else _chunk_tokens(x_RD, expert_RA)
    options = _Options(_LocalExperts, chunk, implementation=implementation, keep_hidden=keep_hidden)
    return _experts_in_chunks(options, x_RD, weight_RA, expert_RA, gate_up_ED2I, down_EID)


def expert_parallel_moe(
    x_RD,
    weight_RA,
    expert_RA,
    gate_up_LD2I,
    down_LID,
    expert_axis: str,
    token_axes: tuple[str, ...],
    keep_hidden: bool = False,
):
    """Computes Σ_a weight · SwiGLU_expert(x) for this shard's tokens; it is called inside
    `shard_map`.

    Args:
      x_RD: this shard's tokens.
      weight_RA, expert_RA: the weights and numbers of the experts that the tokens chose.
      gate_up_LD2I, down_LID: the weights of this shard's experts. If the mesh axis `tensor` splits
        the experts' width, the caller adds the results of the shards along `tensor`.
      expert_axis: the mesh axis that splits the experts. Shard s holds the experts s·L …
        (s + 1)·L - 1.
      token_axes: all mesh axes that split tokens. All shards along these axes take part in the same
        number of rounds of the ragged exchange.
      keep_hidden: whether the remat policy saves the hidden layer of the experts, so that the
        backward pass reads it. The ragged exchange computes the hidden layer again in any case.

    Returns:
      [R, D] in x's dtype.
    """
    chunk, experts = _chunk_tokens(x_RD, expert_RA), gate_up_LD2I.shape[0]
    if jax.lax.axis_size(expert_axis) > GATHERED_SHARDS:
        return _experts_in_chunks(
            _Options(_AllToAllExperts, chunk, expert_axis, token_axes),
            x_RD,
            weight_RA,
            expert_RA,
            gate_up_LD2I,
            down_LID,
        )
    if (
        overlap_chunk_count(
            longer := _chunk_tokens(x_RD, expert_RA, 2), expert_RA.shape[1], experts
        )
        == 2
    ):
        chunk = longer
    elif chunk == x_RD.shape[0]:
        # All tokens fit into one chunk. They are gathered outside of `_experts_in_chunks`, so that
        # a remat policy can save the gathered rows. Otherwise the layer's backward pass would begin
        # by gathering them again, when there is no computation to overlap with.
        x_ND, weight_NA, expert_NA = (
            save_for_backward(gather(a, expert_axis), "rows")
            for gather, a in (
                (_all_gather_with_gradient, x_RD),
                (_all_gather_with_gradient, weight_RA),
                (_all_gather, expert_RA),
            )
        )
        local_options = _Options(
            _LocalExperts,
            x_ND.shape[0],
            capacity_rows=_buffer_rows(expert_RA.size),
            keep_hidden=keep_hidden,
        )
        expert_NA -= jax.lax.axis_index(expert_axis) * experts
        return _reduce_scatter_with_gradient(
            _experts_in_chunks(local_options, x_ND, weight_NA, expert_NA, gate_up_LD2I, down_LID),
            expert_axis,
        )
    return _experts_in_chunks(
        _Options(_AllGatherExperts, chunk, expert_axis, token_axes, keep_hidden=keep_hidden),
        x_RD,
        weight_RA,
        expert_RA,
        gate_up_LD2I,
        down_LID,
    )


def overlap_chunk_count_in_memory(
    tokens: int, width: int, choices: int, experts: int, dtype
) -> int:
    """Returns the number of overlapping chunks, 1 or 2, into which the gathered exchange splits a
    shard's tokens. If two overlapping chunks would not fit into memory, the number is 1, and the
    tokens are processed in smaller chunks, one after another.

    Args:
      tokens: number of tokens of the shard.
      width: width of the model.
      choices: number of experts that each token chooses.
      experts: number of experts of the shard.
      dtype: dtype of the tokens.
    """
    x_RD, expert_RA = (jax.ShapeDtypeStruct((tokens, n), dtype) for n in (width, choices))
    parts = overlap_chunk_count(tokens, choices, experts)
    return parts if _chunk_tokens(x_RD, expert_RA, parts) == tokens else 1


class _Options(NamedTuple):
    """How the routed experts of a shard's tokens are computed, chunk by chunk.

    exchange: the class that exchanges and computes a chunk: `_LocalExperts`, `_AllGatherExperts`
      or `_AllToAllExperts`.
    chunk_tokens: the number of tokens in a chunk.
    expert_axis, token_axes, keep_hidden: as in `expert_parallel_moe`.
    implementation: as in `local_moe`.
    capacity_rows: the number of rows of a chunk's buffers; None: one row for every choice.
    """

    exchange: type
    chunk_tokens: int
    expert_axis: str = ""
    token_axes: tuple[str, ...] = ()
    implementation: Callable | None = None
    capacity_rows: int | None = None
    keep_hidden: bool = False


def _chunk_tokens(x_RD, expert_RA, parts_per_chunk: int = 1) -> int:
    """Returns the number of tokens in a chunk: the largest divisor of the number of tokens for
    which the rows of a chunk take at most `_max_chunk_bytes()` bytes. If a chunk is processed in
    `parts_per_chunk` parts, one after another, only the rows of one part have to fit.
    """
    tokens, choices = expert_RA.shape
    most = max(
        parts_per_chunk * _max_chunk_bytes() // (x_RD.shape[1] * x_RD.dtype.itemsize * choices), 1
    )
    return next(
        tokens // n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n <= most
    )


def _max_chunk_bytes() -> int:
    """Returns how many bytes the rows of a chunk may take: CHUNK_BYTES or a share of the device's
    memory, whichever is more.
    """
    return max(CHUNK_BYTES, device_memory_bytes() // CHUNK_PART)


# ---- one custom gradient around all chunks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts_in_chunks(options, *inputs):
    return _experts_in_chunks_forward(options, *inputs)[0]


def _experts_in_chunks_forward(options, x_RD, weight_RA, expert_RA, gate_up, down):
    def chunk(_, inputs, __):
        x, weight, expert = inputs
        y, kept = options.exchange(options, expert, gate_up.shape[0]).forward(
            x, weight, gate_up, down
        )
        return None, (y, kept)

    _, y_RD, kept = _scan_chunks(options.chunk_tokens, chunk, None, (x_RD, weight_RA, expert_RA))
    kept = [
        SavedForBackward(
            save_for_backward(k.sorted_choices, "router"),
            save_for_backward(k.hidden_PF, "experts"),
        )
        for k in kept
    ]
    return y_RD, ((x_RD, weight_RA, expert_RA, gate_up, down), kept)


def _experts_in_chunks_backward(options, saved, dy_RD):
    (x_RD, weight_RA, expert_RA, gate_up, down), kept = saved

    def chunk(totals, inputs, kept):
        x, weight, expert, dy = inputs
        dx, dweight, *dw = options.exchange(options, expert, gate_up.shape[0]).backward(
            x, weight, gate_up, down, dy, kept
        )
        totals = _add_to_totals(totals, dw) if totals else dw
        return totals, ((dx, dweight.astype(weight.dtype)), ())

    is_one_chunk = options.chunk_tokens == x_RD.shape[0]  # no sum over chunks, so no float32 totals
    totals = None if is_one_chunk else [_float32_zeros_like(w) for w in (gate_up, down)]
    (dgate_up, ddown), (dx_RD, dweight_RA), _ = _scan_chunks(
        options.chunk_tokens, chunk, totals, (x_RD, weight_RA, expert_RA, dy_RD), kept
    )
    return dx_RD, dweight_RA, None, dgate_up.astype(gate_up.dtype), ddown.astype(down.dtype)


_experts_in_chunks.defvjp(_experts_in_chunks_forward, _experts_in_chunks_backward)


def _scan_chunks(chunk_tokens, step, carry, arrays, kept_arrays=()):
    """Runs `jax.lax.scan` of `step` over chunks of `chunk_tokens` rows of `arrays`. If there is
    only one chunk, it calls `step` once, without a scan.

    Args:
      step: function (carry, the chunk's rows of `arrays`, the chunk's entry of `kept_arrays`) →
        (carry, (outputs, arrays to keep for the backward pass)).
      kept_arrays: in the backward pass, the arrays that the steps of the forward pass kept, with a
        leading axis of chunks if there are several chunks.

    Returns:
      (the last carry, the outputs with the chunks joined, the arrays that the steps kept).
    """
    if arrays[0].shape[0] == chunk_tokens:
        carry, (outputs, kept_arrays) = step(carry, arrays, kept_arrays)
        return carry, outputs, kept_arrays
    chunks = jax.tree.map(lambda a: a.reshape(-1, chunk_tokens, *a.shape[1:]), arrays)
    carry, (outputs, kept_arrays) = jax.lax.scan(
        lambda carry, inputs: step(carry, *inputs), carry, (chunks, kept_arrays)
    )
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs), kept_arrays


def _float32_zeros_like(w):
    return jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype))


def _add_to_totals(totals, terms):
    return [total + term.astype(total.dtype) for total, term in zip(totals, terms)]


def _buffer_rows(balanced: int) -> int:
    return math.ceil(CAPACITY_FACTOR * balanced)


# ---- all experts on this device


class _LocalExperts:
    """Computes a chunk of tokens with this device's experts, without an exchange. The class calls
    `options.implementation` or, by default, `routed_experts`; choices of experts on other devices
    contribute 0.

    The method `forward` returns the result of the chunk and a list of `SavedForBackward`, which the
    method `backward` gets as `kept`. The classes `_AllGatherExperts` and `_AllToAllExperts` have
    the same two methods.
    """

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.expert = expert_RA
        self.implementation = options.implementation
        self.capacity = options.capacity_rows or expert_RA.size
        self.keep_hidden = options.keep_hidden

    def forward(self, x, weight, gate_up, down):
        if self.implementation:
            return self.implementation(x, weight, self.expert, gate_up, down), []
        y, kept = routed_experts(
            x,
            weight,
            self.expert,
            gate_up,
            down,
            capacity=self.capacity,
            keep_hidden=self.keep_hidden,
        )
        return y, [kept]

    def backward(self, x, weight, gate_up, down, dy, kept):
        if not self.implementation:
            return routed_experts_gradients(
                x, weight, self.expert, gate_up, down, dy, capacity=self.capacity, kept=kept[0]
            )
        run = lambda x, weight, *w: self.implementation(x, weight, self.expert, *w)
        _, pullback = jax.vjp(run, x, weight, gate_up, down)
        dx, dweight, *dw = pullback(dy)
        return dx, dweight.astype(jnp.promote_types(jnp.float32, dweight.dtype)), *dw


# ---- the gathered exchange: all tokens go to all shards


def overlap_chunk_count(tokens: int, choices: int, experts: int) -> int:
    """Returns the number of overlapping chunks, 1 or 2, in which the gathered exchange would send a
    shard's tokens if memory were unlimited.

    Args:
      tokens: number of tokens of one shard.
      choices: number of experts that each token chooses. Under perfect balance of the experts, a
        shard receives `tokens` · `choices` rows in all.
      experts: number of experts of one shard.
    """
    return 2 if tokens * choices >= 2 * OVERLAP_ROWS * experts and tokens % 2 == 0 else 1


class _AllGatherExperts:
    """The gathered exchange. Every shard gathers all tokens and computes what its own experts
    contribute to each token. The contributions to a token are summed on the shard that the token
    came from. If each expert gets enough rows, the tokens are split into two chunks, and the rows
    of one chunk travel while the other chunk is computed.
    """

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis = options.expert_axis
        self.chunks = overlap_chunk_count(*expert_RA.shape, experts)
        self.capacity = _buffer_rows(expert_RA.size // self.chunks)
        self.expert_RA = expert_RA
        self.experts = experts
        self.keep_hidden = options.keep_hidden

    def forward(self, x, weight, gate_up, down):
        first = jax.lax.axis_index(self.axis) * self.experts

        def step(kept, expert, x, weight):
            y, more = routed_experts(
                x,
                weight,
                expert - first,
                gate_up,
                down,
                capacity=self.capacity,
                keep_hidden=self.keep_hidden,
            )
            return [*kept, more], [y]

        kept, (y,) = self._run_each_chunk(step, [], self.expert_RA, x, weight)
        return y, kept

    def backward(self, x, weight, gate_up, down, dy, kept):
        shards = jax.lax.axis_size(self.axis)
        chunk_shape = (weight.shape[0] // self.chunks * shards, weight.shape[1])
        weight = jax.ShapeDtypeStruct(chunk_shape, weight.dtype)

        def step(carry, x, dy):
            dw, (*kept, last) = carry
            dx, dweight, *dw = routed_experts_gradients(
                x, weight, None, gate_up, down, dy, *dw, capacity=self.capacity, kept=last
            )
            return (dw, kept), [dx, dweight]

        (dw, _), (dx, dweight) = self._run_each_chunk(step, ((), kept), x, dy, back=True)
        return dx, dweight, *dw

    def _run_each_chunk(self, step, carry, *arrays, back: bool = False):
        """Runs a step on each chunk, with the gathered rows of all shards.

        Args:
          step: function (carry, *rows) → (carry, [this shard's contributions to each row]).
          carry: the first carry.
          arrays: arrays of this shard's tokens, [R, …], which are gathered chunk by chunk.
          back: whether to go from the last chunk to the first. The backward pass goes backwards,
            because it computes the gradients of the last rows first (`model.row_groups`).

        Returns:
          The last carry; the contributions of all shards, summed, for this shard's tokens.
        """
        gathered = [
            [_all_gather(part, self.axis) for part in jnp.split(array, self.chunks)]
            for array in arrays
        ]
        chunks = list(zip(*gathered))
        if back:
            chunks.reverse()
        parts = []
        for rows in chunks:
            # The barrier lets a chunk's rows be used only after the chunk before is computed. Until
            # then the rows travel.
            if parts:
                rows, parts[-1] = jax.lax.optimization_barrier((rows, parts[-1]))
            carry, part = step(carry, *rows)
            parts.append(part)
        if back:
            parts.reverse()
        sums = [
            jnp.concatenate([_reduce_scatter(part, self.axis) for part in parts_of_array])
            for parts_of_array in zip(*parts)
        ]
        return carry, sums


def _all_gather(x, axis):
    return jax.lax.all_gather(require_row_major(x), axis, tiled=True)


def _reduce_scatter(part, axis):
    return require_row_major(jax.lax.psum_scatter(part, axis, tiled=True))


_all_gather_with_gradient, _reduce_scatter_with_gradient = (
    jax.custom_vjp(f, nondiff_argnums=(1,)) for f in (_all_gather, _reduce_scatter)
)
_all_gather_with_gradient.defvjp(
    lambda x, axis: (_all_gather(x, axis), None), lambda axis, _, dx: (_reduce_scatter(dx, axis),)
)
_reduce_scatter_with_gradient.defvjp(
    lambda part, axis: (_reduce_scatter(part, axis), None),
    lambda axis, _, dy: (_all_gather(dy, axis),),
)


# ---- the ragged exchange: every choice goes to the shard of its expert


class _AllToAllExperts:
    """The ragged exchange. Every shard sorts its choices by expert, so that the choices for one
    receiving shard lie together, and sends a row for each choice. The receiver computes the rows in
    rounds, in the order of the sending shards. The first round has room for a few more rows than a
    balanced router sends. Each later round has room for 1 / `OVERFLOW_PART` of the rows of the
    first round.
    """

    def __init__(self, options: _Options, expert_RA, experts: int):
        self.axis = options.expert_axis
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
        # number of choices by sender, receiver, and expert of the receiver
        self.sizes_SSL = jax.lax.all_gather(sizes_E, self.axis).reshape(shards, shards, experts)
        self.sent_SS = jnp.sum(self.sizes_SSL, axis=-1)
        # where the choices for a receiver begin among the sender's sorted choices
        self.first_SS = jnp.cumsum(self.sent_SS, axis=1) - self.sent_SS
        # where the choices of a sender begin among all rows that the receiver gets
        self.arrives_SS = jnp.cumsum(self.sent_SS, axis=0) - self.sent_SS
        self.capacity = min(_buffer_rows(expert_Q.size), shards * expert_Q.size)
        self.more = -(-self.capacity // OVERFLOW_PART)
        fullest = jnp.max(jnp.sum(self.sent_SS, axis=0))
        # Every round is a collective, so all shards take part in as many rounds as the shard with
        # the most rows needs.
        self.rounds = jax.lax.pmax(
            -(-jnp.maximum(fullest - self.capacity, 0) // self.more), options.token_axes
        )

    def forward(self, x, weight, gate_up, down):
        rows = x[self.token_Q], weight.reshape(-1)[self.order_Q]

        def a_round(low, size, y_QD):
            (x_P, weight_P), expert_P = self._receive_rows(low, size, rows)
            y_PD, _ = routed_experts(
                x_P, weight_P[:, None], expert_P[:, None], gate_up, down, capacity=size
            )
            return self._return_rows(low, y_PD, y_QD)

        return self._sum_by_token(self._run_all_rounds(a_round, jnp.zeros_like(rows[0]))), []

    def backward(self, x, weight, gate_up, down, dy, kept):
        rows = x[self.token_Q], weight.reshape(-1)[self.order_Q], dy[self.token_Q]

        def a_round(low, size, carry):
            dw, dx_QD, dweight_Q = carry
            (x_P, weight_P, dy_P), expert_P = self._receive_rows(low, size, rows)
            dx_P, dweight_P1, *terms = routed_experts_gradients(
                x_P, weight_P[:, None], expert_P[:, None], gate_up, down, dy_P, capacity=size
            )
            return (
                _add_to_totals(dw, terms),
                self._return_rows(low, dx_P, dx_QD),
                self._return_rows(low, dweight_P1[:, 0], dweight_Q),
            )

        zeros = (
            [_float32_zeros_like(w) for w in (gate_up, down)],
            jnp.zeros_like(rows[0]),
            _float32_zeros_like(rows[1]),
        )
        dw, dx_QD, dweight_Q = self._run_all_rounds(a_round, zeros)
        return (
            self._sum_by_token(dx_QD),
            dweight_Q[jnp.argsort(self.order_Q)].reshape(self.shape),
            *dw,
        )

    def _run_all_rounds(self, a_round, carry):
        """Runs all rounds of the exchange, and returns the last carry. `a_round`: function (first
        row of the round, number of rows, carry) → carry.
        """
        carry = a_round(0, self.capacity, carry)
        return jax.lax.fori_loop(
            0,
            self.rounds,
            lambda k, carry: a_round(self.capacity + k * self.more, self.more, carry),
            carry,
        )

    def _receive_rows(self, low, size, rows):
        """Exchanges the rows of one round. The rows that all shards send to this shard are
        numbered; this round receives the rows `low` … `low` + `size` - 1.

        Args:
          low: the first row of the round.
          size: the number of rows of the round, P.
          rows: arrays [Q, …] of this shard's own choices, which it sends.

        Returns:
          The received rows, one array [P, …] for each array of `rows`; and [P], the number of each
          row's expert on this shard, or L if the row holds no choice.
        """
        ends_SL = jnp.cumsum(self.sizes_SSL[:, self.shard].reshape(-1))  # by sender, then expert
        row_P = low + jnp.arange(size)
        group_P = jnp.sum(row_P[:, None] >= ends_SL, axis=1)
        from_row_SS, count_SS, to_row_SS = self._round_offsets(low, size)
        received = tuple(
            exchange_rows(
                a,
                jnp.zeros((size, *a.shape[1:]), a.dtype),
                from_row_SS,
                count_SS,
                to_row_SS,
                self.axis,
            )
            for a in rows
        )
        return received, jnp.where(row_P < ends_SL[-1], group_P % self.experts, self.experts)

    def _return_rows(self, low, rows_P, total_Q):
        """Sends the results `rows_P` of one round back to the shards that sent the rows. Returns
        `total_Q`, one row for each of this shard's choices, with the results that came back.
        """
        from_row_SS, count_SS, to_row_SS = self._round_offsets(low, rows_P.shape[0])
        return exchange_rows(
            rows_P.astype(total_Q.dtype), total_Q, to_row_SS.T, count_SS.T, from_row_SS.T, self.axis
        )

    def _round_offsets(self, low, size):
        """Returns which rows the shards exchange in one round: each receiver gets its rows `low` …
        `low` + `size` - 1.

        Returns:
          Three arrays [S, S], with one number for each sender s and receiver d: the first row that
            s reads, the number of rows that s sends, and the row of d's buffer that gets the first
            of these rows.
        """
        start = jnp.maximum(self.arrives_SS, low)
        end = jnp.minimum(self.arrives_SS + self.sent_SS, low + size)
        count_SS = jnp.maximum(end - start, 0)
        # If a pair of shards exchanges nothing, its offsets would lie far outside of the buffers,
        # which hardware may not accept.
        from_row_SS, to_row_SS = (
            jnp.where(count_SS > 0, x, 0)
            for x in (self.first_SS + start - self.arrives_SS, start - low)
        )
        return from_row_SS, count_SS, to_row_SS

    def _sum_by_token(self, rows_QD):
        return sum_by_token(rows_QD, self.order_Q, self.shape)
