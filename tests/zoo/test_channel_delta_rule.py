"""The delta rule with a decay per channel against its recurrence in float64 NumPy, outputs and
every gradient.

python tests/zoo/test_channel_delta_rule.py      prints the largest error of the nine cases, forms
and dtypes
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.ops import channel_delta_rule

T, K = 256, 40  # of heads wider than 32 channels a chunk has 64 rows in every dtype
CASES = (
    "mild",
    "spread",
    "strong",
    "floor",
    "mixed",
    "rare",
    "identical 1",
    "identical 1.9",
    "resets",
)


def problem(name="mild", time=T, key=K, value=K, heads=2, groups=1, seed=0):
    """float64 inputs of a named case, and cotangents of o and the final state."""
    rng = np.random.default_rng(seed)
    a = lambda *shape: rng.normal(size=shape)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    x = dict(
        q=unit(a(1, time, groups, key)),
        k=unit(a(1, time, groups, key)),
        v=a(1, time, heads, value),
        beta=1 / (1 + np.exp(-a(1, time, heads))),
        initial_state=a(1, heads, key, value),
    )
    g = a(1, time, heads, key)
    x["g"] = {
        "mild": -0.02 * np.abs(g),
        "spread": -np.exp(3 * g - 2),
        "strong": -30 * rng.uniform(size=g.shape),
        "floor": -5 / (1 + np.exp(-2 * g)),
        "mixed": np.where(g > 0, -50.0, -1e-3),
        "rare": np.where(rng.uniform(size=g.shape) < 0.02, -1000.0, -1e-2),
    }.get(name, -0.02 * np.abs(g))
    if name.startswith("identical"):
        x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
        x["beta"] = np.full_like(x["beta"], float(name.split()[1]))
        if name.endswith("9"):
            x["g"] = np.zeros_like(g)
    if name == "resets":
        x["g"][:, 50::50] = -np.inf
    return x, (a(1, time, heads, value), a(1, heads, key, value))


def recurrence(x, delta_term=True, read="after"):
    """The rule as printed (2510.26692, equation 1), with the gradient of a step by hand: o, S
    and, of cotangents, all gradients.
    """
    names = ("q", "k", "v", "g", "beta", "initial_state", "bonus", "value_log_decay", "erase_key")
    q, k, v, g, beta, s, bonus, gv, erased = map(x.get, names)
    (t_max, h), states, o = (v.shape[1], v.shape[2]), [s[0]], np.zeros(v.shape)
    repeat = lambda y: np.repeat(y[0], h // y.shape[2], axis=1)
    q, k, v, g, beta = repeat(q), repeat(k), v[0], g[0], beta[0]
    gv = np.zeros(v.shape) if gv is None else gv[0]
    erased = k if erased is None else erased[0]
    seen = []
    for t in range(t_max):
        decayed = np.exp(g[t])[:, :, None] * states[-1] * np.exp(gv[t])[:, None]
        e = v[t] - np.einsum("hkv,hk->hv", decayed, erased[t]) if delta_term else v[t]
        after = decayed + beta[t][:, None, None] * k[t][:, :, None] * e[:, None]
        o[0, t] = np.einsum("hkv,hk->hv", states[-1] if read == "before" else after, q[t])
        if bonus is not None:
            o[0, t] += np.sum(q[t] * bonus * k[t], axis=-1, keepdims=True) * v[t]
        seen.append((decayed, e))
        states.append(after)

    def pullback(do, ds):
        ds, do, d = (
            ds[0].copy(),
            do[0],
            {
                n: np.zeros(y.shape)
                for n, y in dict(
                    q=q, k=k, v=v, g=g, beta=beta, value_log_decay=gv, erase_key=k
                ).items()
            },
        )
        d["bonus"] = np.zeros(k.shape[1:])
        for t in reversed(range(t_max)):
            decayed, e = seen[t]
            into = np.einsum("hk,hv->hkv", q[t], do[t])
            if read == "after":
                ds = ds + into
            d["q"][t] = np.einsum(
                "hkv,hv->hk", states[t] if read == "before" else states[t + 1], do[t]
            )
            d["beta"][t] = np.einsum("hkv,hk,hv->h", ds, k[t], e)
            d["k"][t] = beta[t][:, None] * np.einsum("hkv,hv->hk", ds, e)
            de = beta[t][:, None] * np.einsum("hkv,hk->hv", ds, k[t])
            d["v"][t] = de
            if delta_term:
                d["erase_key" if "erase_key" in x else "k"][t] -= np.einsum(
                    "hkv,hv->hk", decayed, de
                )
                ds = ds - np.einsum("hk,hv->hkv", erased[t], de)
            d["g"][t], d["value_log_decay"][t] = (
                np.sum(ds * decayed, axis=2),
                np.sum(ds * decayed, axis=1),
            )
            ds = np.exp(g[t])[:, :, None] * ds * np.exp(gv[t])[:, None] + (
                into if read == "before" else 0
            )
            if bonus is not None:
                own, c = np.sum(do[t] * v[t], axis=-1, keepdims=True), q[t] * bonus * k[t]
                d["v"][t] += np.sum(c, axis=-1, keepdims=True) * do[t]
                d["q"][t] += own * bonus * k[t]
                d["k"][t] += own * bonus * q[t]
                d["bonus"] += own * q[t] * k[t]
        for n in "qk":
            d[n] = d[n].reshape(t_max, x[n].shape[2], -1, d[n].shape[-1]).sum(axis=2)
        d["initial_state"] = ds
        return {n: d[n] if n == "bonus" else d[n][None] for n in x}

    return o, states[-1][None], pullback


@functools.partial(jax.jit, static_argnames=("implementation", "delta_term", "read"))
def _run(x, cotangents, segment_ids, **settings):
    out, pullback = jax.vjp(
        lambda x: channel_delta_rule(**x, segment_ids=segment_ids, **settings), x
    )
    return *out, pullback(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out)))[0]


def errors(x, cotangents, dtype, segment_ids=None, want=None, **settings):
    """Relative L2 error of o, the final state and every gradient against the recurrence given
    the same numbers.
    """
    wide = jnp.promote_types(jnp.float32, dtype)
    with jax.enable_x64(dtype == jnp.float64):
        arrays = {n: jnp.asarray(y, dtype if n in "qkv" else wide) for n, y in x.items()}
        dys = tuple(jnp.asarray(c, d) for c, d in zip(cotangents, (dtype, wide)))
        o, final, d = _run(arrays, dys, segment_ids, **settings)
    as64 = lambda y: np.asarray(y, np.float64)
    if want is None:
        rule = {n: s for n, s in settings.items() if n != "implementation"}
        o64, final64, pullback = recurrence({n: as64(y) for n, y in arrays.items()}, **rule)
        want = dict(o=o64, final=final64) | {
            f"d{n}": y for n, y in pullback(*map(as64, dys)).items()
        }
    got = dict(o=o, final=final) | {f"d{n}": y for n, y in d.items()}
    assert all(np.isfinite(as64(y)).all() for y in got.values())
    least = 1e-12 * np.linalg.norm(want["dv"]) + 1e-30
    return {
        n: np.linalg.norm(as64(got[n]) - y) / max(np.linalg.norm(y), least) for n, y in want.items()
    }


def bars(name, dtype):
    same = name.startswith("identical")
    return {
        jnp.float64: 1e-13,
        jnp.float32: 4e-6 if same else 5e-7,
        jnp.bfloat16: 2e-2 if same else 5e-3,
    }[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [jnp.float64, jnp.float32, jnp.bfloat16],
)
def test_nine_hard_cases(dtype):
    for name in CASES:
        found = errors(*problem(name), dtype, implementation="chunked")
        assert max(found.values()) <= bars(name, dtype), (name, found)


FORMS = {
    "delta term": {},
    "add": dict(delta_term=False),
    "rwkv": dict(delta_term=False, read="before"),
    "two-sided": dict(delta_term=False),
    "two-sided before": dict(delta_term=False, read="before"),
    "before": dict(read="before"),
    "delta term, own key": {},
}
# Documents of many lengths, one that ends with a chunk, one of a single token; padding at the end.
ENDS = (3, 4, 64, 90, 133)


def form(name, **sizes):
    x, cotangents = problem("spread", key=8, value=12, heads=2, **sizes)
    rng = np.random.default_rng(5)
    if name == "rwkv":
        x["bonus"] = rng.normal(size=(2, 8))
    if name.startswith("two-sided"):
        x["value_log_decay"] = -np.exp(2 * rng.normal(size=x["v"].shape) - 1)
    if name == "delta term, own key":
        x["erase_key"] = rng.uniform(size=x["g"].shape) * np.repeat(x["k"], 2, axis=2)
    return x, cotangents


@pytest.mark.slow
def test_every_form_is_the_recurrence():
    """The shipped recurrence, and chunks with a row of one token, from a given first state. The
    test below has chunks with longer rows.
    """
    for name, (time, implementation) in itertools.product(
        FORMS, ((1, "chunked"), (70, "recurrent"))
    ):
        x, cotangents = form(name, time=time)
        found = errors(x, cotangents, jnp.float64, implementation=implementation, **FORMS[name])
        assert max(found.values()) <= 1e-13, (name, implementation, found)


def documents(name, x, cotangents):
    """Each document alone, by the recurrence; the first goes on from the state given, the final
    state is the last one's.
    """
    do, dfinal = cotangents
    o, d, starts = (
        np.zeros(x["v"].shape),
        {n: np.zeros(y.shape) for n, y in x.items()},
        (0, *ENDS[:-1]),
    )
    for i, (start, end) in enumerate(zip(starts, ENDS)):
        part = {n: y if n in ("bonus", "initial_state") else y[:, start:end] for n, y in x.items()}
        if i:
            part["initial_state"] = np.zeros_like(part["initial_state"])
        o[:, start:end], final, pullback = recurrence(part, **FORMS[name])
        for n, y in pullback(
            do[:, start:end], dfinal if i == len(ENDS) - 1 else 0 * dfinal
        ).items():
            if n == "bonus":
                d[n] += y
            elif n != "initial_state":
                d[n][:, start:end] = y
            elif i == 0:
                d[n] = y
    return dict(o=o, final=final) | {f"d{n}": y for n, y in d.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_packed_documents_are_each_document_alone(name):
    time = 140
    x, cotangents = form(name, time=time)
    ids = np.zeros((1, time), np.int32)
    for i, (start, end) in enumerate(zip((0, *ENDS[:-1]), ENDS)):
        ids[:, start:end] = 2 * i + 3
    want = documents(name, x, cotangents)
    found = errors(
        x,
        cotangents,
        jnp.float64,
        segment_ids=ids,
        want=want,
        implementation="chunked",
        **FORMS[name],
    )
    assert max(found.values()) <= 1e-13, found
    with jax.enable_x64(True):
        mesh = Mesh(np.array(jax.devices()[:4]), ("context",), axis_types=(AxisType.Auto,))
        rows = {n: P() if n in ("bonus", "initial_state") else P(None, "context") for n in x}

        def local(x, ids):
            return channel_delta_rule(**x, segment_ids=ids, axis_name="context", **FORMS[name])

        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, P(None, "context")),
            out_specs=(P(None, "context"), P()),
            check_vma=False,
        )

        def run(x, dys):
            out, pullback = jax.vjp(lambda x: sharded(x, ids), x)
            return *out, pullback(dys)[0]

        o, final, d = jax.jit(run)(*jax.tree.map(jnp.asarray, (x, cotangents)))
    for n, y in (dict(o=o, final=final) | {f"d{n}": y for n, y in d.items()}).items():
        assert np.linalg.norm(np.asarray(y) - want[n]) <= 1e-12 * np.linalg.norm(want[n]), n


def test_arguments_that_do_not_fit():
    x, _ = form("rwkv", time=4)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    for change, message in [
        (dict(), "bonus with read='after'"),
        (dict(bonus=None, read="later"), "read='later': expected"),
        (dict(bonus=None, value_log_decay=x["v"]), "value_log_decay with delta_term=True"),
        (
            dict(bonus=None, erase_key=x["g"], delta_term=False),
            "erase_key with delta_term=False: expected delta_term=True",
        ),
        (
            dict(bonus=None, g=x["beta"]),
            r"g has shape \(1, 4, 2\): expected \[B = 1, T = 4, H = 2, K = 8\]",
        ),
        (
            dict(bonus=None, implementation="triton"),
            "implementation='triton': expected one of recurrent, chunked",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            channel_delta_rule(**x | change)
    with jax.debug_nans(True), pytest.raises(Exception, match="g is positive or NaN"):
        jax.block_until_ready(channel_delta_rule(**x | dict(bonus=None, g=-x["g"])))
        jax.effects_barrier()


def main():
    print(
        "case | chunked float64 | recurrent float32 | chunked float32 | chunked bfloat16: the "
        "largest error, and of what"
    )
    for name in CASES:
        runs = (
            (jnp.float64, "chunked"),
            (jnp.float32, "recurrent"),
            (jnp.float32, "chunked"),
            (jnp.bfloat16, "chunked"),
        )
        worst = [
            max(
                (error, of)
                for of, error in errors(*problem(name), dtype, implementation=form).items()
            )
            for dtype, form in runs
        ]
        print(name, *(f"{error:.1e} {of}" for error, of in worst), sep=" | ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
