"""A run of three stages: the model of configs/tiny.py trains on short rows, then on rows four times
as long, then with a decaying learning rate.

    uv run train.py --config=configs/stages.py

Time: minutes on a laptop.
Result: "Trained 400 steps: held-out bits per byte 2.1956". The bits per byte are 2.3594 after the
first stage (on short rows) and 2.4502 after the second. The start of each stage is printed:
"step 251  stage long begins: 75 steps of 2 × 1,024 tokens; compiling for it".

Stages on the command line:

    --config.train.steps=300 \\
    "--config.train.stages=({'steps': 250}, {'steps': 50, 'schedule': 'linear'})"

docs/reliability.md says what a stage can set, and what may change when a run resumes.
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
