"""A run of three stages, minutes on a laptop: the model of configs/tiny.py on short rows, on rows four times as long, and annealed.

    uv run train.py --config=configs/stages.py
"""

from ml_collections import ConfigDict

from configs.tiny import get_config as tiny


def get_config() -> ConfigDict:
    config = tiny()
    config.name = "stages"
    config.optimizer.schedule = "constant"  # after the warm-up, until a stage says otherwise

    config.train.steps = 400  # of all stages
    config.train.stages = (
        dict(name="main", steps=250),
        dict(name="long", steps=75, sequence_length=1024, batch_size=2),  # as many tokens a step
        dict(name="anneal", steps=75, sequence_length=1024, batch_size=2, schedule="linear", final_fraction=0.0),
    )
    return config
