"""Checks that this code computes the modules of a run's model in the same way as the code that
trained the run.

The class of a module of the model has a number `version`, which increases when the module begins to
compute another function of its weights. run.json holds the versions of the modules of the run's
model. If the code has another version of a module than run.json, the trained weights would give
other results without any message, so loading the weights is an error.
"""

import pathlib
from collections.abc import Mapping

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig


def check_module_versions(
    where: pathlib.Path, recorded: Mapping[str, int], code: str, model: ModelConfig
) -> None:
    """Checks that this code computes the modules of a run's model in the same way as the code that
    trained the run.

    Args:
      where: the folder of the record, for messages.
      recorded: name of a module → its version, as run.json or dump.json has them.
      code: the version of the code that trained the run.
      model: the model of the recorded run.

    Raises:
      UserError: a version differs.
    """
    from qwen3next_jax.model.layer_properties import part_versions

    advice = "use the run with that code, or train anew in another --workdir"
    for name, version in part_versions(model).items():
        recorded_version = recorded.get(name, 1)
        require(
            recorded_version == version,
            f"{where}: its model was trained with version {recorded_version} of {name} (code "
            f"{code}), and this code has version {version}, with other mathematics: {advice}",
        )
