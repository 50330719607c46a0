"""The model as lm-evaluation-harness sees it (optional: `pip install 'qwen3next-jax[evals]'`).

Log-likelihoods come from one forward pass over context and continuation, generation from the
cached decoder. Letters: B batch, T time.
"""

from collections.abc import Sequence

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.continuation import continued
from qwen3next_jax.evals.scoring import make_score_step, make_scorer
from qwen3next_jax.inference import speculative as drafting
from qwen3next_jax.model import Qwen3Next

_NEW_TOKENS = 256  # generated at most where a task does not say


class HarnessModel(TemplateLM):
    """Args: `max_length`: longest context with its continuation, in tokens; a context that is
    longer loses its beginning. `batch_size`: rows of one forward pass. `mesh`: on which the
    parameters lie; None for one device. `speculative`: tokens drafted per pass where text is
    generated.
    """

    def __init__(
        self,
        model: Qwen3Next,
        tokenizer: Tokenizer,
        max_length: int = 2048,
        batch_size: int = 8,
        mesh: Mesh | None = None,
        speculative: int = 0,
    ):
        super().__init__()
        self.model, self._tokenizer, self.batch_size, self._mesh = (
            model,
            tokenizer,
            batch_size,
            mesh,
        )
        self._speculative = speculative
        if speculative:
            drafting.check(model.config, speculative)
        self.max_length = min(max_length, model.config.context_length)
        graphdef, params = nnx.split(model, nnx.Param)
        self._score = make_scorer(make_score_step(graphdef, mesh), nnx.to_pure_dict(params), mesh)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.model.config.bos_token_id
        return bos if bos >= 0 else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        return self._tokenizer.encode(string).tolist() if string else []

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding would give it) of each
        (text, context, continuation).
        """
        rows = [
            (context + continuation)[-(self.max_length + 1) :]
            for _, context, continuation in requests
        ]
        counts = [len(continuation) for _, _, continuation in requests]
        if max(counts, default=0) > self.max_length:
            raise UserError(
                f"an answer of {max(counts)} tokens is longer than max_length = "
                f"{self.max_length}: give a larger --max_length"
                f" (the model's context is {self.model.config.context_length})"
            )
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for batch in _batches([len(row) for row in rows], self.batch_size):
            tokens_BT, segment_ids_BT = _padded([rows[i] for i in batch], self.batch_size)
            nll_BT, guess_BT = self._score(tokens_BT, segment_ids_BT)
            for b, i in enumerate(batch):
                end = len(rows[i]) - 1
                place = slice(end - counts[i], end)
                results[i] = (
                    -float(nll_BT[b, place].sum(dtype=np.float64)),
                    bool((guess_BT[b, place] == tokens_BT[b, 1:][place]).all()),
                )
                self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [((None, text), *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Greedy, or sampled where a task asks for it, up to the first of the task's stop
        strings.
        """
        groups: dict[tuple[int, float], list[int]] = {}
        for i, (_, options) in enumerate(request.args for request in requests):
            new = int(options.get("max_gen_toks", _NEW_TOKENS))
            if new >= self.max_length:
                raise UserError(
                    f"a task generates {new} tokens, and max_length = {self.max_length} leaves no "
                    "room for a prompt: give a larger --max_length (the model's context is "
                    f"{self.model.config.context_length})"
                )
            temperature = (
                float(options.get("temperature", 0.0)) if options.get("do_sample", False) else 0.0
            )
            groups.setdefault((new, temperature), []).append(i)
        texts = [""] * len(requests)
        for (new, temperature), members in groups.items():
            prompts = [self._prompt(requests[i].args[0], self.max_length - new) for i in members]
            for batch in _batches([len(prompt) for prompt in prompts], self.batch_size):
                stops = [_stops(requests[members[i]].args[1]) for i in batch]
                found = continued(
                    self.model,
                    self._tokenizer,
                    [prompts[i] for i in batch],
                    stops,
                    rows=self.batch_size,
                    max_new_tokens=new,
                    temperature=temperature,
                    mesh=self._mesh,
                    speculative=self._speculative,
                    seed=members[batch[0]],
                )  # samples differ between batches
                for i, text in zip(batch, found):
                    texts[members[i]] = text
                    self.cache_hook.add_partial("generate_until", requests[members[i]].args, text)
        return texts

    def _prompt(self, context: str, longest: int) -> np.ndarray:
        return np.array((self.tok_encode(context) or [self.prefix_token_id])[-longest:], np.int32)


def _stops(options: dict) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in batches of like lengths, the longest first, so that memory runs out at once or
    never.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[i : i + size] for i in range(0, len(order), size)]


def _padded(rows: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segment_ids) [count, T], T a power of two so that few shapes are compiled."""
    length = max(16, 1 << (max(map(len, rows)) - 1).bit_length())
    tokens_BT, segment_ids_BT = (
        np.zeros((count, length), np.int32),
        np.zeros((count, length), np.int32),
    )
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)], segment_ids_BT[b, : len(row)] = row, 1
    return tokens_BT, segment_ids_BT
