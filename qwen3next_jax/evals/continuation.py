"""Text generation for evaluations: continues a batch of prompts, each until a stop string."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, as_user_error, require, short_repr
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.inference.decode import concatenate_tokens_by_row, generate
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.model import Qwen3Next

_FILTERS = {"top_k": int, "top_p": float, "min_p": float}
# Options of other decoders, with the values at which they change nothing.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


class GenerationOptions(NamedTuple):
    """The options with which a task of lm-evaluation-harness generates text.

    Attributes:
      max_new_tokens: the largest number of tokens to generate.
      sampling: how tokens are sampled.
      stop_strings: the generated text ends before the first of these strings.
    """

    max_new_tokens: int
    sampling: Sampling
    stop_strings: list[str]


def parse_generation_options(
    given: Mapping[str, Any], normalize: Callable, max_new_tokens: int
) -> GenerationOptions:
    """Converts the generation options of a task of lm-evaluation-harness to the options of this
    package's decoder.

    Args:
      given: the task's `generation_kwargs`.
      normalize: the harness's `normalize_gen_kwargs`, which sets "until", "max_gen_toks" and
        "do_sample".
      max_new_tokens: the limit of a task that sets none.

    Raises:
      UserError: an option is unknown, or its value is out of range.
    """
    with as_user_error(
        f"a task sets {short_repr(dict(given))} for the texts that the model generates",
        ValueError,
        TypeError,
        AttributeError,
    ):
        options = normalize(dict(given), max_new_tokens)
    known = {"until", "max_gen_toks", "do_sample", "temperature", *_FILTERS}
    for name, value in options.items():
        if name not in known and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            raise UserError(
                f"a task sets {name} = {short_repr(value)} for the texts that the model generates, "
                f"which this decoder cannot do: expected {', '.join(sorted(known))}"
            )
    for name, kind, least in (("max_gen_toks", int, 1), ("top_k", int, 0), ("do_sample", bool, 0)):
        value = options.get(name, kind(least))
        require(
            type(value) is kind and value >= least,
            f"a task sets {name} = {short_repr(value)}: expected "
            + ("true or false" if kind is bool else f"a whole number, at least {least}"),
        )
    require(
        all(isinstance(stop, str) for stop in options["until"]),
        f"a task sets until = {short_repr(options['until'])}: expected texts",
    )
    sampling = Sampling()
    if options["do_sample"]:  # greedy decoding takes the likeliest token whatever the filters are
        with as_user_error("a task's sampling options: expected numbers", ValueError, TypeError):
            filters = {
                name: kind(options[name]) for name, kind in _FILTERS.items() if name in options
            }
            sampling = Sampling(float(options.get("temperature", 1.0)), **filters)
        if sampling.is_greedy:
            raise UserError(
                "a task sets do_sample with temperature = 0: expected do_sample = false for greedy "
                "decoding, or a temperature above 0"
            )
        sampling.check()
    return GenerationOptions(
        options["max_gen_toks"], sampling, [stop for stop in options["until"] if stop]
    )


def generate_until(
    model: Qwen3Next,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    stops: Sequence[Sequence[str]],
    *,
    rows: int,
    **options,
) -> list[str]:
    """Generates a continuation of each prompt.

    A continuation ends before the first of its stop strings, at the end token of the tokenizer, or
    at the limit `max_new_tokens`. Decoding of the batch ends when every continuation has ended.

    Args:
      prompts: int arrays of token ids, at least one and at most `rows`.
      stops: for each prompt, its stop strings.
      rows: the number of rows that are decoded. The last prompt is repeated to fill the rows, so
        that any number of prompts runs the same compiled program.
      options: other arguments of `inference.decode.generate`, such as `max_new_tokens`.

    Returns:
      The new text of each prompt, without the stop string.
    """
    filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
    pieces: list[list[np.ndarray]] = []
    texts = [""] * len(prompts)
    for piece in generate(model, filled, stop_ids=(tokenizer.eos_id,), **options):
        pieces.append(piece)
        tokens_of_rows = concatenate_tokens_by_row(pieces, rows)[: len(prompts)]
        texts = [tokenizer.decode(tokens) for tokens in tokens_of_rows]
        if all(
            # A row that got no new tokens has reached the end of its document.
            not len(new_tokens) or any(stop in text for stop in row_stops)
            for new_tokens, text, row_stops in zip(piece, texts, stops)
        ):
            break
    return [_text_before_stop(text, row_stops) for text, row_stops in zip(texts, stops)]


def _text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the part of `text` before the first occurrence of any of the stop strings."""
    return min((text.split(stop)[0] for stop in stops), key=len, default=text)
