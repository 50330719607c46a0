"""Defines `gated_delta_rule`, which checks its arguments, chooses an implementation and runs it
with a custom gradient.

B batch, T time, G key heads, H value heads (value head h reads key head h // (H // G)), K key
width, V value width.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import checks
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.delta_rule import chunk_math, dispatch
from qwen3next_jax.ops.delta_rule.interface import Inputs

IMPLEMENTATIONS = ("recurrent", "chunked", "associative", "pallas_tpu", "pallas_gpu")


def gated_delta_rule(
    q,
    k,
    v,
    *,
    g,
    beta,
    initial_state=None,
    segment_ids=None,
    normalize_qk: bool = True,
    delta_term: bool = True,
    implementation: str | None = None,
    axis_name: str | None = None,
    return_all_states: bool = False,
):
    """Applies the gated delta rule (Gated DeltaNet, https://arxiv.org/abs/2412.06464) to whole
    sequences.

    Each value head has a state S [K, V]. For each token t, the state decays, then the token is
    written into the state, then the output is read from the state:

        S <- exp(g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = K^{-1/2} S^T q_t

    Args:
      q, k: [B, T, G, K] queries and keys, float32 or bfloat16 (float64 under x64). H is a
        multiple of G.
      v: [B, T, H, V] values.
      g: [B, T, H] log decay, finite and <= 0. The decay over a span of tokens is computed from a
        difference of running sums within a chunk of 64 tokens, so strong decay costs accuracy: if s
        is the sum of g over a chunk, the relative error is up to |s| * 3e-7 in float32. To forget
        everything, -100 is enough (exp(-100) is 4e-44); -inf gives NaN.
      beta: [B, T, H] write strength, from 0 to 2. For keys of length 1 (`normalize_qk`), the matrix
        I - beta k k^T, which multiplies the state, then has eigenvalues from -1 to 1. So the
        distance between two states that get the same tokens never increases. If, without decay (g =
        0), the values are a linear function of the keys, v = M^T k, the distance of the state to M
        never increases, either.
      initial_state: [B, H, K, V], the state before the first token; None means zeros. With
        `segment_ids`, `initial_state` belongs to the first segment.
      segment_ids: [B, T] integers or None. The ids of documents are positive and non-decreasing
        along T; 0 marks padding at the end. The state becomes zero where a document starts, except
        the first document, which starts from `initial_state`. The outputs of padding are zeros, and
        the inputs of padding get zero gradients. A NaN or an infinity in one document may reach
        other documents of the row, because the decay between documents is a multiplication by zero.
      normalize_qk: whether q and k are first L2-normalised over K in float32: x * rsqrt(sum x^2 +
        1e-6).
      delta_term: whether the write has the delta term -S^T k_t. Without the delta term, the
        function computes gated linear attention.
      implementation: one of "recurrent", "chunked", "associative", "pallas_tpu", "pallas_gpu", or
        None for the platform's best. None means "pallas_tpu" on a TPU if the kernels' blocks fit in
        VMEM, "pallas_gpu" on an H100 or H200 if the kernels support the call and passed their test
        (docs/gpu.md), and "chunked" otherwise. A call that names "pallas_tpu" or "pallas_gpu" also
        runs on a CPU, which interprets the kernels. "pallas_gpu" takes bfloat16 heads of 33 to 256
        channels, which it pads to 64, 128 or 256 channels. "pallas_gpu" does not take `axis_name`.
        On a TPU "pallas_tpu" does not run under `jax.vmap`, because JAX then gives the copy of the
        initial state a source and a target of different shapes; make the mapped axis part of B
        instead.
      axis_name: name of the mesh axis over which T is split in order, for a call inside
        `shard_map`. With `axis_name`, the arrays are this shard's parts, and a document has the
        same id on every shard. Only the first shard reads `initial_state`; on all other shards,
        `initial_state` is ignored and gets no gradient. Every shard returns the final state of the
        whole row.
      return_all_states: whether `final_state` is [B, T, H, K, V], the state after each token. Only
        "recurrent" without `axis_name` returns all states; otherwise the argument has no effect.

    Returns:
      o: [B, T, H, V] in v's dtype.
      final_state: [B, H, K, V] in float32 (float64 for float64 inputs), the state after the last
        token. With `segment_ids`, `final_state` is the state of the last segment.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
      NotImplementedError: the named implementation cannot run these arrays here.

    Values are checked only if this function is traced under `jax.debug_nans(True)`
    (`JAX_DEBUG_NANS=1` sets it for a whole process). Under `jax.debug_nans`, a host callback raises
    a ValueError if g is positive, infinite or NaN, or if ids are out of order or follow padding; a
    compiled program raises a `jax.errors.JaxRuntimeError` with the same text.
    """
    # NumPy's float64 arrays become float32 if x64 is off
    q, k, v, g, beta = map(jnp.asarray, (q, k, v, g, beta))
    _check_arguments(q, k, v, g, beta, initial_state, segment_ids, implementation)
    if jax.config.jax_debug_nans:
        _check_decay_and_segment_order(g, segment_ids)
    wide = jnp.promote_types(jnp.float32, jnp.result_type(q, k, v))
    if initial_state is None:
        initial_state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), wide)
    initial_state = initial_state.astype(wide)
    segments = before = None
    if axis_name is not None:
        from qwen3next_jax.ops.delta_rule import context
    if axis_name is not None and segment_ids is not None:
        before = context.last_segment_id_before_shard(segment_ids, axis_name)
    if segment_ids is not None:
        segments = chunk_math.signed_segment_ids(segment_ids, before)
        live = segments[:, :, None] > 0  # padding does not decay or write the state
        g, beta = jnp.where(live, g, 0), jnp.where(live, beta, 0)
    x = Inputs(q, k, v, g, beta, segments)
    operator = dispatch.choose_operator(implementation, x, normalize_qk, delta_term, axis_name)
    if axis_name is not None:
        return context.gated_delta_rule_over_axis(operator, axis_name, x, initial_state, before)
    if operator.chosen_implementation.name == "recurrent":
        from qwen3next_jax.ops.delta_rule import reference

        return reference.recurrent(
            x,
            initial_state,
            normalize_qk=normalize_qk,
            delta_term=delta_term,
            return_all_states=return_all_states,
        )
    return _differentiable_delta_rule(operator, x, initial_state)


def _check_arguments(q, k, v, g, beta, initial_state, segment_ids, implementation):
    checks.check_implementation_name(implementation, IMPLEMENTATIONS)
    checks.check_shapes(
        q=(q, "BTGK"),
        k=(k, "BTGK"),
        v=(v, "BTHV"),
        g=(g, "BTH"),
        beta=(beta, "BTH"),
        segment_ids=(segment_ids, "BT"),
        initial_state=(initial_state, "BHKV"),
    )
    checks.check_integers(segment_ids=segment_ids)
    if v.shape[2] % q.shape[2] != 0:
        raise ValueError(
            f"v has {v.shape[2]} heads and q {q.shape[2]}: expected value heads to be a multiple "
            "of key heads"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
            raise ValueError(f"{name} has dtype {x.dtype}: expected float32, bfloat16 or float64")


def _check_decay_and_segment_order(g, segment_ids):
    wrong = {
        "g is positive or not finite: expected finite log decay <= 0": jnp.any(
            ~(g <= 0) | jnp.isinf(g)
        )
    }
    if segment_ids is not None:
        before, after = segment_ids[:, :-1], segment_ids[:, 1:]
        disorder = jnp.any(segment_ids < 0) | jnp.any(
            (after > 0) & ((before == 0) | (after < before))
        )
        wrong[
            "segment_ids are out of order: expected positive, non-decreasing along T, 0 at the "
            "end only"
        ] = disorder
    checks.check_values_at_runtime(wrong)


# ---- the custom gradient around the chosen implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_delta_rule(operator: dispatch.Operator, x: Inputs, initial_state):
    return operator.forward(x, initial_state, inverses=None, save=False)[:2]


def _delta_rule_forward(operator: dispatch.Operator, x: Inputs, initial_state):
    o, final, *saved = save_for_backward(
        operator.forward(x, initial_state, inverses=None, save=True)
    )
    # The empty slice of the initial state tells the backward pass its dtype.
    return (o, final), (x, initial_state[:0], saved)


def _delta_rule_backward(operator: dispatch.Operator, residuals, cotangents):
    x, initial_state, saved = residuals
    *gradients, dinitial = operator.backward(x, *saved, *cotangents)
    return x.cast_gradients(gradients), dinitial.astype(initial_state.dtype)


_differentiable_delta_rule.defvjp(_delta_rule_forward, _delta_rule_backward)
