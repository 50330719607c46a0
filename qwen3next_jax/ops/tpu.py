"""The TPU that is compiled for."""

from jax.experimental.pallas import tpu as pltpu


def tpu():
    """Its `TpuInfo`, figures of one core: of this process, or described by
    `jax.sharding.use_abstract_mesh`. None where neither is.
    """
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return None
