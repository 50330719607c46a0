"""Trains the recall task with two learning rates, and writes a page with the charts of both runs.

uv run python examples/compare_runs.py [FOLDER]
"""

import pathlib
import sys
import tempfile

import qwen3next_jax as qwen3next
from qwen3next_jax.reporting.page import write_report

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
runs = []
for rate in (1e-3, 3e-3):
    settings = {"optimizer.learning_rate": rate, "train.steps": 40, "train.log_every": 5}
    runs.append(qwen3next.train(qwen3next.load_config("mqar", settings), folder / f"rate_{rate}"))
for run in runs:
    print(run, "final loss", run.series("loss")[1][-1])
write_report([run.path for run in runs], folder / "report.html")
print(folder / "report.html")
