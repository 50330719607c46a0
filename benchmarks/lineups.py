"""Parameters of the models in configs/lineups/ beside the published ones, by shapes alone; ends
with 1 where a difference is not explained.

python benchmarks/lineups.py
"""

import argparse
import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from qwen3next_jax.config import Config, from_dict  # noqa: E402
from qwen3next_jax.model.flops import parameter_counts  # noqa: E402

NAMES = sorted(
    path.stem for path in (ROOT / "configs" / "lineups").glob("*.py") if path.stem != "lineup"
)


def counted(name: str) -> tuple[int, int, int, dict[str, int]]:
    """(parameters without multi-token prediction, those that a token passes without embeddings,
    the published number, what of it is not here).
    """
    file = importlib.import_module(f"configs.lineups.{name}")
    counts = parameter_counts(from_dict(Config, file.get_config().to_dict()).model)
    return counts.total - counts.mtp, counts.active, file.PUBLISHED, file.LACKS


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(
        "| model | parameters here | active | published | what is not here |\n|---|---|---|---|---|"
    )
    unexplained = 0
    for name in NAMES:
        here, active, published, lacks = counted(name)
        rest = published - here - sum(lacks.values())
        parts = [f"{what}: {number:+,}" for what, number in lacks.items()] + [
            f"**unexplained: {rest:+,}**"
        ] * (rest != 0)
        print(
            f"| `{name}` | {here:,} | {active:,} | {published:,} | {'; '.join(parts)} |", flush=True
        )
        unexplained += rest != 0
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
