"""Continues a prompt with a trained model, streaming to the terminal.

    python -m qwen3next_jax.generate --model=WORKDIR_OR_HF_DIR --prompt="def "

Standard output gets one whole text, the prompt and its continuation. Standard error gets the figures.
"""

import math
import os
import sys
import time
from collections.abc import Iterator

from absl import flags

from qwen3next_jax import cli
from qwen3next_jax.errors import UserError


def main() -> int:
    text = _prompt_text()
    if not _model.value:
        raise UserError("--model is missing: expected the folder of a run or a Hugging Face directory")
    if not math.isfinite(_temperature.value):
        raise UserError(f"--temperature={_temperature.value}: expected a finite number")
    context = cli.check_model("model", _model.value).context_length
    if _max_new_tokens.value >= context:
        raise UserError(f"--max_new_tokens={_max_new_tokens.value}: expected less than the model's context, {context}")
    loading = get_loading()
    cli.enable_compilation_cache()
    # Imported here, so that a mistyped flag is answered at once.
    from qwen3next_jax.load import joined

    with joined(loading.launch, _model.value):
        return _continue(text, loading)


def _continue(text: str, loading: cli.Loading) -> int:
    from qwen3next_jax.inference import decode
    from qwen3next_jax.inference.cache import cache_bytes
    from qwen3next_jax.inference.streaming import DecodeStream
    from qwen3next_jax.load import load_model

    model, tokenizer, _, places, _ = load_model(_model.value, None, loading.mesh, loading.dtype or "float32")
    if tokenizer is None:
        raise UserError(f"{_model.value}: no tokenizer.json there: put the model's own beside its config.json")
    prompt = tokenizer.encode(text)
    request = dict(max_new_tokens=_max_new_tokens.value, temperature=_temperature.value,
                   stop_ids=sorted({tokenizer.eos_id, model.config.eos_token_id} - {-1}))
    tokens_B = decode.generate(model, [prompt], seed=_seed.value, mesh=places, **request)

    started = time.perf_counter()
    print("compiling, or loading what an earlier start compiled …", file=sys.stderr, flush=True)
    if places is None:
        decode.compile_ahead(model, [prompt], **request)
    times = [time.perf_counter()]
    try:
        for piece in _pieces(text, prompt, (int(token) for (token,) in tokens_B), DecodeStream(tokenizer), times):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print(flush=True)
    except BrokenPipeError:  # the reader (`| head`) has seen enough; keep Python from flushing into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print()
    size = cache_bytes(model.config, 1, decode.cache_length([prompt], _max_new_tokens.value))
    print(f"compiled or loaded in {times[0] - started:.1f} s · {_speed(len(prompt), times)} · cache {_bytes(sum(size.values()))} "
          f"(states {_bytes(size['state'])}, slots {_bytes(size['slots'])})", file=sys.stderr)
    return 0


def _prompt_text() -> str:
    text = _prompt.value
    if not text:
        raise UserError("--prompt is missing or empty: expected a text to continue, such as --prompt='def '")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8 at character {error.start}: expected text") from error
    return text


def _pieces(text: str, prompt, tokens: Iterator[int], stream, times: list[float]) -> Iterator[str]:
    """The text in pieces as they complete, the prompt first; appends to `times` when each token came."""
    yield text
    for token in prompt:
        stream.add(token)
    for token in tokens:
        times.append(time.perf_counter())
        yield stream.add(token)
    yield stream.end()


def _speed(prompt_tokens: int, times: list[float]) -> str:
    """`times`: when decoding began, then when each token came."""
    text = f"prompt of {prompt_tokens} tokens"
    if len(times) > 1:
        text += f" and first new one in {times[1] - times[0]:.3f} s"
    if len(times) > 2:
        text += f" · then {len(times) - 2} tokens at {(len(times) - 2) / (times[-1] - times[1]):,.0f} tokens/s"
    return text


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


_model = flags.DEFINE_string("model", None, "folder of a run, or a Hugging Face directory")
get_loading = cli.define_loading_flags()
_prompt = flags.DEFINE_string("prompt", None, "text to continue")
_max_new_tokens = flags.DEFINE_integer("max_new_tokens", 200, "most tokens to generate; fewer where the text ends", lower_bound=1)
_temperature = flags.DEFINE_float("temperature", 0.7, "of sampling; 0 takes the likeliest token", lower_bound=0)
_seed = flags.DEFINE_integer("seed", 0, "of sampling", lower_bound=0, upper_bound=2**32 - 1)

if __name__ == "__main__":
    cli.run(main)
