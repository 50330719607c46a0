"""The house rules that a reader relies on: which part may import which."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "qwen3next_jax"

# room → the other rooms it may import. Commands may import everything.
ARROWS = {
    "__main__": {"commands", "common"},
    "common": set(),
    "config": {"common", "data", "runs"},
    "ops": set(),
    "sharding": {"ops", "config", "common"},
    "data": {"config", "common"},
    "model": {"ops", "sharding", "config", "common"},
    "zoo": {"ops", "sharding", "model", "config", "common"},
    "training": {"model", "data", "sharding", "config", "common", "evals"},
    "processes": {"config", "common", "runs"},
    "interop": {"model", "sharding", "processes", "config", "common"},
    "inference": {"data", "model", "sharding", "ops", "config", "common"},
    "reporting": {"common"},
    "evals": {
        "reporting",
        "inference",
        "model",
        "data",
        "sharding",
        "processes",
        "config",
        "common",
    },
    "runs": {
        *("training", "evals", "inference", "interop", "processes", "reporting"),
        *("model", "data", "sharding", "config", "common"),
    },
    "planner": {"runs", "training", "model", "ops", "sharding", "config", "common"},
    "sweeps": {
        *("training", "evals", "inference", "reporting", "model", "data", "config", "common"),
    },
}
LIBRARIES_OF_OPS = {"jax", "numpy"}
# Present on every machine that trains, but not on every one that only loads a model.
ONLY_IN = {
    "grain": {"qwen3next_jax/data/pipeline.py"},
    "ml_collections": set(),
    "lm_eval": {"qwen3next_jax/evals/harness.py", "qwen3next_jax/commands/harness.py"},
}


def _imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module == "qwen3next_jax"  # of which parts are imported as names
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names)
                if package
                else [node.module or ""]
            )


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = {part} | ARROWS.get(part, set())
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "qwen3next_jax" and rest and part in ARROWS:
            assert rest.split(".")[0] in allowed, f"{path.name} imports {name}"
        if part == "ops" and top not in LIBRARIES_OF_OPS | {"qwen3next_jax"}:
            assert top in __import__("sys").stdlib_module_names, f"{path.name} imports {name}"
        assert str(path.relative_to(ROOT)) in ONLY_IN.get(top, {str(path.relative_to(ROOT))}), (
            f"{path.name} imports {name}"
        )


def test_configs_import_only_the_defaults_and_each_other():
    for path in (ROOT / "configs").rglob("*.py"):
        for name in _imports(path):
            assert name in ("ml_collections", "qwen3next_jax.config") or name.startswith(
                "configs"
            ), f"{path.name} imports {name}"


# Files of the zoo that several families share; every other one is a family.
SHARED_IN_ZOO = {"attention_references", "ops", "pair_mixer", "projections", "references"}


def test_a_family_of_the_zoo_imports_no_other_and_nobody_imports_a_family():
    """`config/registry.py` names families, and nothing else does."""
    for path in FILES:
        inside = path.is_relative_to(PACKAGE / "zoo")
        for name in _imports(path):
            if not name.startswith("qwen3next_jax.zoo"):
                continue
            assert inside, f"{path.name} imports {name}"
            assert name.split(".")[2] in SHARED_IN_ZOO, f"{path.name} imports {name}"
