"""A run of three stages, minutes on a laptop: the model of configs/tiny.py on short rows, on
rows four times as long, and annealed.

    uv run train.py --config=configs/stages.py

prints "step 251  stage long begins: 75 steps of 2 × 1,024 tokens; compiling for it" and ends
with "Trained 400 steps: held-out bits per byte 2.1956", from 2.3594 at the end of the first
stage (on short rows) and 2.4502 at that of the second. `train.stages` on the command line:
--config.train.steps=300 "--config.train.stages=({'steps': 250}, {'steps': 50, 'schedule':
'linear'})". What a stage may set, what it reads and what may change when the run goes on:
docs/reliability.md.
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
        dict(
            name="anneal",
            steps=75,
            sequence_length=1024,
            batch_size=2,
            schedule="linear",
            final_fraction=0.0,
        ),
    )
    return config
