"""The one table between this model's parameters and the tensors of Hugging Face checkpoints, read in both directions.

Every parameter is a transposition of its tensors: moving its axes gives (tensors…, rows…, columns…), and each tensor is
one slice of that, flattened to its own shape. So an entry is data, not a pair of functions that might disagree.
The convolution alone also reorders rows: here channels are grouped by key head, there they are all q | all k | all v.

Letters: D model, V vocabulary or value width, G key heads, H value heads, K key width, R = H/G, N query heads,
M key/value heads, W convolution width, E experts, I expert or MLP width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.config import FULL, LINEAR, ModelConfig


class Slice(NamedTuple):
    """One tensor: where it lies in the transposed parameter, its name after the layer's prefix, its shape."""

    index: tuple[int, ...]
    name: str
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """One parameter of one layer.

    path: within the layer (or the model), dotted.
    shape: of one layer of the parameter.
    axes: the transposition after which its tensors are slices of the leading axes.
    slices: its tensors as the released checkpoint stores them.
    fused: the single tensor that newer transformers versions may store instead, or None.
    row_order: row i of the tensor is row row_order[i] of the parameter; None when they agree.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    slices: tuple[Slice, ...]
    fused: Slice | None = None
    row_order: np.ndarray | None = None

    def to_tensor(self, parameter: np.ndarray, part: Slice) -> np.ndarray:
        """The tensor `part` of one layer's `parameter`, contiguous."""
        tensor = np.ascontiguousarray(parameter.transpose(self.axes)[part.index]).reshape(part.shape)
        return tensor if self.row_order is None else tensor[self.row_order]

    def from_tensor(self, tensor: np.ndarray, part: Slice, parameter: np.ndarray) -> None:
        """Writes the tensor `part` into its place in one layer's `parameter`."""
        if self.row_order is not None:
            tensor = tensor[np.argsort(self.row_order)]
        target = parameter.transpose(self.axes)  # a view
        target[part.index] = tensor.reshape(target[part.index].shape)


class Parameter(NamedTuple):
    """One leaf of the parameter tree. `prefixes` are the layers stacked along its first axis, or one when not stacked."""

    path: str
    entry: Entry
    prefixes: tuple[str, ...]
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.prefixes), *self.entry.shape) if self.stacked else self.entry.shape

    def layers(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """`(prefix, view)` of every layer in `array` (of `shape`)."""
        return zip(self.prefixes, array if self.stacked else array[None], strict=True)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of a model with this `config`."""
    for entry in _model_entries(config):
        yield Parameter(entry.path, entry, ("",), stacked=False)
    for position in range(config.period):
        kind, sparse = config.layer_kinds[position]
        layers = range(position, config.num_hidden_layers, config.period)
        prefixes = tuple(f"model.layers.{i}." for i in layers)
        for entry in _block_entries(config, kind, sparse):
            yield Parameter(f"layers.{position}.{entry.path}", entry, prefixes, stacked=True)
    if config.mtp_depth:
        for entry in _mtp_entries(config):
            yield Parameter(f"mtp.{entry.path}", entry, ("mtp.",), stacked=False)
        for entry in _block_entries(config, FULL, sparse=config.num_experts > 0):
            yield Parameter(f"mtp.block.{entry.path}", entry, ("mtp.layers.0.",), stacked=False)


def _one(path: str, name: str, shape: tuple[int, ...], axes: tuple[int, ...], tensor_shape: tuple[int, ...], **kw) -> Entry:
    return Entry(path, shape, axes, (Slice((), name, tensor_shape),), **kw)


def _vector(path: str, name: str, width: int) -> Entry:
    return _one(path, name, (width,), (0,), (width,))


def _model_entries(c: ModelConfig) -> Iterator[Entry]:
    d, v = c.hidden_size, c.vocab_size
    yield _one("embedding", "model.embed_tokens.weight", (v, d), (0, 1), (v, d))
    yield _vector("final_norm", "model.norm.weight", d)
    if not c.tie_word_embeddings:
        yield _one("head", "lm_head.weight", (d, v), (1, 0), (v, d))


def _mtp_entries(c: ModelConfig) -> Iterator[Entry]:
    d = c.hidden_size
    yield _vector("embedding_norm", "pre_fc_norm_embedding.weight", d)
    yield _vector("hidden_norm", "pre_fc_norm_hidden.weight", d)
    yield _one("fc", "fc.weight", (2 * d, d), (1, 0), (d, 2 * d))
    yield _vector("norm", "norm.weight", d)


def _block_entries(c: ModelConfig, kind: str, sparse: bool) -> Iterator[Entry]:
    yield _vector("mixer_norm", "input_layernorm.weight", c.hidden_size)
    yield _vector("mlp_norm", "post_attention_layernorm.weight", c.hidden_size)
    yield from _MIXERS[kind](c)
    yield from _sparse_entries(c) if sparse else _dense_entries(c)


def _linear_attention_entries(c: ModelConfig) -> Iterator[Entry]:
    d, g, h, w = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_conv_kernel_dim
    k, v, r = c.linear_key_head_dim, c.linear_value_head_dim, h // g
    qkvz, channels = 2 * k + 2 * r * v, 2 * k + r * v
    yield _one("mixer.in_proj_qkvz", "linear_attn.in_proj_qkvz.weight", (d, g, qkvz), (1, 2, 0), (g * qkvz, d))
    yield _one("mixer.in_proj_ba", "linear_attn.in_proj_ba.weight", (d, g, 2 * r), (1, 2, 0), (g * 2 * r, d))
    grouped = np.arange(g * channels).reshape(g, channels)
    all_q_all_k_all_v = np.concatenate([part.ravel() for part in np.split(grouped, (k, 2 * k), axis=1)])
    yield _one("mixer.conv_kernel", "linear_attn.conv1d.weight", (w, g, channels), (1, 2, 0), (g * channels, 1, w),
               row_order=all_q_all_k_all_v)
    yield _vector("mixer.a_log", "linear_attn.A_log", h)
    yield _vector("mixer.dt_bias", "linear_attn.dt_bias", h)
    yield _vector("mixer.norm", "linear_attn.norm.weight", v)
    yield _one("mixer.out_proj", "linear_attn.out_proj.weight", (h, v, d), (2, 0, 1), (d, h * v))


def _full_attention_entries(c: ModelConfig) -> Iterator[Entry]:
    d, n, m, k = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    yield _one("mixer.q_proj", "self_attn.q_proj.weight", (d, n, 2 * k), (1, 2, 0), (n * 2 * k, d))
    yield _one("mixer.k_proj", "self_attn.k_proj.weight", (d, m, k), (1, 2, 0), (m * k, d))
    yield _one("mixer.v_proj", "self_attn.v_proj.weight", (d, m, k), (1, 2, 0), (m * k, d))
    yield _one("mixer.o_proj", "self_attn.o_proj.weight", (n, k, d), (2, 0, 1), (d, n * k))
    yield _vector("mixer.q_norm", "self_attn.q_norm.weight", k)
    yield _vector("mixer.k_norm", "self_attn.k_norm.weight", k)


_MIXERS = {LINEAR: _linear_attention_entries, FULL: _full_attention_entries}


def _swiglu_entries(path: str, name: str, d: int, i: int) -> Iterator[Entry]:
    halves = tuple(Slice((half,), f"{name}.{projection}.weight", (i, d)) for half, projection in _HALVES)
    yield Entry(f"{path}gate_up", (d, 2, i), (1, 2, 0), halves)
    yield _one(f"{path}down", f"{name}.down_proj.weight", (i, d), (1, 0), (d, i))


_HALVES = ((0, "gate_proj"), (1, "up_proj"))


def _dense_entries(c: ModelConfig) -> Iterator[Entry]:
    yield from _swiglu_entries("mlp.", "mlp", c.hidden_size, c.intermediate_size)


def _sparse_entries(c: ModelConfig) -> Iterator[Entry]:
    d, e, i, s = c.hidden_size, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
    yield _one("mlp.router", "mlp.gate.weight", (d, e), (1, 0), (e, d))
    experts = [(expert, f"mlp.experts.{expert}") for expert in range(e)]
    yield Entry("mlp.expert_gate_up", (e, d, 2, i), (0, 2, 3, 1),
                tuple(Slice((x, half), f"{name}.{projection}.weight", (i, d))
                      for x, name in experts for half, projection in _HALVES),
                fused=Slice((), "mlp.experts.gate_up_proj", (e, 2 * i, d)))
    yield Entry("mlp.expert_down", (e, i, d), (0, 2, 1),
                tuple(Slice((x,), f"{name}.down_proj.weight", (d, i)) for x, name in experts),
                fused=Slice((), "mlp.experts.down_proj", (e, d, i)))
    if s:
        yield from _swiglu_entries("mlp.shared_", "mlp.shared_expert", d, s)
        yield _one("mlp.shared_gate", "mlp.shared_expert_gate.weight", (d,), (0,), (1, d))
