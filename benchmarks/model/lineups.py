"""Parameters of the models in configs/lineups/ beside the published ones, by shapes alone; ends
with 1 where a difference is not explained.

    python benchmarks/model/lineups.py
"""

import importlib
import sys

from benchmarks import harness
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.model.flops import parameter_counts

NAMES = sorted(
    path.stem
    for path in (harness.ROOT / "configs" / "lineups").glob("*.py")
    if path.stem != "lineup"
)


def counted(name: str) -> tuple[int, int, int, dict[str, int]]:
    """(parameters without multi-token prediction, those that a token passes without embeddings,
    the published number, what of it is not here).
    """
    file = importlib.import_module(f"configs.lineups.{name}")
    counts = parameter_counts(from_dict(Config, file.get_config().to_dict()).model)
    return counts.total - counts.mtp, counts.active, file.PUBLISHED, file.LACKS


def main() -> int:
    harness.arguments(__doc__).parse_args()
    harness.print_header("model", "parameters here", "active", "published", "what is not here")
    unexplained = 0
    for name in NAMES:
        here, active, published, lacks = counted(name)
        rest = published - here - sum(lacks.values())
        parts = [f"{what}: {number:+,}" for what, number in lacks.items()] + [
            f"**unexplained: {rest:+,}**"
        ] * (rest != 0)
        harness.print_row(
            f"`{name}`", f"{here:,}", f"{active:,}", f"{published:,}", "; ".join(parts)
        )
        unexplained += rest != 0
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
