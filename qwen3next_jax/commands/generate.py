"""Continues a prompt with a trained model and streams the text to the terminal, or chats with it.

    qwen3next generate --model=WORKDIR_OR_HF_DIR --prompt="def "
    qwen3next generate --model=HF_DIR --chat  # a template that writes the date gets today's
    qwen3next generate --model=WORKDIR --prompt="def " --samples=8 --record_routing=FOLDER

The command writes the prompt and its continuation, or the answers of a chat, to standard output.
Times, tokens per second and the memory of the cache go to standard error.
"""

import datetime
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable

from absl import flags

from qwen3next_jax.commands import checks, process_setup, run_flags
from qwen3next_jax.common.errors import UserError, require_path
from qwen3next_jax.common.metrics import displayed_mtp_depth
from qwen3next_jax.common.storage import to_path


def main() -> int:
    text = _prompt_text()
    if not _model.value:
        raise UserError(
            "--model is missing: expected the folder of a run or a Hugging Face directory"
        )
    _check_flags()
    config = checks.check_and_read_model_config("model", _model.value)
    if _max_new_tokens.value >= (context := config.context_length):
        raise UserError(
            f"--max_new_tokens={_max_new_tokens.value}: expected less than the model's context, "
            f"{context}"
        )
    # Imported here, so that the user learns of a wrong flag before JAX loads.
    from qwen3next_jax.data.chat_template import ChatTemplate
    from qwen3next_jax.inference import speculative
    from qwen3next_jax.inference.end_tokens import read_end_token_ids

    if _speculative.value:
        speculative.check_drafts(config, _speculative.value)
    if _record_routing.value and not config.has_experts:
        raise UserError(
            f"--record_routing={_record_routing.value}: the model has no experts: leave it out"
        )
    folder = to_path(_model.value)
    template = (
        ChatTemplate.of_folder(
            folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder,
            "a model that was not trained to chat has none; use --prompt",
            date=datetime.date.today().isoformat(),
        )
        if _chat.value
        else None
    )
    ends = read_end_token_ids(folder, config.vocab_size)
    loading = get_loading()
    process_setup.enable_compilation_cache()
    from qwen3next_jax.trained.load import distributed_command

    with distributed_command(loading.launch, _model.value):
        return _load_model_and_generate(text, loading, template, ends)


def _load_model_and_generate(
    text: str, loading: run_flags.LoadingFlags, template, ends: set[int]
) -> int:
    from qwen3next_jax.trained.load import load_model

    model, tokenizer, _, places, _ = load_model(
        _model.value, loading.step, loading.mesh, loading.dtype or "float32", ema=loading.ema
    )
    if tokenizer is None:
        raise UserError(
            f"{_model.value}: no tokenizer.json there: put the model's own beside its config.json"
        )
    request = dict(
        max_new_tokens=_max_new_tokens.value,
        seed=_seed.value,
        speculative=_speculative.value,
        mesh=places,
        stop_ids=sorted((ends | {tokenizer.eos_id, model.config.eos_token_id}) - {-1}),
        temperature=_temperature.value,
        top_k=_top_k.value,
        top_p=_top_p.value,
        min_p=_min_p.value,
        record_routing=_record_routing.value is not None,
    )
    try:
        if template is not None:

            def answer(text: str) -> str:
                needed = len(tokenizer.encode(text)) + _max_new_tokens.value
                capacity = _chat_cache_capacity(needed, model.config.context_length)
                return _stream_continuation(
                    model, tokenizer, text, request | {"min_cache_length": capacity}
                )

            _chat_loop(template.render_prompt, answer)
        elif _samples.value == 1:
            _stream_continuation(model, tokenizer, text, request, echo=text)
        else:
            _print_samples(model, tokenizer, text, request)
    except BrokenPipeError:
        # The reader of standard output (`| head`) has closed it. Python must not flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _chat_cache_capacity(needed: int, context_length: int) -> int:
    """Returns the number of tokens for which the cache of a chat must have room: the smallest
    allowed capacity that is at least `needed`. The decoder is compiled anew for each capacity, so
    only powers of 4 and the model's context length are allowed.
    """
    capacities = [4**i for i in range(6, 12) if 4**i < context_length] + [context_length]
    return next((capacity for capacity in capacities if capacity >= needed), needed)


def _prompt_text() -> str:
    """Returns the prompt, which a flag, a file or standard input gives; "" for a chat.

    Raises:
      UserError: not exactly one of --prompt, --prompt_file and --chat is given, or the prompt is
        empty, unreadable or not UTF-8.
    """
    given = [
        name
        for name, value in (
            ("prompt", _prompt.value),
            ("prompt_file", _prompt_file.value),
            ("chat", _chat.value),
        )
        if value
    ]
    if len(given) > 1:
        raise UserError(
            f"--{given[0]} and --{given[1]}: expected one of --prompt, --prompt_file and --chat"
        )
    if _chat.value:
        return ""
    if not given:
        raise UserError(
            "--prompt is missing or empty: expected a text to continue, such as --prompt='def ', "
            "or --prompt_file, or --chat"
        )
    name, text = f"--{given[0]}", _prompt.value
    try:
        if text is None:
            name = f"--prompt_file={_prompt_file.value}"
            text = (
                sys.stdin.buffer.read()
                if _prompt_file.value == "-"
                else pathlib.Path(_prompt_file.value).read_bytes()
            ).decode()
        text.encode()
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 at character {error.start}: expected text") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from error
    if not text:
        raise UserError(f"{name} is empty: expected a text to continue")
    return text


def _check_flags() -> None:
    """Raises UserError if flags contradict each other, or if a flag has a value that is wrong for
    every model. The checks of this function do not need the model, so they run before it is loaded.
    """
    for flag in (_temperature, _top_p, _min_p):
        if not math.isfinite(flag.value):
            raise UserError(f"--{flag.name}={flag.value}: expected a finite number")
    if _top_p.value == 0:
        raise UserError("--top_p=0: no token is left; expected more than 0, up to 1 (all tokens)")
    for flag in (_top_k, _top_p, _min_p):
        if _temperature.value == 0 and flag.value != flag.default:
            raise UserError(
                f"--{flag.name}={flag.value} with --temperature=0, which always takes the "
                "likeliest token: expected one of the two"
            )
    if _samples.value > 1 and _temperature.value == 0:
        raise UserError(
            f"--samples={_samples.value} with --temperature=0: all samples would be the same; give "
            "a temperature, or one sample"
        )
    if _samples.value > 1 and _chat.value:
        raise UserError(f"--samples={_samples.value} with --chat: expected one of the two")
    if _record_routing.value is not None:
        where = f"--record_routing={_record_routing.value}"
        if not _record_routing.value:
            raise UserError("--record_routing is empty: expected a folder")
        if _chat.value:
            raise UserError(f"{where} with --chat: expected one of the two")
        if _speculative.value:
            raise UserError(
                f"{where} with --speculative={_speculative.value}: the experts of drafts are not "
                "recorded: expected one of the two"
            )
        folder = pathlib.Path(_record_routing.value)
        require_path(where, folder / ("0" * 64))  # longer than the names that are written
        place = next(f for f in (folder, *folder.absolute().parents) if os.path.lexists(f))
        if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
            raise UserError(
                f"{where}: {place} is {'read-only' if os.path.isdir(place) else 'no folder'}: "
                "expected a folder, or the name of a new one"
            )


class _DecodingTimer:
    """Measures the times of compiling and decoding, and prints these times, the tokens per second
    and the memory of the cache.
    """

    def __init__(self):
        self._began = time.perf_counter()
        self._compiles = False
        self._compile_seconds = 0.0
        self._pieces: list[tuple[float, int]] = []  # (time of arrival in seconds, number of tokens)

    def announce_compilation(self) -> None:
        if not self._compiles:
            print("compiling, or loading a compiled program …", file=sys.stderr, flush=True)
        self._compiles = True

    def mark_decoding_start(self) -> None:
        """Records the current time as the end of compilation and the start of decoding."""
        now = time.perf_counter()
        self._compile_seconds, self._began = now - self._began, now

    def add_tokens(self, tokens: int) -> None:
        self._pieces.append((time.perf_counter(), tokens))

    def print_figures(self, model, prompts: list, stream, min_cache_length: int = 0) -> None:
        """Prints times, tokens per second and the memory of the cache on standard error.

        Args:
          model: the model.
          prompts: the token ids of each prompt.
          stream: the stream of new tokens, which counts accepted drafts.
          min_cache_length: the smallest length of the cache that the request allows, in tokens.
        """
        from qwen3next_jax.inference import decode
        from qwen3next_jax.inference.cache import cache_bytes_by_kind

        size = cache_bytes_by_kind(
            model.config,
            len(prompts),
            decode.cache_length(
                prompts, _max_new_tokens.value, _speculative.value, min_cache_length
            ),
        )
        parts = []
        if self._compiles:
            parts.append(f"compiled or loaded in {self._compile_seconds:.1f} s")
        parts.append(f"prompt of {len(prompts[0])} tokens")
        if self._pieces:
            (first, _), (last, _) = self._pieces[0], self._pieces[-1]
            parts[-1] += f" and first new one in {first - self._began:.3f} s"
            if later := sum(n for _, n in self._pieces[1:]):
                parts.append(f"then {later} tokens at {later / (last - first):,.0f} tokens/s")
        if _speculative.value and any(stream.drafted):
            shares = stream.accepted / stream.drafted
            accepted = ", ".join(
                f"{displayed_mtp_depth(d)} {share:.1%}" for d, share in enumerate(shares)
            )
            parts.append(
                f"{stream.tokens / stream.passes:.2f} tokens per pass of the model, drafts "
                f"accepted {accepted}"
            )
        parts.append(
            f"cache {_megabytes_text(sum(size.values()))} "
            f"(states {_megabytes_text(size['state'])}, slots {_megabytes_text(size['slots'])})"
        )
        print(" · ".join(parts), file=sys.stderr)


def _start_decoding(model, prompts: list, request: dict):
    """Starts to decode. Returns a timer that has started, and the stream of new tokens."""
    from qwen3next_jax.inference import decode

    timer = _DecodingTimer()
    stream = decode.generate(model, prompts, on_compile=timer.announce_compilation, **request)
    timer.mark_decoding_start()
    return timer, stream


def _stream_continuation(model, tokenizer, text: str, request: dict, echo: str = "") -> str:
    """Writes `echo` to standard output, and then the continuation of `text`, while its tokens are
    generated. Ctrl-C ends the continuation. Returns the continuation.
    """
    from qwen3next_jax.inference.streaming import DecodeStream

    prompt, written, texts = tokenizer.encode(text), [], DecodeStream(tokenizer)
    new: list[int] = []

    def write(text: str) -> None:
        written.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    for token in prompt[-16:]:
        texts.add(token)
    timer, stream = _start_decoding(model, [prompt], request)
    print(echo, end="", flush=True)
    try:
        for (tokens,) in stream:
            timer.add_tokens(len(tokens))
            new.extend(tokens)
            write("".join(map(texts.add, tokens)))
    except KeyboardInterrupt:
        pass
    write(texts.end())
    print(flush=True)
    timer.print_figures(model, [prompt], stream, request.get("min_cache_length", 0))
    _write_recorded_routing(model, prompt, [new], stream)
    return "".join(written)


def _print_samples(model, tokenizer, text: str, request: dict) -> None:
    """Generates `--samples` continuations of `text`, and prints them when all have ended."""
    prompts = [tokenizer.encode(text)] * _samples.value
    timer, stream = _start_decoding(model, prompts, request)
    new: list[list[int]] = [[] for _ in prompts]
    try:
        for piece in stream:
            timer.add_tokens(sum(map(len, piece)))
            for row, tokens in zip(new, piece):
                row.extend(tokens)
    except KeyboardInterrupt:
        pass
    for i, row in enumerate(new):
        print(f"--- sample {i + 1} of {len(new)} ---\n{text}{tokenizer.decode(row)}", flush=True)
    timer.print_figures(model, prompts, stream)
    _write_recorded_routing(model, prompts[0], new, stream)


def _write_recorded_routing(model, prompt, new: list[list[int]], stream) -> None:
    """If --record_routing is given, writes for each continuation of `prompt` a file with the tokens
    and the experts that the router chose.
    """
    if _record_routing.value is None:
        return
    from qwen3next_jax.data.recorded import write_recorded_text

    folder = pathlib.Path(_record_routing.value)
    # The experts are there only if the stream has ended. Texts without new tokens teach nothing.
    texts = [(row, experts) for row, experts in zip(new, stream.routed_experts) if row]
    for row, experts in texts:
        write_recorded_text(folder, model.config, [*prompt, *row], experts, len(prompt))
    print(f"{folder}: wrote the experts of {len(texts)} of {len(new)} texts", file=sys.stderr)


def _chat_loop(
    template: Callable[[list[dict[str, str]]], str], answer: Callable[[str], str]
) -> None:
    """Reads lines from standard input and answers each line, until the input ends. If the model
    cannot answer a message and the input is a terminal, prints an error and continues the chat
    without this message.

    Args:
      template: maps the messages so far to the prompt.
      answer: maps a prompt to the answer, which it also prints.

    Raises:
      UserError: the model cannot answer a message, and the input is not a terminal.
    """
    messages: list[dict[str, str]] = []
    if sys.stdin.isatty():
        print("a line is a message; Ctrl-C stops an answer, Ctrl-D ends the chat", file=sys.stderr)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            messages.append({"role": "assistant", "content": answer(template(messages))})
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            messages.pop()
            print(f"error: {error}", file=sys.stderr, flush=True)


def _megabytes_text(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


_model = flags.DEFINE_string("model", None, "folder of a run, or a Hugging Face directory")
get_loading = run_flags.define_loading_flags()
_prompt = flags.DEFINE_string("prompt", None, "text to continue")
_prompt_file = flags.DEFINE_string(
    "prompt_file", None, "file of the text to continue; - for standard input"
)
_chat = flags.DEFINE_boolean(
    "chat",
    False,
    "talk through the tokenizer's chat template, a line of standard input after the other",
)
_max_new_tokens = flags.DEFINE_integer(
    "max_new_tokens", 200, "most tokens to generate; fewer where the text ends", lower_bound=1
)
_samples = flags.DEFINE_integer(
    "samples",
    1,
    "continuations of the prompt; several are printed when all have ended",
    lower_bound=1,
)
_record_routing = flags.DEFINE_string(
    "record_routing",
    None,
    "folder for the tokens of each continuation and the experts that they used, which training can "
    "replay (docs/routing.md)",
)
_temperature = flags.DEFINE_float(
    "temperature", 0.7, "sampling temperature; 0 takes the likeliest token", lower_bound=0
)
_top_k = flags.DEFINE_integer(
    "top_k", 0, "sample from so many of the likeliest tokens; 0: all", lower_bound=0
)
_top_p = flags.DEFINE_float(
    "top_p",
    1.0,
    "sample from the likeliest tokens that together have this probability; 1: all",
    0,
    1,
)
_min_p = flags.DEFINE_float(
    "min_p",
    0.0,
    "sample from tokens with at least this share of the likeliest one's probability; 0: all",
    0,
    1,
)
_seed = flags.DEFINE_integer("seed", 0, "seed of sampling", lower_bound=0, upper_bound=2**32 - 1)
_speculative = flags.DEFINE_integer(
    "speculative",
    0,
    "tokens drafted per pass by the multi-token prediction module, up to 4: fewer passes, the "
    "same text (sampled: of the same distribution); 0: none",
    lower_bound=0,
)
