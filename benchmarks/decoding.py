"""Decoding speed and cache size by context length, for one row of real text, on this machine.

At the shortest context the tokens are first compared with the plain forward pass. Where the model has a multi-token
prediction module, greedy decoding with its drafts follows: same tokens, fewer trunk calls.

    python benchmarks/decoding.py [--config=configs/tiny.py] [--model=runs/tiny]

Without --model the weights are random, which costs the same time but leaves the drafts without a chance.
"""

import argparse
import dataclasses
import os
import pathlib
import runpy
import statistics
import sys
import time

import jax
import numpy as np
from flax import nnx

from qwen3next_jax import ModelConfig, Qwen3Next
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.inference import decode, speculative_generate
from qwen3next_jax.inference.cache import cache_bytes
from qwen3next_jax.load import load_model

ROOT = pathlib.Path(__file__).parents[1]
CONTEXTS = (1024, 4096, 16384)
NEW = 129  # tokens per run; the first comes with the prefill
RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.py"))
    parser.add_argument("--model", help="folder of a run or a Hugging Face directory, in place of --config's random weights")
    args = parser.parse_args()
    model = load_model(args.model).model if args.model else _random_model(args.config)
    c: ModelConfig = model.config
    kinds = "".join("A" if mixer == c.full_mixer else "r" for mixer in c.mixers)
    print(f"{args.model or args.config}: layers {kinds} (r recurrent, A attention), hidden {c.hidden_size}, {c.num_experts} experts "
          f"top-{c.num_experts_per_tok}, {c.dtype}; batch 1, greedy; {jax.devices()[0].device_kind}, {os.cpu_count()} threads, "
          f"jax {jax.__version__}", flush=True)

    print(f"{'context':>8} {'prompt tokens/s':>16} {'new tokens/s':>13} {'recurrent cache':>16} {'attention cache':>16}")
    text = _text(max(CONTEXTS), c.vocab_size)
    for context in CONTEXTS:
        if context + NEW > c.max_position_embeddings:
            print(f"{context:8} beyond max_position_embeddings = {c.max_position_embeddings}")
            continue
        if context == CONTEXTS[0]:
            _compare_with_forward(model, text[:context])
        prompt_rate, new_rate = _speed(model, text[:context])
        size = cache_bytes(c, 1, decode.cache_length([text[:context]], NEW))
        print(f"{context:8} {prompt_rate:16,.0f} {new_rate:13,.0f} {size['state']:14,} B {size['slots']:14,} B", flush=True)
    if c.mtp_depth:
        _speculate(model, text[:CONTEXTS[0]])


def _random_model(config_file: str) -> Qwen3Next:
    config = from_dict(Config, runpy.run_path(config_file)["get_config"]().to_dict()).model
    # The length limit has no part in the arithmetic; lifted, so that every context below can be measured.
    longest = max(config.max_position_embeddings, max(CONTEXTS) + NEW)
    return Qwen3Next(dataclasses.replace(config, max_position_embeddings=longest), rngs=nnx.Rngs(0))


def _text(length: int, vocab_size: int) -> np.ndarray:
    """Bytes of the Python standard library (modulo the vocabulary, where it is smaller)."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:length]
    return np.frombuffer(text, np.uint8).astype(np.int32) % vocab_size


def _compare_with_forward(model: Qwen3Next, prompt: np.ndarray) -> None:
    new = decode.complete(model, [prompt], max_new_tokens=NEW)[0]
    graphdef, params = nnx.split(model)
    whole = np.concatenate([prompt, new])[None]
    logits = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens).logits)(params, whole)[0]
    logits = np.asarray(logits)[len(prompt) - 1:-1]
    # A tie within rounding may fall either way; nothing else may differ.
    behind = np.max(logits, axis=-1) - np.take_along_axis(logits, new[:, None], axis=-1)[:, 0]
    assert np.max(behind) <= 1e-3 * np.max(np.abs(logits)), f"cached decoding differs from the forward pass at {np.argmax(behind)}"


def _speed(model: Qwen3Next, prompt: np.ndarray) -> tuple[float, float]:
    """Medians of prompt tokens/s (up to the first new token) and of new tokens/s after it."""
    decode.compile_ahead(model, [prompt], max_new_tokens=NEW)
    prompt_rates, new_rates = [], []
    for _ in range(RUNS + 1):
        tokens = decode.generate(model, [prompt], max_new_tokens=NEW)
        started = time.perf_counter()
        next(tokens)
        first = time.perf_counter()
        count = sum(1 for _ in tokens)
        prompt_rates.append(len(prompt) / (first - started))
        new_rates.append(count / (time.perf_counter() - first))
    return statistics.median(prompt_rates[1:]), statistics.median(new_rates[1:])


def _speculate(model: Qwen3Next, prompt: np.ndarray) -> None:
    plain = decode.complete(model, [prompt], max_new_tokens=NEW)[0]
    speculative_generate(model, [prompt], max_new_tokens=NEW)  # compiles
    started = time.perf_counter()
    result = speculative_generate(model, [prompt], max_new_tokens=NEW)
    seconds = time.perf_counter() - started
    same = int(np.argmin(np.append(plain == result.tokens[0], False)))
    rates = ", ".join(f"{accepted / max(proposed, 1):.2f}" for proposed, accepted in zip(result.proposed, result.accepted))
    print(f"drafting at context {len(prompt)}: {NEW / result.trunk_calls:.2f} tokens per trunk call; drafts accepted, by depth: {rates}; "
          f"{NEW / seconds:,.0f} tokens/s with the prompt's time; {same} of {NEW} tokens equal to plain decoding before the first tie")


if __name__ == "__main__":
    sys.exit(main())
