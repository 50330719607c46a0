"""The scripts in examples/ run as their first lines say, and so does the notebook."""

import ast
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ARGUMENTS = {"one_page": ["20"]}  # steps, in place of 500


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs(script, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time goes into compiling
    }
    done = subprocess.run(
        [sys.executable, str(script), *ARGUMENTS.get(script.stem, [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells run one after another, and a cell that ends with a run or a model shows it. They
    leave nothing in the folder where they run.
    """
    here = tmp_path / "examples"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    shown, names = [], {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], "saved with outputs"
        assert cell["execution_count"] is None, "saved with outputs"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, "cell", "exec"), names)
            if last:
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    losses, run, model, *_, read_back = [value for value in shown if value is not None]
    assert losses[40] < losses[10]
    assert "&lt;svg" in run._repr_html_()  # a page in a frame
    assert len(repr(model)) < 5000
    assert read_back is True
    assert list(here.iterdir()) == []
