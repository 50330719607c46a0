"""The house rules that a reader relies on: which part may import which."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "qwen3next_jax"

# Small modules of the standard library's kind, which every part but `ops` may import.
FLOOR = {"children", "digests", "durable", "errors", "jsonfile", "trees"}
# part → the other parts it may import. Commands at the top of the package may import everything
# below them.
ARROWS = dict.fromkeys(FLOOR, set()) | {
    "config": set(),
    "config_files": {"config", "data"},
    "ops": set(),
    "model": {"ops", "parallel", "config"},
    "parallel": {"ops", "config"},
    "data": {"config"},
    "interop": {"model", "parallel", "config"},
    "inference": {"data", "model", "parallel", "ops", "config"},
    "evals": {"reporting", "inference", "model", "parallel", "config", "data"},
    "reporting": set(),
    "sweeps": {
        "config_files",
        "training",
        "reporting",
        "data",
        "evals",
        "inference",
        "model",
        "config",
    },
    "training": {
        "reporting",
        "data",
        "evals",
        "inference",
        "interop",
        "model",
        "ops",
        "parallel",
        "config",
    },
    "planner": {"training", "model", "ops", "parallel", "config"},
}
LIBRARIES_OF_OPS = {"jax", "numpy"}
# Present on every machine that trains, but not on every one that only loads a model.
ONLY_IN = {
    "grain": {"qwen3next_jax/data/pipeline.py"},
    "ml_collections": set(),
    "lm_eval": {"qwen3next_jax/evals/harness.py", "qwen3next_jax/harness.py"},
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
    allowed = {part} | ARROWS.get(part, set()) | (FLOOR if part != "ops" else set())
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
