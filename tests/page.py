"""The examples of docs/extending.md and README.md, which tests run as they stand there."""

import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "extending.md", ROOT / "README.md"


def example(name: str, folder: pathlib.Path, page: pathlib.Path = PAGE) -> str:
    """Writes the page's file `name` into `folder`, from which the next import of it reads; its
    code.
    """
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if block.startswith(f"# {name}\n")
    )
    (folder / name).write_text(code)
    sys.modules.pop(name.removesuffix(".py"), None)  # another test's, of another folder
    importlib.invalidate_caches()
    return code


def line(table: str) -> tuple[str, str]:
    """(name, import string) that the page adds to `table`."""
    return re.search(rf'{table} = {{\.\.\., "(\w+)": "([\w:]+)"}}', PAGE.read_text()).groups()
