"""Measures decoding on this machine: speed and cache size by context length, drafting, and
transformers for comparison.

    python benchmarks/inference/decoding.py [--part=contexts] [--contexts=1024,4096,…]
    python benchmarks/inference/decoding.py --part=drafting --model=runs/tiny
    python benchmarks/inference/decoding.py --part=rounds --model=runs/tiny
    python benchmarks/inference/decoding.py --part=replay --model=runs/tiny
    python benchmarks/inference/decoding.py --part=memory [--length=262144]
    python benchmarks/inference/decoding.py --part=transformers --model=runs/tiny
        --python=/path/to/python/with/torch

contexts: throughput of prefill and of decoding, and bytes of cache, of one row. It compares three
    models with random weights and the same number of parameters: three recurrent layers to one of
    attention, attention alone, and recurrent layers alone; the width of the experts makes up for
    the difference.
drafting: `speculative` = 1 … against plain decoding, greedy, in turns, with 1 and 8 rows; it ends
    with an error if the tokens differ. "A round, in plain steps" is how many tokens a pass has to
    give for drafts to pay; with --config (random weights, whose drafts are rejected) only that.
rounds: the time of a round of drafting, and of its parts alone: verifying and drafting, each in a
    loop of one program, from position 64 on.
replay: the time of undoing a rejected draft: with the recurrent states returned after each of K+1
    tokens, or by running 2K+1 tokens again.
memory: a prompt of that length goes through a small model in chunks; the growth of the process's
    peak memory.
transformers: greedy generation by both from the same weights, in turns; tokens per CPU second.
"""

import argparse
import dataclasses
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import harness
from qwen3next_jax import ModelConfig, Qwen3Next, save_hf
from qwen3next_jax.commands import process_setup
from qwen3next_jax.inference import plain, speculative
from qwen3next_jax.inference.cache import cache_bytes_by_kind, roll_back_cache
from qwen3next_jax.inference.decode import cache_length, concatenate_tokens_by_row, generate
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.model.flops import parameter_counts
from qwen3next_jax.trained.load import load_model

NEW = 129  # tokens per run; the first comes with the prefill
LONG = 2**15


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--part",
        choices=("contexts", "drafting", "rounds", "replay", "memory", "transformers"),
        default="contexts",
    )
    parser.add_argument("--config", default=str(harness.ROOT / "configs" / "tiny.py"))
    parser.add_argument(
        "--model",
        help="folder of a run or a Hugging Face directory, in place of --config's random weights",
    )
    parser.add_argument("--contexts", default="1024,4096,16384,65536")
    parser.add_argument("--length", type=int, default=262_144)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--python", help="interpreter with torch and transformers")
    args = parser.parse_args()
    process_setup.keep_freed_memory()  # as the commands do
    print(
        f"{args.part}: {args.model or pathlib.Path(args.config).name}, greedy; "
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} threads, jax {jax.__version__}",
        flush=True,
    )
    globals()[f"_{args.part}"](args)


def _config(args: argparse.Namespace, **changes) -> ModelConfig:
    config = harness.load_config(args.config).model
    # The length limit has no part in the arithmetic; lifted, so that every context can be measured.
    return dataclasses.replace(config, max_position_embeddings=2**20, **changes)


def _random(config: ModelConfig) -> Qwen3Next:
    return nnx.jit(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))()


def _model(args: argparse.Namespace) -> Qwen3Next:
    return load_model(args.model).model if args.model else _random(_config(args))


def _prompts(rows: int, length: int, vocab_size: int) -> list[np.ndarray]:
    """Bytes of the Python standard library (modulo the vocabulary, where it is smaller), every
    row from another place.
    """
    text = b"".join(
        file.read_bytes() for file in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    )
    tokens = np.frombuffer(text, np.uint8).astype(np.int32) % vocab_size
    return [np.resize(np.roll(tokens, -10_000 * row), length) for row in range(rows)]


def _timed(model: Qwen3Next, prompts: list[np.ndarray], new: int, **options):
    """→ (tokens of every row, seconds to the first piece, seconds and CPU seconds of the rest,
    its tokens, stream).
    """
    stream = generate(model, prompts, max_new_tokens=new, **options)
    started = time.perf_counter()
    pieces = [next(stream)]
    first, cpu = time.perf_counter(), time.process_time()
    pieces += stream
    seconds, cpu = time.perf_counter() - first, time.process_time() - cpu
    return (
        concatenate_tokens_by_row(pieces, len(prompts)),
        first - started,
        seconds,
        cpu,
        sum(len(t) for piece in pieces[1:] for t in piece),
        stream,
    )


# ---- contexts
# --------------------------------------------------------------------------------------------------


def _contexts(args: argparse.Namespace) -> None:
    hybrid = _config(args, mtp_depth=0)
    forms = {
        "hybrid 3:1": hybrid,
        "attention": _of_equal_size(hybrid, full_attention_interval=1),
        "recurrent": _of_equal_size(hybrid, full_attention_interval=0),
    }
    print(
        f"{'':12} {'parameters':>10} {'context':>8} {'prompt tokens/s':>16} {'ms/new token':>13} "
        f"{'states, bytes':>14} {'slots, bytes':>14}"
    )
    for context in map(int, args.contexts.split(",")):
        for name, config in forms.items():
            model, prompts = _random(config), _prompts(1, context, config.vocab_size)
            if context == min(map(int, args.contexts.split(","))):
                _compare_with_forward(model, prompts[0])
            # A run as long as these takes minutes, and has no need of one before it.
            runs = (
                [_timed(model, prompts, NEW) for _ in range(args.runs + 1)][1:]
                if context < LONG
                else [_timed(model, prompts, NEW)]
            )
            prefill, step = (
                statistics.median(values)
                for values in zip(*((context / run[1], 1e3 * run[2] / run[4]) for run in runs))
            )
            size = cache_bytes_by_kind(config, 1, cache_length(prompts, NEW))
            print(
                f"{name:12} {parameter_counts(config).total:10,} {context:8} {prefill:16,.0f} "
                f"{step:13.3f} {size['state']:14,} {size['slots']:14,}",
                flush=True,
            )


def _of_equal_size(like: ModelConfig, **changes) -> ModelConfig:
    """With the experts' width that brings the parameters nearest to those of `like`."""
    wanted = parameter_counts(like).total
    configs = [
        dataclasses.replace(like, moe_intermediate_size=width, **changes)
        for width in range(8, 2 * like.moe_intermediate_size)
    ]
    return min(configs, key=lambda config: abs(parameter_counts(config).total - wanted))


def _compare_with_forward(model: Qwen3Next, prompt: np.ndarray) -> None:
    (new,), *_ = _timed(model, [prompt], NEW)
    graphdef, params = nnx.split(model)
    whole = np.concatenate([prompt, new])[None]
    logits = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens).logits)(
        params, whole
    )[0]
    logits = np.asarray(logits)[len(prompt) - 1 : -1]
    # A tie within rounding may fall either way; nothing else may differ.
    behind = np.max(logits, axis=-1) - np.take_along_axis(logits, new[:, None], axis=-1)[:, 0]
    assert np.max(behind) <= 1e-3 * np.max(np.abs(logits)), (
        f"cached decoding differs from the forward pass at {np.argmax(behind)}"
    )


# ---- drafting
# --------------------------------------------------------------------------------------------------


def _drafting(args: argparse.Namespace) -> None:
    model, new = _model(args), args.new
    for batch in (1, 8):
        prompts = _prompts(batch, 300, model.config.vocab_size)
        rates: dict[int, list[tuple[float, float]]] = {k: [] for k in range(5)}
        for turn in range(args.runs + 1):
            for k in rates:
                tokens, _, seconds, cpu, count, stream = _timed(model, prompts, new, speculative=k)
                if k == 0:
                    expected = tokens
                assert all(np.array_equal(a, b) for a, b in zip(tokens, expected)), (
                    f"{k} drafts: other tokens than plain decoding"
                )
                if turn:
                    rates[k].append((count / seconds, count / cpu))
                    told = stream if turn == args.runs else None
                if turn == args.runs:
                    (wall, cpu), (plain_wall, plain_cpu) = (
                        np.median(rates[i], axis=0) for i in (k, 0)
                    )
                    a_pass, by_depth = (
                        told.tokens / told.passes,
                        ", ".join(f"{x:.2f}" for x in told.accepted / np.maximum(told.drafted, 1)),
                    )
                    print(
                        f"batch {batch}, {k} drafts: {wall:7,.0f} tokens/s, "
                        f"{wall / plain_wall:.2f} × plain (per CPU second "
                        f"{cpu / plain_cpu:.2f} ×); {a_pass:.2f} tokens per trunk pass, a round "
                        f"costs {a_pass * plain_wall / wall:.2f} plain steps; accepted by depth "
                        f"{by_depth or '–'}",
                        flush=True,
                    )
        for k in range(1, 5 if batch > 1 else 1):
            rounds = [_timed(model, [prompt], new, speculative=k)[-1].passes for prompt in prompts]
            print(
                f"batch {batch}, {k} drafts: alone its rows take {min(rounds)} … {max(rounds)} "
                f"rounds, {np.mean(rounds):.0f} on average; "
                "together all run until the last has ended",
                flush=True,
            )


def _rounds(args: argparse.Namespace) -> None:
    model, rounds = _model(args), 32
    graphdef, params = nnx.split(model)
    number, nothing, greedy = (
        Sampling(*map(np.float32, Sampling()))._replace(top_k=np.int32(0)),
        np.zeros(0, np.int32),
        (None, True, False),
    )

    def program(batch: int, drafts: int, part: str):
        form = speculative if drafts else plain
        options = dict(drafts=drafts, greedy=True) if drafts else {}

        def verify(model, carry):
            state, hidden_BJD = carry
            new_BJ, accepted_B, _, cache = speculative._verify_drafts(
                model, *greedy, state, number, np.uint32(0)
            )
            return state._replace(
                cache=cache,
                drafts=new_BJ[:, 1:],
                pending_position=state.pending_position + 1 + 0 * accepted_B,
            ), hidden_BJD

        def draft(model, carry):
            state, hidden_BJD = carry
            new_BJ = jnp.concatenate((state.pending_token[:, None], state.drafts), axis=1)
            state = speculative._draft_next_tokens(
                model,
                *greedy,
                state,
                hidden_BJD,
                new_BJ,
                state.drafts[:, 0] % (drafts + 1),
                number,
                np.uint32(0),
            )
            return state._replace(
                pending_position=state.pending_position + 1
            ), hidden_BJD + 1e-3 * state.drafts[:, :1, None]

        def run(params, state):
            model = nnx.merge(graphdef, params)
            if part == "whole":
                return form.advance(model, *greedy, state, rounds, nothing, number, np.uint32(0))[0]
            hidden_BJD = jnp.ones((batch, drafts + 1, model.config.hidden_size), model.config.dtype)
            one = {"verify": verify, "draft": draft}[part]
            return jax.lax.fori_loop(
                0, rounds, lambda _, carry: one(model, carry), (state, hidden_BJD)
            )[0]

        start = lambda: form.init_state(
            model, 512, *(jnp.full(batch, n, jnp.int32) for n in (32, 64, 10**6)), **options
        )
        run = jax.jit(run, donate_argnums=1).lower(params, start()).compile()

        def seconds() -> float:
            state = jax.block_until_ready(start())
            started = time.perf_counter()
            jax.block_until_ready(run(params, state))
            return time.perf_counter() - started

        return seconds

    for batch in (1, 8):
        parts = [
            (0, "whole"),
            *((k, part) for k in (1, 2) for part in ("whole", "verify", "draft")),
        ]
        programs = {of: program(batch, *of) for of in parts}
        taken = {of: [] for of in parts}
        for _ in range(8 * args.runs):
            for of, seconds in programs.items():
                taken[of].append(seconds())
        step = min(taken[0, "whole"])
        for (drafts, part), values in taken.items():
            name = f"{drafts} drafts, {part}" if drafts else "a plain step"
            print(
                f"batch {batch}, {name:16} {1e6 * min(values) / rounds:7.0f} µs (median "
                f"{1e6 * statistics.median(values) / rounds:.0f}), "
                f"{min(values) / step:.2f} plain steps",
                flush=True,
            )


def _replay(args: argparse.Namespace) -> None:
    model, steps = _model(args), 32
    graphdef, params = nnx.split(model)

    def program(batch: int, size: int, each: bool):
        def run(params, cache, tokens_BT):
            model = nnx.merge(graphdef, params)

            def step(i, carry):
                cache, tokens_BT = carry
                positions_BT = i * size + jnp.broadcast_to(
                    jnp.arange(size, dtype=jnp.int32), (batch, size)
                )
                hidden_BTD, cache = model.decode(
                    tokens_BT, positions_BT, cache, return_all_states=each
                )
                if each:
                    cache = roll_back_cache(model.config, cache, jnp.full(batch, size - 1))
                return cache, (
                    tokens_BT + jnp.argmax(model.logits(hidden_BTD), axis=-1)
                ) % model.config.vocab_size

            return jax.lax.fori_loop(0, steps, step, (cache, tokens_BT))[0]

        run, tokens = jax.jit(run), np.stack(_prompts(batch, size, model.config.vocab_size))
        return lambda: jax.block_until_ready(run(params, model.init_cache(batch, 512), tokens))

    for batch in (1, 8):
        forms = {"plain step": program(batch, 1, False)}
        for k in (1, 2, 3):
            forms |= {
                f"{k} drafts, states kept": program(batch, k + 1, True),
                f"{k} drafts, run again": program(batch, 2 * k + 1, False),
            }
        seconds = {name: [] for name in forms}
        for turn in range(4 * args.runs + 1):
            for name, run in forms.items():
                started = time.perf_counter()
                run()
                seconds[name] += [time.perf_counter() - started] * (turn > 0)
        for name, values in seconds.items():
            print(
                f"batch {batch}, {name:22} {1e6 * min(values) / steps:7.0f} µs a pass (median "
                f"{1e6 * statistics.median(values) / steps:.0f})",
                flush=True,
            )


# ---- memory
# --------------------------------------------------------------------------------------------------


def _memory(args: argparse.Namespace) -> None:
    config = _config(
        args,
        mtp_depth=0,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=64,
    )
    model = _random(config)
    for length in (args.length // 16, args.length):
        prompts = _prompts(1, length, config.vocab_size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _, first, *_ = _timed(model, prompts, 2)
        size = cache_bytes_by_kind(config, 1, cache_length(prompts, 2))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"prompt of {length:,} tokens: {first:.1f} s; cache {sum(size.values()) / 2**20:.1f} "
            "MiB; peak memory of the process grew by "
            f"{(peak - before) / 2**10:.0f} MiB to {peak / 2**10:.0f} MiB",
            flush=True,
        )


# ---- transformers
# ------------------------------------------------------------------------------------------------


def _transformers(args: argparse.Namespace) -> None:
    model, new = _model(args), 128
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, f"{folder}/model")
        peer = harness.Peer(args.python, "generate", f"{folder}/model")
        print("transformers {transformers}, torch {torch}".format(**peer.versions), flush=True)
        for batch in (1, 8):
            prompts = _prompts(batch, 64, model.config.vocab_size)
            ours, theirs = [], []
            for _ in range(args.runs + 1):
                stream = generate(model, prompts, max_new_tokens=new)
                cpu = time.process_time()
                tokens = concatenate_tokens_by_row(stream, batch)
                ours.append(batch * new / (time.process_time() - cpu))
                answer = peer.ask(prompts=[prompt.tolist() for prompt in prompts], new=new)
                same = [
                    int(np.argmin(np.append(a == np.array(b), False)))
                    for a, b in zip(tokens, answer["tokens"])
                ]
                assert min(same) == new, f"transformers' tokens differ from {min(same)} on"
                theirs.append(batch * new / answer["cpu"])
            ours, theirs = (statistics.median(values[1:]) for values in (ours, theirs))
            print(
                f"batch {batch}: {ours:,.0f} tokens per CPU second, transformers {theirs:,.0f}: "
                f"{ours / theirs:.1f} ×; same {new} tokens in every row",
                flush=True,
            )
        peer.close()


if __name__ == "__main__":
    sys.exit(main())
