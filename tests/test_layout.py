"""The house rules that a reader relies on: which part may import which, and no file that has grown out of hand."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "qwen3next_jax"

# part → the parts it may import. Commands at the top of the package may import everything below them.
ARROWS = {
    "errors": set(),
    "jsonfile": set(),
    "config": {"errors"},
    "ops": set(),
    "model": {"ops", "parallel", "config", "errors"},
    "parallel": {"config", "errors"},
    "data": {"config", "errors", "jsonfile"},
    "interop": {"model", "config", "errors", "jsonfile"},
    "inference": {"model", "ops", "config", "errors"},
    "evals": {"inference", "model", "ops", "config", "errors", "data"},
    "reporting": {"errors", "jsonfile"},
    "sweeps": {"reporting", "data", "evals", "inference", "model", "config", "errors", "jsonfile"},
    "training": {"reporting", "data", "evals", "inference", "interop", "model", "ops", "parallel", "config", "errors", "jsonfile"},
    "planner": {"training", "model", "ops", "parallel", "config", "errors"},
}
LIBRARIES_OF_OPS = {"jax", "numpy", "tokamax"}
# Present on every machine that trains, but not on every one that only loads a model.
ONLY_IN = {"grain": {"qwen3next_jax/data/pipeline.py"}, "ml_collections": set(),
           "lm_eval": {"qwen3next_jax/evals/harness.py", "qwen3next_jax/harness.py"}}


def _imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "qwen3next_jax" and rest and part in ARROWS:
            target = rest.split(".")[0]
            assert target == part or target in ARROWS[part], f"{path.name} imports {name}"
        if part == "ops" and top not in LIBRARIES_OF_OPS | {"qwen3next_jax"}:
            assert top in __import__("sys").stdlib_module_names, f"{path.name} imports {name}"
        assert str(path.relative_to(ROOT)) in ONLY_IN.get(top, {str(path.relative_to(ROOT))}), f"{path.name} imports {name}"


def test_configs_import_only_the_defaults_and_each_other():
    for path in (ROOT / "configs").rglob("*.py"):
        for name in _imports(path):
            assert name in ("ml_collections", "qwen3next_jax.config") or name.startswith("configs"), f"{path.name} imports {name}"


def test_one_concept_per_file():
    for path in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 450, f"{path.relative_to(ROOT)} is over 450 lines: split it"
