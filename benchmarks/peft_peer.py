"""Loads an adapter with PEFT, and compares the logits with those of the merged export. It runs in
an environment of its own with torch, transformers and peft, without this project:

    python benchmarks/peft_peer.py BASE ADAPTER MERGED

    BASE     the Hugging Face directory that the adapted run began with
    ADAPTER  the folder that `qwen3next export --adapter` wrote
    MERGED   the folder that `qwen3next export` wrote

It prints the largest logit of the merged model, the largest differences of its logits from those of
BASE and from those of PEFT, and the number of adapted modules.
"""

import sys

import peft
import torch
import transformers
from safetensors.torch import load_file


def main(base: str, adapter: str, merged: str) -> None:
    def load(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model.eval()

    tokens = torch.arange(96).reshape(2, 48) % 250
    with torch.no_grad():
        want, before = load(merged)(tokens).logits, load(base)(tokens).logits
        model = peft.PeftModel.from_pretrained(load(base), adapter).eval()
        got = model(tokens).logits
    used = {name for name, _ in model.named_parameters() if "lora_" in name}
    stored = load_file(f"{adapter}/adapter_model.safetensors")
    assert len(used) == len(stored), f"{len(stored)} tensors, of which PEFT uses {len(used)}"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", end=", ")
    print(f"peft {peft.__version__}")
    print(f"{len(stored) // 2} modules; largest logit {want.abs().max():.3g}")
    print(f"merged - base: {(want - before).abs().max():.3g}")
    print(f"merged - PEFT: {(want - got).abs().max():.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
