"""The examples of docs/extending.md, which tests run as they stand there."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "extending.md"


def example(name: str, folder: pathlib.Path) -> str:
    """Writes the page's file `name` into `folder`; its code."""
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if block.startswith(f"# {name}\n")
    )
    (folder / name).write_text(code)
    return code


def line(table: str) -> tuple[str, str]:
    """(name, import string) that the page adds to `table`."""
    return re.search(rf'{table} = {{\.\.\., "(\w+)": "([\w:]+)"}}', PAGE.read_text()).groups()
