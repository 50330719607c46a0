"""Every implementation of the gated delta rule against the float64 recurrence, outputs and all gradients."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.ops import gated_delta_rule

XLA_FORMS = ("chunked", "associative")


def problem(batch=2, time=130, groups=2, heads=4, key=16, value=24, seed=0):
  """Inputs in float64, and cotangents of o and of the final state."""
  rng = np.random.default_rng(seed)
  a = lambda *shape: rng.normal(size=shape)
  inputs = dict(q=a(batch, time, groups, key), k=a(batch, time, groups, key), v=a(batch, time, heads, value),
                g=-np.exp(a(batch, time, heads)), beta=1 / (1 + np.exp(-a(batch, time, heads))),
                initial_state=a(batch, heads, key, value))
  return inputs, (a(batch, time, heads, value), a(batch, heads, key, value))


def outputs_and_gradients(inputs, cotangents, dtype, **settings):
  """o, the final state and the gradient of every input, computed with inputs of `dtype`, as float64 numpy arrays."""
  with jax.enable_x64(dtype == jnp.float64):
    arrays = {n: jnp.asarray(x, dtype) for n, x in inputs.items()}
    out, pullback = jax.vjp(lambda p: gated_delta_rule(**p, **settings), arrays)
    gradients, = pullback(tuple(jnp.asarray(c, o.dtype) for c, o in zip(cotangents, out)))
  results = dict(o=out[0], final=out[1]) | {f"d{n}": x for n, x in gradients.items()}
  return {n: np.asarray(x, np.float64) for n, x in results.items()}


def relative(got, want):
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(inputs, cotangents, implementation, dtype, tolerance, **settings):
  """`tolerance` bounds the relative L2 error of o and the state; gradients may have four times it."""
  want = outputs_and_gradients(inputs, cotangents, jnp.float64, implementation="recurrent", **settings)
  got = outputs_and_gradients(inputs, cotangents, dtype, implementation=implementation, **settings)
  for name in want:
    bar = tolerance if name in ("o", "final") else 4 * tolerance
    assert relative(got[name], want[name]) <= bar, (name, relative(got[name], want[name]), bar)


@pytest.mark.parametrize("implementation", XLA_FORMS)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float64, 1e-13), (jnp.float32, 1e-5), (jnp.bfloat16, 5e-3)])
def test_agrees_with_the_recurrence(implementation, dtype, tolerance):
  check(*problem(), implementation, dtype, tolerance)
