"""Dense MLPs beside SwiGLU. Letters: B batch, T time, D model, I width."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.layers import Context, keeping_inputs
from qwen3next_jax.model.moe import DenseMLP
from qwen3next_jax.model.parameters import Make

gelu = functools.partial(jax.nn.gelu, approximate=True)  # by tanh, as Gemma and GPT-2 have it


class GeGLU(DenseMLP):
    """down(gelu(gate x) · up x) (2002.05202)."""

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        gate_up = jnp.einsum("btd,dci->btci", x_BTD, self.gate_up[...].astype(x_BTD.dtype))
        hidden_BTI = keeping_inputs(
            lambda gate_up: gelu(gate_up[..., 0, :]) * gate_up[..., 1, :], gate_up
        )
        return hidden_BTI @ self.down[...].astype(x_BTD.dtype), {}


class GELU(nnx.Module):
    """down(gelu(up x))."""

    activation = staticmethod(gelu)

    def __init__(self, config, make: Make):
        d, i = config.hidden_size, config.intermediate_size
        self.up, self.down = (
            make.matrix((d, i), "embed -> mlp"),
            make.matrix((i, d), "mlp -> embed"),
        )

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        hidden_BTI = keeping_inputs(self.activation, x_BTD @ self.up[...].astype(x_BTD.dtype))
        return hidden_BTI @ self.down[...].astype(x_BTD.dtype), {}


class ReLU(GELU):
    """down(max(0, up x)) (1706.03762)."""

    activation = staticmethod(jax.nn.relu)


class SquaredReLU(GELU):
    """down(max(0, up x)²) (2109.08668)."""

    activation = staticmethod(lambda x: jnp.square(jax.nn.relu(x)))


class NoMLP(nnx.Module):
    """Nothing is added: layers that are a mixer alone. Its norms are there all the same."""

    def __init__(self, config, make: Make):
        pass

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        return jnp.zeros_like(x_BTD), {}
