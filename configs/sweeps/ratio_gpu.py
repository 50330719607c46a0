"""Compares ratios of linear to full attention layers at equal FLOPs: attention in every, every
second, fourth and eighth layer and in none, at the size of configs/small.py; 5 ratios x 2 seeds.

    uv run --extra gpu qwen3next sweep configs/sweeps/ratio_gpu.py

The text is the Python source of the packages in `.venv`, where uv installs them, byte by byte: tens
of megabytes. A run reads a part of it, once (another text: `--set data.path=…`). Equal FLOPs are
418 steps of 65,536 tokens with attention in every layer to 609 with none; `--emit` prints the
commands. The sweep has not been run.
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
