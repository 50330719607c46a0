"""Checks that this code computes the modules of a run's model in the same way as the code that
trained the run.

The class of a module has a `version`, which is increased if the module computes another function of
its weights than before. run.json holds the versions of the modules of the run's model. Weights that
were trained with another version would give other results without an error, so they are refused.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig


def check_versions(where: pathlib.Path, record: Mapping[str, Any], model: ModelConfig) -> None:
    """Checks that this code computes the modules of a run's model in the same way as the code that
    trained the run.

    Args:
      where: the folder of the record, for messages.
      record: the content of run.json or dump.json; the keys "versions" and "code" are read.
      model: the model of the recorded run.

    Raises:
      UserError: a version differs.
    """
    from qwen3next_jax.model.layer_properties import versions

    code = record["code"]
    advice = "use the run with that code, or train anew in another --workdir"
    for name, version in versions(model).items():
        theirs = record["versions"].get(name, 1)
        require(
            theirs == version,
            f"{where}: its model was trained with version {theirs} of {name} (code {code}), and "
            f"this code has version {version}, with other mathematics: {advice}",
        )
