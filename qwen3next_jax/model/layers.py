"""What all layers use: the inputs and options of a forward pass (`Context`, `ForwardOptions`), the
zero-centred RMSNorm, and rotary positions.

Letters: B batch, T time, N heads, D the normalised or rotated width.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.sharding.rules import CONTEXT, num_shards

# A head that gives more than this share of its attention to a document's first token counts as an
# attention sink (2504.02732, 2505.06708).
SINK_HEAD = 0.3


class ForwardOptions(NamedTuple):
    """The options of a forward pass: what layers return or record beside their outputs, and how
    they train.

    capture_layer_outputs: whether the pass returns each layer's output and router logits.
    collect_stats: whether each layer adds "diagnostics" (a dict of small arrays, see the layer's
      class) to its auxiliary outputs.
    record_routing: whether a mixture of experts adds "expert_ids", the experts of every token, to
      its auxiliary outputs.
    count_required_bias: whether the routers count which bias each token would have needed to choose
      each expert (`router.required_bias_histogram`).
    indexer_training: how the indexers of sparse attention are trained: "frozen", "dense" or
      "sparse" (`TrainConfig.indexer_training`).
    return_all_states: whether mixers with a cache of kind "state" return the state after every
      token (see `Mixer.call_returning_all_states`).
    keep_expert_hidden: whether the remat policy saves the hidden layer of the routed experts
      (`remat.keeps_expert_hidden`).
    """

    capture_layer_outputs: bool = False
    collect_stats: bool = False
    record_routing: bool = False
    count_required_bias: bool = False
    indexer_training: str = "frozen"
    return_all_states: bool = False
    keep_expert_hidden: bool = False


class Context(NamedTuple):
    """The inputs of a forward pass beside the residual stream. All fields have the same value for
    all layers, except `replayed_expert_ids` and `layer_in_stack`, which belong to one layer.

    positions: [B, T] int32, each token's position in its document (with a cache: its slot in the
      cache, too).
    segment_ids: [B, T] int32, the document of each token, 0 = padding; None when every row is one
      document.
    stats_mask: [B, T] bool, whether router statistics and diagnostics count the token; None: they
      count all tokens.
    mesh: the devices that share the pass (see `sharding.rules`); None for one device.
    logical_time_axis: the logical axis (`sharding.rules.ACTIVATIONS`) of the tokens of a row:
      "time", or None in decoding, where every device has whole rows.
    tokens: [B, T] int32, the tokens, for layers with an n-gram embedding (`model.ple`); None if the
      model has no such layer.
    embedding_rows: {number of an n-gram embedding: [B, T, P], the rows of its table that the tokens
      use}; None: the layer looks the rows up.
    replayed_expert_ids: [B, T, A] int16, the experts that the tokens of this layer use in place of
      the experts that the router would choose; for a token with -1 the router chooses. None: the
      router chooses for all tokens.
    layer_in_stack: the index of the layer among the layers whose parameters are stacked together.
    options: what the caller asks for.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    stats_mask: jax.Array | None = None
    mesh: Mesh | None = None
    logical_time_axis: str | None = "time"
    tokens: jax.Array | None = None
    embedding_rows: dict[int, jax.Array] | None = None
    replayed_expert_ids: jax.Array | None = None
    layer_in_stack: jax.Array | int = 0
    options: ForwardOptions = ForwardOptions()

    @property
    def mesh_time_axis(self) -> str | None:
        """The mesh axis that splits the tokens of a row, or None if no mesh axis does. Operators
        that read earlier tokens of the row need this axis.
        """
        return CONTEXT if self.logical_time_axis and num_shards(self.mesh, CONTEXT) > 1 else None


def token_mean(x_BT: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
    """Returns the mean of x [B, T, …] over the tokens that the mask [B, T] marks (None: all
    tokens), as float32 […]; 0 if the mask marks no token.
    """
    if mask_BT is None:
        return jnp.mean(x_BT.astype(jnp.float32), axis=(0, 1))
    mask_BT = mask_BT.astype(jnp.float32)
    return jnp.einsum("bt...,bt->...", x_BT.astype(jnp.float32), mask_BT) / jnp.maximum(
        jnp.sum(mask_BT), 1.0
    )


def call_saving_only_inputs[T](f: Callable[..., T], x: jax.Array, *args: Any) -> T:
    """Returns f(x, *args). If the dtype of x is narrower than float32, the backward pass computes f
    again, so that only the arguments are saved. Autodiff alone would save the float32 intermediates
    of f, such as those of a norm, each of which is larger than x.
    """
    return (f if x.dtype.itemsize >= 4 else jax.checkpoint(f))(x, *args)


def rms_norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    """Normalises x over its last axis, by the norm that `config.block.norm` names; the result has
    the dtype of x. The default is the zero-centred RMSNorm, x / rms(x) · (1 + weight), computed in
    float32; no mean is subtracted. If `zero_centered_norm` is off, the norm is x / rms(x) · weight.
    """
    if config.block.norm != "rms":
        return config.block.import_part("norm").apply(x, weight, config)
    return rms_norm_plain(x, norm_scale(weight, config), config.rms_norm_eps)


def norm_scale(weight: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the float32 factor by which an RMSNorm multiplies: 1 + weight, or the weight itself
    if `zero_centered_norm` is off.
    """
    weight = weight.astype(jnp.float32)
    return weight + 1 if config.zero_centered_norm else weight


def rms_norm_plain(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) · weight over the last axis, in the dtype of x. In the released model only
    the output of Gated DeltaNet has this norm; all other norms are zero-centred (`rms_norm`).
    """

    def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (
            x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps) * scale
        ).astype(x.dtype)

    return call_saving_only_inputs(normalise, x, weight.astype(jnp.float32))


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """Converts segment ids [B, T] to positions [B, T] int32 that restart at 0 in every document."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    starts = jnp.pad(
        segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def rotary_cos_sin(positions_BT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of the rotary angles, each [B, T, rotary_dim / 2]. The angles are
    computed in float32, because at position 262k a bfloat16 angle would be wrong by whole turns.
    """
    half, theta = config.rotary_dim // 2, config.rope_theta
    slowdown, gain = config.block.import_part("rope_scaling")(
        half, theta, config.yarn_factor, config.max_position_embeddings
    )
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(theta) / half)) * slowdown
    angle = positions_BT[:, :, None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


def rotate(x_BTND: jax.Array, positions_BT: jax.Array, config: ModelConfig) -> jax.Array:
    """Rotates the first `config.rotary_dim` dimensions of x [B, T, N, D] by the positions [B, T] of
    its tokens (RoPE, 2104.09864, rotate-half form).
    """
    if config.rotary_dim == 0:
        return x_BTND
    cos, sin = (x[:, :, None] for x in rotary_cos_sin(positions_BT, config))
    first, second, rest = jnp.split(
        x_BTND.astype(jnp.float32), (cos.shape[-1], config.rotary_dim), axis=-1
    )
    return jnp.concatenate(
        (first * cos - second * sin, second * cos + first * sin, rest), axis=-1
    ).astype(x_BTND.dtype)


def yarn_frequency_scale(
    half: int, theta: float, factor: float, context: int
) -> tuple[np.ndarray, float]:
    """Returns how YaRN (2309.00071, section 3.2) changes the frequencies of RoPE for a context that
    is longer than the trained context. RoPE rotates pairs of dimensions. A pair of dimensions that
    makes 32 turns or more within the trained context keeps its frequency. The frequency of a pair
    that makes less than one turn is divided by `factor`. A pair with 1 to 32 turns gets an
    interpolated frequency.

    Args:
      half: the number of pairs of dimensions.
      theta: the base of the frequencies.
      factor: the length of the new context divided by the length of the trained context.
      context: the length of the trained context, in tokens.

    Returns:
      The factors [half] of the frequencies; the factor of cos and sin.
    """
    low, high = (
        half * math.log(context / (turns * 2 * math.pi)) / math.log(theta) for turns in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
    slowed = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    return (1 - slowed + slowed / factor).astype(np.float32), 0.1 * math.log(factor) + 1.0
