"""The rules that a reader relies on: which subpackage may import which, and no circles."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "qwen3next_jax"

# subpackage → the others that its files may import, at their top or inside a function. Commands,
# and the package's own __main__, may import everything.
ARROWS = {
    "common": "",
    "config": "common",
    "ops": "",
    "kernels": "ops",
    "sharding": "ops config common",
    "data": "config common",
    "model": "ops sharding config common",
    "zoo": "ops sharding model config common",
    "training": "model data sharding ops config common",
    "processes": "config common",
    "interop": "model sharding processes config common",
    "inference": "model data sharding ops config common",
    "reporting": "common",
    "evals": "inference reporting model data sharding config common",
    "runs": "training evals inference interop processes reporting model data sharding config "
    "common",
    "planner": "training model ops sharding config common",
    "trained": "runs training interop processes data model sharding config common",
    "sweeps": "runs training evals inference reporting data model config common",
    "commands": None,
    "__main__": None,
    "__init__": "",
}
# The subpackages that the core trains without. A run imports them inside a function, where a
# setting asks for them, or not at all.
OPTIONAL = "evals inference interop kernels planner reporting sweeps trained zoo".split()
LIBRARIES_OF_OPS = {"jax", "numpy"}
# Present on every machine that trains, but not on every one that only loads a model.
ONLY_IN = {
    "grain": {"data/pipeline.py"},
    "ml_collections": set(),
    "lm_eval": {"evals/harness.py", "commands/harness.py"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: pathlib.Path) -> str:
    """ "model.block" of model/block.py, "model" of model/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in FILES}


def _imports(path: pathlib.Path, at_top: bool = False) -> set[str]:
    """Full names of the modules that a file imports, at its top or inside a function, or only
    `at_top`; of a name that is no module, the module that it comes from.
    """
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix("qwen3next_jax.") in MODULES
                found.add(name if is_module or node.module == "qwen3next_jax" else node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_follow_the_arrows(path):
    subpackage, relative = _module(path).split(".")[0], str(path.relative_to(PACKAGE))
    assert subpackage in ARROWS, f"{subpackage} has no line in ARROWS"
    allowed = ARROWS[subpackage]
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "qwen3next_jax" and allowed is not None:
            assert rest.split(".")[0] in {subpackage, *allowed.split()}, (
                f"{relative} imports {name}"
            )
        if subpackage == "ops" and top not in LIBRARIES_OF_OPS | {"qwen3next_jax"}:
            assert top in sys.stdlib_module_names, f"{relative} imports {name}"
        assert relative in ONLY_IN.get(top, {relative}), f"{relative} imports {name}"


def _imports_at_top() -> dict[str, set[str]]:
    """Returns module → the modules of this package that it imports at its top."""
    return {
        name: {i.removeprefix("qwen3next_jax.") for i in _imports(path, at_top=True)}
        & MODULES.keys()
        for name, path in MODULES.items()
    }


def test_texts_of_bytes_load_no_chat_files():
    loaded = {
        name.removeprefix("data.") for name in _reachable(_imports_at_top(), "commands.train")
    }
    assert "pipeline" in loaded
    assert not loaded & {"conversations", "chat_template", "huggingface_tokenizer", "fast_bpe"}


def test_the_core_imports_nothing_optional():
    """Importing a file of the core, or the command that trains, loads no optional subpackage."""
    graph = _imports_at_top()
    outside = {*OPTIONAL, "commands", "__main__"}
    core = [name for name in graph if name.split(".")[0] not in outside]
    for name in (*core, "commands.train"):
        loaded = {other for other in _reachable(graph, name) if other.split(".")[0] in OPTIONAL}
        assert not loaded, name


def test_no_files_import_each_other_in_a_circle():
    graph = {
        name: {i.removeprefix("qwen3next_jax.") for i in _imports(path)} & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }
    reached = {name: _reachable(graph, name) for name in graph}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    assert not circles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        for name in graph[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found


def test_one_file_of_the_library_knows_the_kernels():
    """And no layer names a chip."""
    for path in FILES:
        subpackage, text = path.relative_to(PACKAGE).parts[0], path.read_text()
        if subpackage != "kernels" and path != PACKAGE / "ops" / "implementations.py":
            assert "qwen3next_jax.kernels" not in text, path
        if subpackage == "model":
            for name in ("default_backend", "platform_dependent", "tpu(", ".platform"):
                assert name not in text, (path, name)


def test_one_file_of_a_run_asks_where_its_folder_is():
    """It makes the `RunStore`; everything else takes a disk and a bucket alike."""
    asking = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if re.search(r"isinstance\([^)]*BucketPath", path.read_text())
        and path.relative_to(PACKAGE).parts[0] in ("runs", "processes", "training", "commands")
    }
    assert asking == {"runs/store/__init__.py"}


def test_configs_import_only_the_defaults_and_each_other():
    for path in (ROOT / "configs").rglob("*.py"):
        for name in _imports(path):
            assert name in ("ml_collections", "qwen3next_jax.config") or name.startswith(
                "configs"
            ), f"{path.name} imports {name}"


# Files of the zoo that several families share; every other one is a family.
SHARED_IN_ZOO = {
    "attention_references",
    "biased_projections",
    "ops",
    "pair_mixer",
    "projections",
    "references",
}


def test_families_of_the_zoo_stand_alone():
    """`config/registry.py` names families, and nothing else does."""
    for path in FILES:
        inside = path.is_relative_to(PACKAGE / "zoo")
        for name in _imports(path):
            if not name.startswith("qwen3next_jax.zoo"):
                continue
            assert inside, f"{path.name} imports {name}"
            assert name.split(".")[2] in SHARED_IN_ZOO, f"{path.name} imports {name}"
