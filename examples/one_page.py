"""Qwen3-Next on one page: the model, its loss, its training and sampling, in plain JAX.

    python examples/one_page.py [STEPS]

It trains 2.7 million parameters on the source code of Python's standard library, as
configs/tiny.py does, and then generates some code. The parameters have the names and shapes of the
package's, and a test compares logits, losses, gradients and updates with the package's. The package
adds speed (kernels, experts that compute only their own tokens, many devices) and runs that resume
after an interruption. Numbers such as 2412.06464 are identifiers of papers on arXiv.

Letters: B rows, T tokens of a row, D width of the model, V vocabulary; N query heads, M key/value
heads, K width of a head; G key heads and H value heads of a recurrent layer; E experts, A experts
that a token uses, I width of an expert; C tokens of a chunk.
"""

import pathlib
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

END = 256  # the token that ends a document


@dataclass(frozen=True)
class Config:
    vocab_size: int = 257  # bytes, and the end of a document
    hidden_size: int = 128
    num_layers: int = 4
    full_attention_interval: int = 4  # every fourth layer is attention, the others are recurrent
    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 8  # the number of a head's dimensions that are rotated by the position
    rope_theta: float = 1e7
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 32
    conv_width: int = 4
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    shared_expert_width: int = 128
    mtp_depth: int = 1  # how many tokens after the next one are predicted as well
    norm_eps: float = 1e-6
    mtp_loss_weight: float = 0.1
    balance_loss_weight: float = 0.001


def init_params(config: Config, key: jax.Array) -> dict:
    """Draws matrices from N(0, 0.02²). Norms multiply by 1 + w, and their weights w start at 0."""
    c, keys = config, iter(jax.random.split(key, 1000))
    matrix = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    uniform = lambda low, high, n: jax.random.uniform(next(keys), (n,), minval=low, maxval=high)
    d, every = c.hidden_size, c.full_attention_interval

    def recurrent():
        g, h, k = c.linear_key_heads, c.linear_value_heads, c.linear_head_dim
        r = h // g  # value heads of a key head
        step = jnp.exp(uniform(jnp.log(1e-3), jnp.log(0.1), h))
        return {
            "in_proj_qkvz": matrix(d, g, 2 * k + 2 * r * k),  # q, k, r values, r output gates z
            "in_proj_ba": matrix(d, g, 2 * r),  # of r write strengths and r decays
            "conv_kernel": matrix(c.conv_width, g, 2 * k + r * k),
            "a_log": jnp.log(uniform(1e-4, 16.0, h)),
            "dt_bias": step + jnp.log(-jnp.expm1(-step)),  # softplus(dt_bias) is `step`
            "norm": jnp.ones(k),  # the only norm that multiplies by its weight itself
            "out_proj": matrix(h, k, d),
        }

    def attention():
        n, m, k = c.num_heads, c.num_key_value_heads, c.head_dim
        return {
            "q_proj": matrix(d, n, 2 * k),  # the query and the gate of its head
            "k_proj": matrix(d, m, k),
            "v_proj": matrix(d, m, k),
            "q_norm": jnp.zeros(k),
            "k_norm": jnp.zeros(k),
            "o_proj": matrix(n, k, d),
        }

    def layer(mixer):
        e, i, s = c.num_experts, c.expert_width, c.shared_expert_width
        return {
            "mixer_norm": jnp.zeros(d),
            "mixer": mixer(),
            "mlp_norm": jnp.zeros(d),
            "mlp": {
                "router": matrix(d, e),
                "expert_gate_up": matrix(e, d, 2, i),
                "expert_down": matrix(e, i, d),
                "shared_gate_up": matrix(d, 2, s),
                "shared_down": matrix(s, d),
                "shared_gate": matrix(d),
            },
        }

    mixers = [recurrent if i % every else attention for i in range(1, 1 + c.num_layers)]
    return {
        "embedding": matrix(c.vocab_size, d),
        "layers": [layer(mixer) for mixer in mixers],
        "final_norm": jnp.zeros(d),
        "head": matrix(d, c.vocab_size),
        "mtp": {
            "embedding_norm": jnp.zeros(d),
            "hidden_norm": jnp.zeros(d),
            "fc": matrix(2 * d, d),
            "block": layer(attention),
            "norm": jnp.zeros(d),
        },
    }


def rms_norm(x, scale, config):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps) * scale


def swiglu(gate_up):
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def delta_rule(q, k, v, log_decay, beta, starts):
    """The gated delta rule (2412.06464), token by token. The state S [B, H, K, K] maps keys to
    values. S decays; then the value that S holds for the key k moves towards v by the share β. A
    document begins with S = 0. This function is for reading; the model uses `delta_rule_in_chunks`.
    q, k, v: [B, T, H, K]; log_decay, beta: [B, T, H]; starts: [B, T] bool. Returns o [B, T, H, K].
    """
    decay = jnp.where(starts[..., None], 0.0, jnp.exp(log_decay))

    def step(state, token):
        q, k, v, decay, beta = token
        state = state * decay[..., None, None]
        error = v - jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state + jnp.einsum("bh,bhk,bhv->bhkv", beta, k, error)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    b, _, h, width = q.shape
    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta)]
    _, o = jax.lax.scan(step, jnp.zeros((b, h, width, width)), tokens)
    return jnp.moveaxis(o, 0, 1)


def delta_rule_in_chunks(q, k, v, log_decay, beta, starts, chunk=64):
    """The gated delta rule, for C tokens at a time. A token's write, β times the error, depends on
    earlier writes of the chunk, so a chunk's writes solve a triangular system. T ≤ C or T = n · C.
    """
    b, t, h, width = q.shape
    chunk = min(chunk, t)
    in_chunks = lambda x: jnp.moveaxis(x.reshape(b, t // chunk, chunk, *x.shape[2:]), 1, 0)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))

    def step(state, tokens):
        q, k, v, log_decay, beta, starts = tokens
        total = jnp.cumsum(log_decay, axis=1)  # [B, C, H] from the chunk's start
        document = jnp.cumsum(starts, axis=1)[..., None]  # [B, C, 1], 0: began in an earlier chunk
        same = lower & (document == document.swapaxes(1, 2))  # [B, C, C] j ≤ i, in one document
        # The exponent is masked, not the power: above the diagonal it could overflow.
        gap = total[:, :, None] - total[:, None]
        pair_decay = jnp.exp(jnp.where(same[..., None], gap, -jnp.inf))  # decay from j to i
        start_decay = jnp.exp(total) * (document == 0)  # [B, C, H] from before the chunk to i
        end_decay = pair_decay[:, -1]  # [B, C, H] from j to the chunk's end
        overlap = jnp.einsum("bihk,bjhk,bijh,bih->bhij", k, k, pair_decay, beta)
        system = jnp.eye(chunk) + jnp.where(jnp.eye(chunk, dtype=bool), 0, overlap)
        held = start_decay[..., None] * jnp.einsum("bihk,bhkv->bihv", k, state)
        rhs = beta[..., None] * (v - held)
        solve = partial(jax.scipy.linalg.solve_triangular, lower=True, unit_diagonal=True)
        writes = solve(system, jnp.moveaxis(rhs, 2, 1))  # [B, H, C, K]
        scores = jnp.einsum("bihk,bjhk,bijh->bhij", q, k, pair_decay)
        o = start_decay[..., None] * jnp.einsum("bihk,bhkv->bihv", q, state)
        o = o + jnp.einsum("bhij,bhjv->bihv", scores, writes)
        state = start_decay[:, -1, :, None, None] * state
        return state + jnp.einsum("bjhk,bjh,bhjv->bhkv", k, end_decay, writes), o

    chunks = [in_chunks(x) for x in (q, k, v, log_decay, beta, starts)]
    _, o = jax.lax.scan(step, jnp.zeros((b, h, width, width)), chunks)
    return jnp.moveaxis(o, 0, 1).reshape(b, t, h, width)


def gated_deltanet(p, x, segments, config):
    """Projections → causal convolution and SiLU → gated delta rule → norm and gate → projection."""
    c, (b, t, _) = config, x.shape
    g, h, k = c.linear_key_heads, c.linear_value_heads, c.linear_head_dim
    qkvz = jnp.einsum("btd,dgc->btgc", x, p["in_proj_qkvz"])
    qkv, z = jnp.split(qkvz, [2 * k + h // g * k], axis=-1)
    # Convolution over the last tokens of the document, by channel; the last tap is t's own.
    mixed = 0.0
    for back in range(c.conv_width):
        earlier = jnp.pad(qkv, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :t]
        inside = jnp.pad(segments, ((0, 0), (back, 0)))[:, :t] == segments
        mixed += jnp.where(inside[..., None, None], earlier, 0) * p["conv_kernel"][-1 - back]
    q, key, v = jnp.split(jax.nn.silu(mixed), [k, 2 * k], axis=-1)
    # A key head serves several value heads. Queries and keys get length 1, then queries K^-1/2.
    unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    q, key = (jnp.repeat(unit(x), h // g, axis=2) for x in (q, key))
    beta_logit, rate = jnp.split(jnp.einsum("btd,dgr->btgr", x, p["in_proj_ba"]), 2, axis=-1)
    beta = jax.nn.sigmoid(beta_logit).reshape(b, t, h)
    log_decay = -jnp.exp(p["a_log"]) * jax.nn.softplus(rate.reshape(b, t, h) + p["dt_bias"])
    starts = jnp.pad(segments, ((0, 0), (1, 0)))[:, :t] != segments
    o = delta_rule_in_chunks(q * k**-0.5, key, v.reshape(b, t, h, k), log_decay, beta, starts)
    o = rms_norm(o, p["norm"], c) * jax.nn.silu(z.reshape(b, t, h, k))
    return jnp.einsum("bthv,hvd->btd", o, p["out_proj"])


def gated_attention(p, x, segments, config):
    """Grouped-query attention inside each document; a sigmoid gates its output (2505.06708)."""
    c, t = config, x.shape[1]
    q, gate = jnp.split(jnp.einsum("btd,dnk->btnk", x, p["q_proj"]), 2, axis=-1)
    k, v = (jnp.einsum("btd,dmk->btmk", x, p[name]) for name in ("k_proj", "v_proj"))
    q = rotate(rms_norm(q, 1 + p["q_norm"], c), segments, c)
    k = rotate(rms_norm(k, 1 + p["k_norm"], c), segments, c)
    k, v = (jnp.repeat(x, c.num_heads // c.num_key_value_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("bink,bjnk->bnij", q, k) * c.head_dim**-0.5
    sees = jnp.tril(jnp.ones((t, t), bool)) & (segments[:, :, None] == segments[:, None])
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), axis=-1)
    o = jnp.einsum("bnij,bjnk->bink", weights, v) * jax.nn.sigmoid(gate)
    return jnp.einsum("btnk,nkd->btd", o, p["o_proj"])


def rotate(x, segments, config):
    """Rotary positions (2104.09864), counted from the start of each document."""
    index = jnp.arange(x.shape[1])
    starts = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1] != segments
    position = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    half = config.rotary_dim // 2
    angle = position[..., None] * config.rope_theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def mixture_of_experts(p, x, counted, config):
    """Each token goes through its A likeliest experts and a shared expert. Here every expert
    computes every token, with weight 0 if the token did not choose it. Also returns sums over the
    `counted` tokens [B, T]: of each expert's choices, of its probability, and the tokens' number.
    """
    probability = jax.nn.softmax(x @ p["router"], axis=-1)  # [B, T, E]
    best, chosen = jax.lax.top_k(probability, config.experts_per_token)
    is_chosen = jax.nn.one_hot(chosen, config.num_experts)  # [B, T, A, E]
    weight = jnp.einsum("bta,btae->bte", best / best.sum(axis=-1, keepdims=True), is_chosen)
    hidden = swiglu(jnp.einsum("btd,edci->bteci", x, p["expert_gate_up"]))
    y = jnp.einsum("bte,btei,eid->btd", weight, hidden, p["expert_down"])
    shared = swiglu(jnp.einsum("btd,dci->btci", x, p["shared_gate_up"])) @ p["shared_down"]
    y = y + jax.nn.sigmoid(x @ p["shared_gate"])[..., None] * shared
    chosen_often = jnp.einsum("btae,bt->e", is_chosen, counted)
    return y, (chosen_often, jnp.einsum("bte,bt->e", probability, counted), counted.sum())


def balance_loss(statistics, config):
    """Σ load · mean probability over a router's experts, which is 1 for even load (2101.03961)."""
    chosen_often, probability, tokens = statistics
    tokens = jnp.maximum(tokens, 1)
    load = chosen_often * config.num_experts / (tokens * config.experts_per_token)
    return jnp.sum(jax.lax.stop_gradient(load) * probability) / tokens


def decoder_layer(p, x, segments, counted, config):
    mixer = gated_deltanet if "conv_kernel" in p["mixer"] else gated_attention
    x = x + mixer(p["mixer"], rms_norm(x, 1 + p["mixer_norm"], config), segments, config)
    y = rms_norm(x, 1 + p["mlp_norm"], config)
    y, statistics = mixture_of_experts(p["mlp"], y, counted, config)
    return x + y, statistics


def forward(params, tokens, segments, config):
    """Runs the model on packed rows, tokens and segments [B, T]: a row has the segments 1, 2, … for
    its documents, and 0 for padding at its end. Returns a list of logits [B, T, V], of token t + 1
    at position t, then of t + 2, … for each depth of multi-token prediction; and the mean balance
    loss.
    """
    c, embedded = config, params["embedding"][tokens]
    x, statistics = embedded, []
    for p in params["layers"]:
        x, of_layer = decoder_layer(p, x, segments, (segments > 0) * 1.0, c)
        statistics.append(of_layer)
    hidden = rms_norm(x, 1 + params["final_norm"], c)
    logits = [hidden @ params["head"]]
    # Multi-token prediction (2412.19437): one more layer joins the normed output with the embedding
    # of the next token, and predicts the token after it. Deeper, it reads its own output.
    # At a document's end the next token is of another document, and at a row's end of the row's
    # start: neither loss nor router counts such positions.
    p, of_depths = params["mtp"], []
    for depth in range(c.mtp_depth):
        following = rms_norm(jnp.roll(embedded, -(1 + depth), axis=1), 1 + p["embedding_norm"], c)
        hidden = rms_norm(hidden, 1 + p["hidden_norm"], c)  # a second norm, with weights of its own
        x = jnp.concatenate([following, hidden], axis=-1) @ p["fc"]
        counted = has_target(segments, 2 + depth) * 1.0
        x, of_depth = decoder_layer(p["block"], x, segments, counted, c)
        of_depths.append(of_depth)
        hidden = rms_norm(x, 1 + p["norm"], c)
        logits.append(hidden @ params["head"])
    if of_depths:  # one router for all depths
        statistics.append(jax.tree.map(lambda *x: sum(x), *of_depths))
    return logits, sum(balance_loss(one, c) for one in statistics) / len(statistics)


def has_target(segments, offset):
    """Whether the token `offset` positions later belongs to the same document, [B, T] bool."""
    later = jnp.pad(segments[:, offset:], ((0, 0), (0, offset)))
    return (segments > 0) & (later == segments)


def training_loss(params, tokens, segments, config):
    """Returns the training loss, and the cross-entropy of the next token in nats."""
    logits, balance = forward(params, tokens, segments, config)
    losses = []
    for offset, predicted in enumerate(logits, start=1):
        later = jnp.roll(tokens, -offset, axis=1)
        of_token = jnp.take_along_axis(predicted, later[..., None], axis=-1)[..., 0]
        counts = has_target(segments, offset)
        nll = (jax.nn.logsumexp(predicted, axis=-1) - of_token) * counts
        losses.append(nll.sum() / jnp.maximum(counts.sum(), 1))
    next_token, *mtp = losses
    total = next_token + config.mtp_loss_weight * sum(mtp) / max(len(mtp), 1)
    return total + config.balance_loss_weight * balance, next_token


def learning_rate(step, steps, peak=3e-3, warmup=50):
    """Rises linearly to the peak, then falls along a cosine to a tenth of the peak."""
    cosine = (1 + jnp.cos(jnp.pi * (step - warmup) / jnp.maximum(steps - 1 - warmup, 1))) / 2
    return peak * jnp.where(step < warmup, (step + 1) / warmup, 0.1 + 0.9 * cosine)


def adamw(params, gradients, means, squares, step, rate, b1=0.9, b2=0.95, decay=0.1):
    """One step of AdamW (1711.05101), with gradients clipped to a global norm of 1."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradients)
    means = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, means, gradients)
    squares = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, squares, gradients)

    def update(path, p, m, s):
        direction = (m / (1 - b1 ** (step + 1))) / (jnp.sqrt(s / (1 - b2 ** (step + 1))) + 1e-8)
        decays = path[-1].key not in ("a_log", "dt_bias")  # all else does, norms too
        return p - rate * (direction + (decay * p if decays else 0.0))

    return jax.tree_util.tree_map_with_path(update, params, means, squares), means, squares


def pack(documents, length, seed=0):
    """Cuts documents into pieces, shuffles the pieces, and fills one row [length] after another."""
    whole = [np.append(np.frombuffer(text, np.uint8).astype(np.int32), END) for text in documents]
    pieces = [ids[i : i + length] for ids in whole for i in range(0, len(ids), length)]
    tokens, segments = np.zeros((2, len(pieces), length), np.int32)
    row = used = document = 0
    for i in np.random.default_rng(seed).permutation(len(pieces)):
        if used + len(pieces[i]) > length:
            row, used, document = row + 1, 0, 0
        place, document = slice(used, used + len(pieces[i])), document + 1
        tokens[row, place], segments[row, place] = pieces[i], document
        used = place.stop
    return tokens[: row + 1], segments[: row + 1]


def sample(params, prompt, config, length=256, seed=0, temperature=0.8):
    """Continues a prompt to `length` bytes (whole chunks of 64), a forward pass for each byte."""

    @jax.jit
    def next_byte(params, tokens, end, key):
        logits = forward(params, tokens[None], (jnp.arange(length) < end)[None] * 1, config)[0][0]
        return jax.random.categorical(key, logits[0, end - 1] / temperature)

    ids = list(prompt.encode())
    for key in jax.random.split(jax.random.key(seed), length - len(ids)):
        row = np.array(ids + [0] * (length - len(ids)))
        ids.append(int(next_byte(params, row, len(ids), key)))
        if ids[-1] == END:
            break
    return bytes(i for i in ids if i != END).decode(errors="replace")


def main(steps):
    config, rows = Config(), 8
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    tokens, segments = pack([path.read_bytes() for path in sorted(library.glob("*.py"))], 256)
    params = init_params(config, jax.random.key(0))
    means = squares = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def train_step(params, means, squares, step, tokens, segments):
        gradients, loss = jax.grad(training_loss, has_aux=True)(params, tokens, segments, config)
        rate = learning_rate(step, steps)
        return *adamw(params, gradients, means, squares, step, rate), loss

    draw, begun = np.random.default_rng(1), time.time()
    for step in range(steps):
        batch = draw.integers(len(tokens), size=rows)
        state = params, means, squares, step
        params, means, squares, loss = train_step(*state, tokens[batch], segments[batch])
        if (step + 1) % 20 == 0 or step + 1 == steps:
            bits, seconds = loss / np.log(2), time.time() - begun
            print(f"step {step + 1}: {bits:.3f} bits a token, {seconds:.0f} s", flush=True)
    print(sample(params, "def ", config))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
