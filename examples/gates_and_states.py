"""Prints how long each head of a model's recurrent layers remembers, as a half-life in tokens. A
Gated DeltaNet head multiplies its state by e^g at every token, with
g = -e^a_log · softplus(a + dt_bias), where a is a projection of the token. Here a is 0.

uv run python examples/gates_and_states.py [RUN_OR_HUGGING_FACE_DIRECTORY]
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import qwen3next_jax as qwen3next
from qwen3next_jax import Qwen3Next
from qwen3next_jax.trained.load import load_model

if len(sys.argv) > 1:
    model = load_model(sys.argv[1]).model
else:
    model = Qwen3Next(qwen3next.load_config("tiny").model, rngs=nnx.Rngs(0))
print(model)
for block, layers in zip(model.layers, model.config.layer_stacks):
    if not hasattr(block.mixer, "a_log"):
        continue
    a_log, dt_bias = block.mixer.a_log[...], block.mixer.dt_bias[...]  # [layers, heads]
    decay = jnp.exp(-jnp.exp(a_log) * jax.nn.softplus(dt_bias))
    half_life = jnp.log(0.5) / jnp.log(decay)
    for layer, tokens in zip(layers, half_life):
        print(f"layer {layer}: half-life in tokens", *(f"{t:.3g}" for t in tokens.tolist()))
