"""How much of the house a reader meets: what three steps of configs/tiny.py load, how long lines
of code are, circles of files, and how many functions take the whole configuration.

    python benchmarks/house.py            # prints a table
"""

import argparse
import ast
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Container

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "qwen3next_jax"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
RUN = """
import sys, pathlib
sys.argv = ["train.py", "--config=configs/tiny.py", "--workdir={folder}/run",
            "--config.train.steps=3", "--config.eval.sample_tokens=0"]
from qwen3next_jax.__main__ import run
try:
    run("train", sys.argv[1:])
finally:
    names = sorted(n for n in sys.modules if n.split(".")[0] == "qwen3next_jax")
    pathlib.Path("{folder}/modules").write_text("\\n".join(names))
"""


def code(path: pathlib.Path) -> tuple[int, int]:
    """(tokens of code, lines that hold any) of a file; comments and docstrings do not count."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NOT_CODE and token.start not in docstrings
    ]
    return len(tokens), len({token.start[0] for token in tokens})


def imports(path: pathlib.Path, modules: Container[str]) -> set[str]:
    """Which of `modules` a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if name in modules}
            found |= submodules if len(submodules) == len(names) else submodules | {node.module}
    return {name for name in found if name in modules}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles() -> list[list[str]]:
    """Files that import each other in a circle (Tarjan's strongly connected components)."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {
        name: sorted(imports(path, files) - {name})
        for name, path in files.items()
        if path.name != "__main__.py"
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def loaded_modules() -> list[pathlib.Path]:
    """The files of the package that three steps of the tiny configuration load."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", RUN.format(folder=folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        names = pathlib.Path(folder, "modules").read_text().split()
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    return [files[name] for name in names if name in files]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    loaded = loaded_modules()
    everything = sorted(PACKAGE.rglob("*.py"))
    tokens_loaded = sum(code(path)[0] for path in loaded)
    tokens, lines = (sum(counts) for counts in zip(*map(code, everything), strict=True))
    whole = sum(len(re.findall(r"\bconfig: Config\b", path.read_text())) for path in everything)
    found = circles()
    print(f"modules loaded by three tiny steps   {len(loaded):,}")
    print(f"tokens of code in them               {tokens_loaded:,}")
    print(f"tokens of code in the package        {tokens:,}")
    print(f"tokens per line of code              {tokens / lines:.1f}")
    print(f"`config: Config` in the package      {whole}")
    print(f"circles of files                     {len(found)}")
    for group in found:
        print("   ", " ".join(group))


if __name__ == "__main__":
    main()
