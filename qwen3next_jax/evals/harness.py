"""Makes a model available to lm-evaluation-harness.

lm-evaluation-harness is an optional dependency: `pip install 'qwen3next-jax[evals]'`.
`HarnessModel` computes log-likelihoods in one forward pass over context and continuation, and
generates text with the cached decoder.

Letters: B batch, T time.
"""

from collections.abc import Sequence

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.continuation import generate_until, parse_generation_options
from qwen3next_jax.evals.scoring import make_score_step, make_scorer
from qwen3next_jax.inference import speculative as drafting
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.model import Qwen3Next

_MAX_NEW_TOKENS = 256  # the limit for tasks that set none


class HarnessModel(TemplateLM):
    """A model and its tokenizer, with the methods that lm-evaluation-harness calls.

    Args:
      model: the model with its parameters.
      tokenizer: the tokenizer of the model.
      max_length: the largest number of tokens of context and continuation together. If context and
        continuation have more tokens, the beginning of the context is cut off. `max_length` is at
        most the model's context length.
      batch_size: number of rows of one forward pass. If the mesh does not divide `batch_size`, rows
        of padding are added.
      mesh: the mesh on which the parameters lie; None for a single device.
      speculative: number of tokens that the multi-token prediction module drafts per forward pass
        of the other layers when text is generated; 0: no drafts.

    Raises:
      UserError: the model cannot draft `speculative` tokens.
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
        self.model = model
        self.batch_size = batch_size
        self._tokenizer = tokenizer
        self._mesh = mesh
        self._speculative = speculative
        if speculative:
            drafting.check_drafts(model.config, speculative)
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
        """Computes the log-probabilities of continuations. If a context has no tokens, such as a
        text of spaces (which the harness moves to the continuation), the prefix token stands for
        it.

        Args:
          requests: a tuple (text, context token ids, continuation token ids) for each request.

        Returns:
          For each request, the log-probability of the continuation given the context (nats), and
          whether greedy decoding would generate the continuation.

        Raises:
          UserError: a continuation is longer than `max_length`.
        """
        rows = [
            ((context or [self.prefix_token_id]) + continuation)[-(self.max_length + 1) :]
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
        for batch in _batches_by_length([len(row) for row in rows], self.batch_size):
            tokens_BT, segment_ids_BT = _pad_rows([rows[i] for i in batch], self.batch_size)
            nll_BT, guess_BT = self._score(tokens_BT, segment_ids_BT)
            for b, i in enumerate(batch):
                end = len(rows[i]) - 1
                continuation = slice(end - counts[i], end)
                is_greedy = guess_BT[b, continuation] == tokens_BT[b, 1:][continuation]
                results[i] = (
                    -float(nll_BT[b, continuation].sum(dtype=np.float64)),
                    bool(is_greedy.all()),
                )
                self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability (nats) of each whole text, scored in windows of at most
        `max_length` tokens.
        """
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
        """Continues the context of each request up to the first of the request's stop strings.

        The harness's function `normalize_gen_kwargs` interprets the options of a request: it knows
        other names of the limit, and it decides whether a temperature asks for sampling.

        Raises:
          UserError: a request has an option that this decoder does not have, or asks for so many
            tokens that `max_length` leaves no room for the prompt.
        """
        options = [
            parse_generation_options(request.args[1], normalize_gen_kwargs, _MAX_NEW_TOKENS)
            for request in requests
        ]
        # Requests with the same limit and sampling are decoded together.
        groups: dict[tuple[int, Sampling], list[int]] = {}
        for i, (max_new_tokens, sampling, _) in enumerate(options):
            self._check_leaves_room_for_prompt(max_new_tokens)
            groups.setdefault((max_new_tokens, sampling), []).append(i)
        texts = [""] * len(requests)
        for (max_new_tokens, sampling), members in groups.items():
            longest = self.max_length - max_new_tokens
            prompts = [self._encode_prompt(requests[i].args[0], longest) for i in members]
            for batch in _batches_by_length([len(prompt) for prompt in prompts], self.batch_size):
                new_texts = generate_until(
                    self.model,
                    self._tokenizer,
                    [prompts[i] for i in batch],
                    [options[members[i]].stop_strings for i in batch],
                    rows=self.batch_size,
                    max_new_tokens=max_new_tokens,
                    **sampling._asdict(),
                    mesh=self._mesh,
                    speculative=self._speculative,
                    seed=members[batch[0]],  # different for every batch
                )
                for i, text in zip(batch, new_texts):
                    texts[members[i]] = text
                    self.cache_hook.add_partial("generate_until", requests[members[i]].args, text)
        return texts

    def _check_leaves_room_for_prompt(self, max_new_tokens: int) -> None:
        if max_new_tokens >= self.max_length:
            raise UserError(
                f"a task generates {max_new_tokens} tokens, and max_length = {self.max_length} "
                "leaves no room for a prompt: give a larger --max_length (the model's context is "
                f"{self.model.config.context_length})"
            )

    def _encode_prompt(self, context: str, longest: int) -> np.ndarray:
        """Returns the last `longest` tokens of `context`; the prefix token alone if `context` has
        no tokens.
        """
        return np.array((self.tok_encode(context) or [self.prefix_token_id])[-longest:], np.int32)


def _batches_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divides the indices of `lengths` into batches of at most `size` rows of similar length. The
    longest rows come first, so that the first batch fails if memory is too small.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[i : i + size] for i in range(0, len(order), size)]


def _pad_rows(rows: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and segment ids, both [count, T]. The first rows of both arrays hold `rows`,
    padded with zeros; the remaining rows are empty. T is a power of two, at least 16, so that few
    shapes are compiled.
    """
    length = max(16, 1 << (max(map(len, rows)) - 1).bit_length())
    tokens_BT = np.zeros((count, length), np.int32)
    segment_ids_BT = np.zeros((count, length), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row
        segment_ids_BT[b, : len(row)] = 1
    return tokens_BT, segment_ids_BT
