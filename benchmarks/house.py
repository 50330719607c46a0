"""How much of the house a reader meets, for one checkout or several side by side.

    python benchmarks/house.py                            this checkout
    python benchmarks/house.py --root=BEFORE --root=.     a column for each

Three steps of configs/tiny.py say which files a run loads, and how many calls of functions hand on
the whole `Config`. Tests are counted by pytest's collection; words are those of Markdown files.
Lines are all lines of a file. A figure that a checkout cannot give is "–": the reason goes to
standard error.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container

from benchmarks import harness

PACKAGE = "qwen3next_jax"
LONG = 100  # lines of a function
RUN = """
import pathlib, sys
from {package}.config import Config
handed = []

def on_call(code, offset):
    if not code.co_filename.startswith({folder!r}):
        return sys.monitoring.DISABLE
    values = sys._getframe(1).f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(isinstance(values.get(name), Config) for name in names):
        handed.append(code.co_filename)

sys.monitoring.use_tool_id(3, "house")
sys.monitoring.register_callback(3, sys.monitoring.events.PY_START, on_call)
sys.monitoring.set_events(3, sys.monitoring.events.PY_START)
from {package}.__main__ import run_verb
try:
    run_verb("train", ["--config=configs/tiny.py", "--workdir={out}/run", "--config.train.steps=3",
                  "--config.eval.sample_tokens=0", "--config.data.prepared_dir={out}/prepared"])
finally:
    sys.monitoring.set_events(3, 0)
    names = sorted(n for n in sys.modules if n.split(".")[0] == "{package}")
    pathlib.Path("{out}/modules").write_text("\\n".join(names))
    pathlib.Path("{out}/handed").write_text("\\n".join(handed))
"""


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


class House:
    """One checkout."""

    def __init__(self, root: pathlib.Path):
        self.root = root.resolve()
        self.files = {
            self.module_name(path): path for path in sorted((self.root / PACKAGE).rglob("*.py"))
        }

    def module_name(self, path: pathlib.Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def room(self, path: pathlib.Path) -> str:
        parts = path.relative_to(self.root / PACKAGE).parts
        return parts[0] if len(parts) > 1 else "(top)"

    def python(self, *words: str) -> str:
        """What Python prints in this checkout; "" if it fails, whose reason is printed here."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            print(f"{self.root}: {said[-1000:]}", file=sys.stderr)
        return "" if done.returncode else done.stdout

    def figures(self) -> dict[str, str]:
        """Name → figure, in the order of the table."""
        return (
            self.of_a_run()
            | self.of_the_package()
            | self.of_tests()
            | self.of_documents_and_bytes()
        )

    def of_a_run(self) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as out:
            program = RUN.format(package=PACKAGE, folder=f"{self.root}/{PACKAGE}", out=out)
            self.python("-c", program)
            try:
                names = pathlib.Path(out, "modules").read_text().split()
                handed = pathlib.Path(out, "handed").read_text().splitlines()
            except OSError:
                return {}
        loaded = [self.files[name] for name in names if name in self.files]
        by_room: Counter[str] = Counter()
        for path in loaded:
            by_room[self.room(path)] += lines(path)
        return {
            "files loaded by three tiny steps": f"{len(loaded):,}",
            "lines in them": f"{by_room.total():,}",
            **{f"… of {room}": f"{count:,}" for room, count in by_room.most_common()},
            "calls that hand on the whole Config": f"{len(handed):,}",
            "… in files": f"{len(set(handed)):,}",
        }

    def of_the_package(self) -> dict[str, str]:
        by_room: Counter[str] = Counter()
        for path in self.files.values():
            by_room[self.room(path)] += lines(path)
        texts = [path.read_text() for path in self.files.values()]
        whole = sum(len(re.findall(r"\bconfig: Config\b", text)) for text in texts)
        found = self.circles()
        for group in found:
            print(f"{self.root}: a circle:", *group, file=sys.stderr)
        return {
            "files of the package": f"{len(self.files):,}",
            "lines of the package": f"{by_room.total():,}",
            **{f"lines of {room}": f"{by_room[room]:,}" for room in sorted(by_room)},
            "`config: Config` in the package": f"{whole:,}",
            "circles of files": f"{len(found):,}",
            **{
                f"functions above {LONG} lines in {folder}": f"{len(self.long_functions(folder)):,}"
                for folder in (PACKAGE, "benchmarks", "tests", "examples")
            },
        }

    def long_functions(self, folder: str) -> list[str]:
        return [
            f"{path.relative_to(self.root)}: {node.name}"
            for path in sorted((self.root / folder).rglob("*.py"))
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > LONG
        ]

    def of_tests(self) -> dict[str, str]:
        """How many tests pytest collects, by marks."""
        marks = {"tests of the default suite": "not slow", "slow tests": "slow"}
        collect = ("-m", "pytest", "tests", "--collect-only", "-p", "no:cacheprovider")
        found = {}
        for name, mark in marks.items():
            match = re.search(r"(\d+)(?:/\d+)? tests collected", self.python(*collect, "-m", mark))
            found[name] = f"{int(match[1]):,}" if match else "–"
        found["lines of tests"] = f"{sum(map(lines, (self.root / 'tests').rglob('*.py'))):,}"
        return found

    def of_documents_and_bytes(self) -> dict[str, str]:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout
        tracked = [self.root / name for name in listed.split("\0") if name]
        tracked = [path for path in tracked if path.is_file()]
        pages = [path for path in tracked if path.suffix == ".md"]
        inside = lambda paths, *parts: [
            path for path in paths if path.is_relative_to(self.root.joinpath(*parts))
        ]
        size = lambda paths: f"{sum(path.stat().st_size for path in paths):,}"
        docs, notes = inside(pages, "docs"), inside(pages, "docs", "notes")
        benchmarks = [path for path in inside(tracked, "benchmarks") if path.suffix == ".py"]
        return {
            "words of README.md": f"{words(self.root / 'README.md'):,}",
            "words of docs, without notes": f"{sum(map(words, set(docs) - set(notes))):,}",
            "words of docs/notes": f"{sum(map(words, notes)):,}",
            "notes": f"{len(notes):,}",
            "files of benchmarks": f"{len(benchmarks):,}",
            "lines of benchmarks": f"{sum(map(lines, benchmarks)):,}",
            "tracked files": f"{len(tracked):,}",
            "tracked bytes": size(tracked),
            "… of tests/fixtures": size(inside(tracked, "tests", "fixtures")),
            "… of docs": size(inside(tracked, "docs")),
        }

    def circles(self) -> list[list[str]]:
        """Files that import each other in a circle (Tarjan's strongly connected components)."""
        graph = {
            name: sorted(imports(path, self.files) - {name})
            for name, path in self.files.items()
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


def lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def words(path: pathlib.Path) -> int:
    return len(path.read_text().split())


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--root", action="append", type=pathlib.Path, help="a checkout; default: this one"
    )
    parser.add_argument("--long", action="store_true", help="name the long functions instead")
    args = parser.parse_args()
    houses = [House(root) for root in args.root or [harness.ROOT]]
    if args.long:
        for house in houses:
            for folder in (PACKAGE, "benchmarks", "tests", "examples"):
                print(*house.long_functions(folder), sep="\n")
        return
    columns = [house.figures() for house in houses]
    harness.print_header("", *(str(house.root.name) for house in houses))
    for name in dict.fromkeys(name for column in columns for name in column):
        harness.print_row(name, *(column.get(name, "–") for column in columns))


if __name__ == "__main__":
    main()
