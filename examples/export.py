"""Writes a model as a Hugging Face directory, reads it back, and compares the logits of both
models. If transformers is installed, the example also compares the logits with those of
transformers.

uv run python examples/export.py
"""

import importlib.util
import tempfile

import jax.numpy as jnp
import numpy as np
from flax import nnx

import qwen3next_jax as qwen3next
from qwen3next_jax import Qwen3Next, load_hf, save_hf

# In a model with end-of-text as in the tiny config, but without settings that a tokenizer fills.
config = qwen3next.load_config("tiny").model
model = Qwen3Next(config, rngs=nnx.Rngs(0))
tokens = np.arange(32, dtype=np.int32)[None] % config.vocab_size
with tempfile.TemporaryDirectory() as folder:
    save_hf(model, f"{folder}/export")
    again = load_hf(f"{folder}/export")
    ours = model(jnp.asarray(tokens)).logits
    print("read back:", bool((again(jnp.asarray(tokens)).logits == ours).all()))
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        import torch
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/export")
        with torch.no_grad():
            logits = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        print("largest difference from transformers:", float(np.abs(logits - ours).max()))
    else:
        print("transformers and torch are not installed: their logits were not compared")
