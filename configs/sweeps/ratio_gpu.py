"""Compares ratios of linear to full attention layers at equal FLOPs, in models of the size of
configs/small.py: attention in every layer, in every second, fourth or eighth layer, or in no layer;
5 ratios × 2 seeds.

    uv run --extra gpu qwen3next sweep configs/sweeps/ratio_gpu.py

The text is the bytes of the Python source code in `.venv`, where uv installs packages: tens of
megabytes. A run reads a part of them, once. `--set data.path=…` chooses another text. At equal
FLOPs, a model with attention in every layer trains for 418 steps of 65,536 tokens, a model without
attention for 609. `--emit` prints the commands of the runs. The sweep has not been run.
"""


def get_sweep():
    return {
        "base": "configs/small.py",
        "set": {
            "data.path": ".venv/lib/python3.*/site-packages/**/*.py",
            "data.heldout_fraction": 0.02,
            "model.vocab_size": 512,  # bytes; a multiple of the tiles of products
            "model.num_hidden_layers": 8,
            "model.mtp_depth": 0,
            "optimizer.warmup_steps": 50,
            "eval.every": 300,
            "eval.sample_tokens": 0,
            "eval.suites": ("position",),
            "checkpoint.every": 300,
            "telemetry.diagnostics_every": 0,
        },
        "x": "ratio",
        "axes": {
            "flops": [6e15],
            "ratio": ["0:1", "1:1", "3:1", "7:1", "1:0"],
            "train.seed": [0, 1],
        },
    }
