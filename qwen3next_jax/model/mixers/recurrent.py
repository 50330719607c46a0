"""What recurrent mixers share: projections, short convolution, split, recurrence, output norm
and gate, cache.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key
head, K/V their widths, C = 2K + RV channels of one key head that pass the convolution, W
convolution width.
"""

import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, keeping_inputs, rms_norm_plain, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops import causal_conv1d, channel_delta_rule, gated_delta_rule, linear_scan
from qwen3next_jax.ops.blocks import kept
from qwen3next_jax.ops.pallas_gated_norm import gated_norm
from qwen3next_jax.ops.tpu import tpu
from qwen3next_jax.sharding.rules import activation_spec, constrain, local

# of cached decoding, taken one by one: a chunk would be mostly padding, and four times the work for
# one token
FEW_TOKENS = 8


class Inputs(NamedTuple):
    """What a recurrent mixer makes of its input, before convolution and recurrence.

    mixed: [B, T, G, 2K + RV], query, key and values of each key head; or flat, all heads'
    queries, keys and values: [B, T, GK],
      [B, T, GK], [B, T, HV], where the mixer `flattens`. gate: [B, T, G, RV] or flat, of the
      output, or None. g, beta: float32 log decay ≤ 0, [B, T, H] or of every key channel [B, T,
      H, K] (None: nothing is forgotten), and write strength [B, T, H] (None: 1), or with an axis
      more where the mixer's `recurrence` reads several numbers of a head.
    """

    mixed: jax.Array | list[jax.Array]
    gate: jax.Array | None = None
    g: jax.Array | None = None
    beta: jax.Array | None = None


class Heads(NamedTuple):
    """What the recurrence of a device's own heads gets: the fields of `Inputs`, split and
    convolved, q and k [B, T, G, K], v [B, T, H, V]; weights, the mixer's `head_weights`;
    segment_ids and axis_name for the operator; each: as of `Context`, for
    `Recurrent.recurrence`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    weights: tuple[jax.Array, ...]
    segment_ids: jax.Array | None
    axis_name: str | None
    each: bool


class Recurrent(Mixer):
    """Inputs → causal convolution + SiLU → gated delta rule → norm per head, SiLU gate →
    projection.

    A new mixer makes its input projections in `__init__`, beside `make_convolution` and
    `make_output`, and implements `inputs`. Another operator is `recurrence`, another norm or
    gate `finish`; without convolution and SiLU it says `convolved = False`. The sizes are the
    `linear_*` settings; heads are split over `tensor` by key head.

    Diagnostics, per value head [H]: half_life = -ln 2 / mean g, the tokens over which the mean
    decay halves the state; beta, mean write strength; state_norm, ‖S‖_F after the last token,
    mean over rows. Means are over the counted tokens.
    """

    switches = ("short_convolution", "linear_conv_kernel_dim", "delta_rule")
    convolved: ClassVar[bool] = True
    activation = staticmethod(jax.nn.silu)  # of the output gate

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        raise NotImplementedError

    def recurrence(
        self, heads: Heads, state: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """o [B, T, H, V] and the states after the row, as `init_cache` names them ("state": S),
        from those before it.
        """
        q, k, v, g, beta, _, segment_ids, axis_name, each = heads
        few = state is not None and q.shape[1] <= FEW_TOKENS
        o, final = gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state and state["state"],
            segment_ids=segment_ids,
            normalize_qk=self.normalized,
            erase=self.erases(self.config),
            implementation="recurrent" if few else self.config.named_delta_rule,
            axis_name=axis_name,
            each=each,
        )
        return o, {"state": final}

    normalized: ClassVar[bool] = True  # q and k have length 1 in `recurrence` as it stands here

    def head_weights(self) -> tuple[jax.Array, ...]:
        """Parameters [H or G, …] that `recurrence` reads."""
        return ()

    def finish(self, o_BTHV: jax.Array, norm: jax.Array, gate_BTGRV: jax.Array | None) -> jax.Array:
        """The norm and the gate of the output."""
        dtype, o_BTHV = o_BTHV.dtype, rms_norm_plain(o_BTHV, norm, self.config.rms_norm_eps)
        if gate_BTGRV is None:
            return o_BTHV
        gate_BTHV = self.activation(gate_BTGRV.reshape(o_BTHV.shape).astype(jnp.float32))
        return (o_BTHV.astype(jnp.float32) * gate_BTHV).astype(dtype)

    def make_projection(self, make: Make, gate: bool = True) -> None:
        """One slab [q | k | v | gate] per key head, so that sharding G keeps every value head
        beside its key head.
        """
        c, k, v = make.config, *_widths(make.config)
        r = c.linear_num_value_heads // c.linear_num_key_heads
        parts = (("q", k), ("k", k), ("v", v, r)) + (("gate", v, r),) * gate
        shape = (c.hidden_size, c.linear_num_key_heads, sum(width for _, width, *_ in parts))
        self.in_proj = make.matrix(shape, "embed -> key_heads .", parts=parts)

    def project(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """(mixed, gate) of `Inputs`."""
        k, v = _widths(self.config)
        x_BTGC = jnp.einsum("btd,dgc->btgc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        return tuple(
            jnp.split(
                constrain(x_BTGC, context.mesh, "batch", context.time, "heads", None),
                (2 * k + v,),
                axis=-1,
            )
        )

    def make_convolution(self, make: Make) -> None:
        c, k, v = make.config, *_widths(make.config)
        if c.short_convolution:
            self.conv_kernel = make.matrix(
                (c.linear_conv_kernel_dim, c.linear_num_key_heads, 2 * k + v),
                ". key_heads channels",
                kind="convolution",
                parts=(
                    ("q", k),
                    ("k", k),
                    ("v", v, c.linear_num_value_heads // c.linear_num_key_heads),
                ),
            )

    def make_output(self, make: Make, per_head: bool = False) -> None:
        """The norm of each head, with weights of its own (`per_head`) or shared, and the
        projection back to the model's width.
        """
        c = make.config
        if per_head:
            self.norm = make.parameter(
                jnp.ones,
                (c.linear_num_value_heads, c.linear_value_head_dim),
                "value_heads .",
                kind="norm",
            )
        else:
            self.norm = make.norm(c.linear_value_head_dim, plain=True)
        self.out_proj = make.matrix(
            (c.linear_num_value_heads, c.linear_value_head_dim, c.hidden_size),
            "value_heads . -> embed",
        )

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict, dict | None]:
        """x [B, T, D] → ([B, T, D], diagnostics, with a cache also the cache after these
        tokens).
        """
        c, dtype = self.config, x_BTD.dtype
        mixed_BTGC, gate_BTGRV, g_BTH, beta_BTH = inputs = kept(self.inputs(x_BTD, context))
        shape = (*x_BTD.shape[:2], c.linear_num_value_heads)
        g_BTH = jnp.zeros(shape, jnp.float32) if g_BTH is None else g_BTH
        beta_BTH = jnp.ones(shape, jnp.float32) if beta_BTH is None else beta_BTH
        flat = isinstance(mixed_BTGC, list)
        if flat:
            o_BTC, state = self._flat_recurrence(inputs._replace(g=g_BTH, beta=beta_BTH), context)
            y_BTD, conv_state, states = (
                o_BTC @ self.out_proj[...].astype(dtype).reshape(o_BTC.shape[2], -1),
                None,
                {"state": state},
            )
        else:
            o_BTHV, conv_state, states = self._recurrence(
                mixed_BTGC, g_BTH, beta_BTH, context, cache
            )

        def project(o_BTHV, norm, gate_BTGRV, out_proj_HVD):
            o_BTHV = self.finish(o_BTHV, norm, gate_BTGRV)
            o_BTHV = constrain(o_BTHV, context.mesh, "batch", context.time, "heads", None)
            return jnp.einsum("bthv,hvd->btd", o_BTHV, out_proj_HVD.astype(dtype))

        if not flat:
            y_BTD = keeping_inputs(project, o_BTHV, self.norm[...], gate_BTGRV, self.out_proj[...])
        diagnostics = {}
        if context.diagnose:
            of_head = lambda x: token_mean(
                x if x.ndim == 3 else jnp.mean(x, axis=-1), context.counted
            )
            diagnostics = {
                "beta": of_head(beta_BTH),
                "state_norm": jnp.mean(jnp.linalg.norm(states["state"], axis=(-2, -1)), axis=0),
            }
            if inputs.g is not None:
                diagnostics["half_life"] = -math.log(2) / jnp.minimum(of_head(g_BTH), -1e-12)
        return y_BTD, diagnostics, None if cache is None else {"conv": conv_state} | states

    def flattens(self) -> bool:
        """Whether what passes between its kernels is flat: on GPUs, and where a TPU is compiled
        for and each head has whole lanes.
        """
        c = self.config
        lanes = c.linear_key_head_dim % 128 == c.linear_value_head_dim % 128 == 0
        return (
            c.short_convolution
            and c.linear_output_gate
            and (bool(tpu()) and lanes or jax.default_backend() == "gpu")
        )

    def _flat_recurrence(self, inputs: Inputs, context: Context) -> tuple[jax.Array, jax.Array]:
        """Convolution, delta rule, norm and gate with heads side by side in the last axis → ([B,
        T, H·V], final state).
        """
        c, (q, k, v) = self.config, inputs.mixed
        widths = c.linear_key_head_dim, 2 * c.linear_key_head_dim

        def run(q, k, v, kernel_WGC, g_BTH, beta_BTH, gate, norm_V, segment_ids):
            split = (
                part.reshape(part.shape[0], -1) for part in jnp.split(kernel_WGC, widths, axis=-1)
            )
            heads = (
                g_BTH.shape[2] * c.linear_num_key_heads // c.linear_num_value_heads,
                g_BTH.shape[2],
            )
            q, k, v = (
                causal_conv1d(
                    x,
                    kernel,
                    activation="silu",
                    segment_ids=segment_ids,
                    axis_name=context.time_axis,
                )[0].reshape(*x.shape[:2], n, -1)
                for x, kernel, n in zip((q, k, v), split, (heads[0], *heads))
            )
            o_BTHV, final = gated_delta_rule(
                q,
                k,
                v,
                g=g_BTH,
                beta=beta_BTH,
                segment_ids=segment_ids,
                erase=self.erases(c),
                implementation=c.named_delta_rule,
                axis_name=context.time_axis,
            )
            return gated_norm(o_BTHV.reshape(gate.shape), gate, norm_V, c.rms_norm_eps), final

        spec = functools.partial(activation_spec, "batch")
        narrow, tokens = spec(context.time, "heads"), spec(context.time)
        in_specs = (narrow,) * 3 + (
            activation_spec(None, "heads", None),
            narrow,
            narrow,
            narrow,
            activation_spec(None),
            tokens,
        )
        return local(run, context.mesh, in_specs, (narrow, spec("heads", None, None)))(
            q,
            k,
            v,
            self.conv_kernel[...].astype(q.dtype),
            inputs.g,
            inputs.beta,
            inputs.gate,
            self.norm[...],
            context.segment_ids,
        )

    def _recurrence(self, mixed_BTGC, g_BTH, beta_BTH, context: Context, cache: dict | None):
        """Convolution and recurrence, key heads split over `tensor` with their value heads → (o
        [B, T, H, V], states of both).
        """
        c, k, convolved = (
            self.config,
            self.config.linear_key_head_dim,
            type(self).convolves(self.config),
        )
        kernel_WGC = (
            self.conv_kernel[...].astype(mixed_BTGC.dtype)
            if convolved
            else jnp.zeros((1, *mixed_BTGC.shape[2:]))
        )
        conv_state, states = (
            (None, None)
            if cache is None
            else (cache["conv"], {name: x for name, x in cache.items() if name != "conv"})
        )

        def run(mixed_BTGC, kernel_WGC, g_BTH, beta_BTH, weights, segment_ids, conv_state, states):
            inputs_BSGC = (
                jnp.concatenate((conv_state, mixed_BTGC), axis=1) if context.each else None
            )
            if convolved:
                mixed_BTGC, conv = keeping_inputs(
                    lambda mixed, kernel, state: causal_conv1d(
                        mixed,
                        kernel,
                        activation="silu",
                        initial_state=state,
                        segment_ids=segment_ids,
                        axis_name=context.time_axis,
                    ),
                    mixed_BTGC,
                    kernel_WGC,
                    conv_state,
                )
            else:
                mixed_BTGC, conv = (
                    jax.nn.silu(mixed_BTGC) if self.convolved else mixed_BTGC,
                    mixed_BTGC[:, :0],
                )
            if context.each:
                width, time = kernel_WGC.shape[0], g_BTH.shape[1]
                conv = jnp.stack(
                    [inputs_BSGC[:, t : t + width - 1] for t in range(1, time + 1)], axis=1
                )
            q_BTGK, k_BTGK, v_BTGRV = jnp.split(mixed_BTGC, (k, 2 * k), axis=-1)
            v_BTHV = v_BTGRV.reshape(*g_BTH.shape[:3], c.linear_value_head_dim)
            heads = Heads(
                q_BTGK,
                k_BTGK,
                v_BTHV,
                g_BTH,
                beta_BTH,
                weights,
                segment_ids,
                context.time_axis,
                context.each,
            )
            return *self.recurrence(heads, states), conv

        spec = functools.partial(activation_spec, "batch")
        wide, narrow, tokens = (
            spec(context.time, "heads", None),
            spec(context.time, "heads"),
            spec(context.time),
        )
        of_states, of_conv = spec("heads"), spec(None, "heads", None)
        in_specs = (
            wide,
            activation_spec(None, "heads", None),
            narrow,
            narrow,
            activation_spec("heads"),
            tokens,
            of_conv,
            of_states,
        )
        if context.each:
            of_states, of_conv = spec(None, "heads"), spec(None, None, "heads", None)
        o_BTHV, states, conv_state = local(run, context.mesh, in_specs, (wide, of_states, of_conv))(
            mixed_BTGC,
            kernel_WGC,
            g_BTH,
            beta_BTH,
            self.head_weights(),
            context.segment_ids,
            conv_state,
            states,
        )
        return o_BTHV, conv_state, states

    def each_token(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict, dict]:
        # another operator, which gives its last state alone
        if type(self).recurrence is not Recurrent.recurrence:
            return super().each_token(x_BTD, context, cache)
        return self(x_BTD, context, cache)

    @classmethod
    def convolves(cls, config: ModelConfig) -> bool:
        return cls.convolved and config.short_convolution

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Cache before the first token: constant size, whatever `length`."""
        c, k, v = config, *_widths(config)
        window = c.linear_conv_kernel_dim - 1 if cls.convolves(c) else 0
        state = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        return {
            "conv": jnp.zeros((batch, window, c.linear_num_key_heads, 2 * k + v), c.dtype),
            "state": jnp.zeros(state, jnp.float32),
        }

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """The token recurrence: decay, erase (where it does), write and read, each a product of
        K·V per value head.
        """
        products = 3 if cls.erases(config) else 2
        return (
            2
            * products
            * config.linear_num_value_heads
            * config.linear_key_head_dim
            * config.linear_value_head_dim
        )

    @classmethod
    def erases(cls, config: ModelConfig) -> bool:
        """Whether the write replaces what the state says of the key (the delta rule), or is
        added to it.
        """
        return True

    @staticmethod
    def splits(config: ModelConfig) -> dict[str, int]:
        return {"linear_num_key_heads": config.linear_num_key_heads}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        return config.linear_conv_kernel_dim - 1 if cls.convolves(config) else 0


class Additive(Recurrent):
    """Linear attention with a decay per head, S ← e^g S + β k vᵀ, o = Sᵀq, without convolution;
    nothing is normalised or scaled.
    """

    switches = ("delta_rule",)
    convolved = False
    normalized = False

    def recurrence(self, heads: Heads, state):
        # the operator divides by √K
        return super().recurrence(heads._replace(q=heads.q * heads.q.shape[-1] ** 0.5), state)

    def weighted(self, heads: Heads, state):
        """(o, the sum of the weights in it zᵀq [B, T, H], states), z ← e^g z + β k. A column of
        ones beside v would make K × (V + 1).
        """
        o, states = Additive.recurrence(self, heads, state)
        repeats = heads.v.shape[2] // heads.k.shape[2]
        q_BTHK, k_BTHK = (
            jnp.repeat(x.astype(jnp.float32), repeats, axis=2) for x in (heads.q, heads.k)
        )
        z_BTHK, _, last = linear_scan(
            heads.g[..., None],
            heads.beta[..., None] * k_BTHK,
            initial_state=state and state["normaliser"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return (
            o.astype(jnp.float32),
            jnp.sum(z_BTHK * q_BTHK, axis=-1),
            states | {"normaliser": last},
        )

    @classmethod
    def normalises(cls, config: ModelConfig) -> bool:
        """Whether `weighted` is used."""
        return False

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        cache = super().init_cache(config, batch, length)
        return cache | (
            {"normaliser": jnp.zeros(cache["state"].shape[:-1])} if cls.normalises(config) else {}
        )

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """Those of the matrix, and decay or write and read of the normaliser."""
        of_sums = 4 * config.linear_num_value_heads * config.linear_key_head_dim
        return super().forward_flops(config, length) + (of_sums if cls.normalises(config) else 0)

    @classmethod
    def erases(cls, config: ModelConfig) -> bool:
        return False


class ByChannel(Recurrent):
    """Linear attention with a decay per key channel, S ← Diag(e^g) S + β k vᵀ, without
    convolution. `head_weights`: (bonus [H, K],) with read = "before", else ().
    """

    switches = ()
    convolved = False
    read: ClassVar[str] = "after"

    def recurrence(self, heads: Heads, state):
        q, k, v, g, beta, bonus, segment_ids, axis_name, _ = heads
        o, final = channel_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            erase=False,
            read=self.read,
            bonus=bonus[0] if bonus else None,
            initial_state=state and state["state"],
            segment_ids=segment_ids,
            axis_name=axis_name,
        )
        return o, {"state": final}

    @classmethod
    def erases(cls, config: ModelConfig) -> bool:
        return False


def _widths(config: ModelConfig) -> tuple[int, int]:
    """Of a key head's query or key, and of its values."""
    return (
        config.linear_key_head_dim,
        config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim,
    )


def low_rank(make: Make, rank: int, width: int) -> tuple[nnx.Param, nnx.Param]:
    """Matrices [D, rank] and [rank, H, width] of a gate."""
    c = make.config
    return make.matrix((c.hidden_size, rank), "embed -> ."), make.matrix(
        (rank, c.linear_num_value_heads, width), ". -> value_heads ."
    )


def through(x_BTD: jax.Array, *matrices: nnx.Param) -> jax.Array:
    """x times one matrix after the other, in float32: [B, T, …] of what the last one keeps."""
    for matrix in matrices:
        x_BTD = jnp.tensordot(
            x_BTD, matrix[...].astype(x_BTD.dtype), 1, preferred_element_type=jnp.float32
        ).astype(x_BTD.dtype if matrix is not matrices[-1] else jnp.float32)
    return x_BTD


def unit(x: jax.Array) -> jax.Array:
    """x of length 1 over the last axis, in float32 where it is narrower: x · rsqrt(Σ x² + 1e-6)."""
    x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
