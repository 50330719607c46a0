"""The gated delta rule on this machine: the chunked form against a token-by-token scan and transformers' torch form.

    python benchmarks/delta_rule.py [--batch 1] [--key_heads 4] [--value_heads 8] [--width 64] [--longest 8192]

Equality is asserted before anything is timed, in float32. The torch form (`torch_chunk_gated_delta_rule`) joins where torch
and transformers are installed. Prints milliseconds, best of five, and the slope of log time over log length.
"""

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.ops import gated_delta_rule


def inputs(batch, length, groups, heads, width):
    rng = np.random.default_rng(0)
    a = lambda *shape: rng.normal(size=(batch, length, *shape)).astype(np.float32)
    return a(groups, width), a(groups, width), a(heads, width), -np.logaddexp(0, a(heads)), 1 / (1 + np.exp(-a(heads)))


def jax_form(implementation):
    @jax.jit
    def run(q, k, v, g, beta):
        f = lambda *x: gated_delta_rule(*x[:3], g=x[3], beta=x[4], implementation=implementation)[0]
        o, pullback = jax.vjp(f, q, k, v, g, beta)
        return (o, *pullback(o))

    return lambda *x: [np.asarray(y) for y in run(*x)]


def torch_form():
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def run(*x):
        q, k, v, g, beta = (torch.tensor(y, requires_grad=True) for y in x)
        wide = lambda y: y.repeat_interleave(v.shape[2] // q.shape[2], dim=2)
        o, _ = torch_chunk_gated_delta_rule(wide(q), wide(k), v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        o.backward(o.detach())
        return [y.detach().numpy() for y in (o, q.grad, k.grad, v.grad, g.grad, beta.grad)]

    return run


def best_of_five(f, x) -> float:
    f(*x)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        f(*x)
        times.append(time.perf_counter() - start)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 1), ("key_heads", 4), ("value_heads", 8), ("width", 64), ("longest", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    forms = {"chunked": jax_form("chunked"), "associative": jax_form("associative"), "recurrent": jax_form("recurrent")}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        forms["transformers (torch)"] = torch_form()
    x = inputs(a.batch, 1024, a.key_heads, a.value_heads, a.width)
    want = forms["recurrent"](*x)
    for name, form in forms.items():
        for got, right in zip(form(*x), want):
            assert np.linalg.norm(got - right) <= 1e-4 * np.linalg.norm(right), name
    print("forward + backward, 1024 tokens, equal to 1e-4; milliseconds:")
    for name, form in forms.items():
        print(f"  {name:24s} {1e3 * best_of_five(form, x):9.1f}")
    lengths = [1024 * 2**i for i in range((a.longest // 1024).bit_length())]
    times = [best_of_five(forms["chunked"], inputs(a.batch, n, a.key_heads, a.value_heads, a.width)) for n in lengths]
    for n, t in zip(lengths, times):
        print(f"  chunked, {n:6d} tokens: {1e3 * t:9.1f}")
    if len(lengths) > 1:
        print(f"  log-log slope {np.polyfit(np.log(lengths), np.log(times), 1)[0]:.2f}")


if __name__ == "__main__":
    main()
