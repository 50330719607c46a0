"""The old place of `zoo.pair_mixer`, whose base class has another name and other declarations."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Pairwise":
        raise ImportError(
            "Pairwise is now qwen3next_jax.zoo.pair_mixer.PairAttention; docs/extending.md says "
            "what a subclass declares"
        )
    raise AttributeError(name)
