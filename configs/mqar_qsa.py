"""Associative recall through sparse attention: does a trained indexer find the keys? In rows of 64
tokens, a query of the attention layer sees the 8 keys that the indexer selects, and the keys of an
incomplete block.

    uv run train.py --config=configs/mqar_qsa.py
    uv run train.py --config=configs/mqar_qsa.py --config.train.stages='()'

The first command trains with dense attention for 400 steps, then with the keys that the indexer
selects. The second command leaves the indexer untrained (`frozen`). docs/qwen3_8_flash_next.md has
the results of both commands.
"""

from ml_collections import ConfigDict

from configs import mqar


def get_config() -> ConfigDict:
    config = mqar.get_config()
    config.name = "mqar_qsa"

    model = config.model
    model.full_mixer = "qsa"
    model.mixer = dict(
        indexer_n_heads=2,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
    )

    config.train.steps = 600
    config.train.stages = (
        dict(name="warm-up", steps=400, indexer_training="dense"),
        dict(name="sparse", steps=200, indexer_training="sparse"),
    )
    config.checkpoint.every = 600
    config.eval.every = 100
    return config
