"""Preparation by datatrove's executors: workers are killed, and the same or another number of tasks
continues. SLURM's three commands are replaced by scripts that run the tasks on this machine.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data import preparation, sources
from qwen3next_jax.data.tokens import load_tokenizer

pytest.importorskip("datatrove", reason="needs the extra prepare")
pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = """
    import json, sys
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
    from qwen3next_jax.config import DataConfig
    from qwen3next_jax.data.datatrove_step import PrepareShare

    if __name__ == "__main__":
        arguments = json.loads(sys.argv[1])
        step = PrepareShare(DataConfig(**arguments["data"]), 64)
        if arguments["slurm"]:
            SlurmPipelineExecutor(
                [step], tasks=arguments["tasks"], time="1:00:00", partition="cpu",
                logging_dir=arguments["logs"],
            ).run()
        else:
            LocalPipelineExecutor(
                [step], tasks=arguments["tasks"], workers=2, logging_dir=arguments["logs"],
            ).run()
"""
# Runs the tasks of the array at once, without waiting for them, as a cluster does. The marker file
# LOST names tasks that are killed when they begin: their nodes are lost.
SBATCH = """\
    #!{python}
    import os, pathlib, re, subprocess, sys
    script = pathlib.Path(sys.argv[-1]).read_text()
    name = re.search(r"--job-name=(.*)", script)[1]
    if name == "data_processing" and "merge_stats" not in script:
        last = int(re.search(r"--array=0-([0-9]+)", script)[1])
        copy = pathlib.Path("{folder}/job.sh")
        copy.write_text(script)
        for task in range(last + 1):
            env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task), SLURM_NODELIST="node0",
                       SLURM_JOB_ID="7", RUN_OFFSET="0")
            with open(f"{folder}/task-{{task}}.log", "a") as log:
                subprocess.Popen(["bash", copy], env=env, stdout=log, stderr=log,
                                 start_new_session=True)
    print("Submitted batch job 7")
"""
SRUN = """\
    #!{python}
    import os, pathlib, signal, subprocess, sys, time
    lost = pathlib.Path("{folder}/lost").read_text().split()
    command = sys.argv[sys.argv.index("launch_pickled_pipeline"):]
    command[0] = "{bin}/launch_pickled_pipeline"
    child = subprocess.Popen(command, start_new_session=True)
    if os.environ["SLURM_ARRAY_TASK_ID"] in lost:
        tokens = pathlib.Path("{folder}/prepared/tokens")
        while child.poll() is None and not list(tokens.glob("*/*")):
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
    sys.exit(child.wait() != 0)
"""
SCONTROL = """\
    #!/bin/sh
    echo node0
"""


@pytest.fixture
def corpus(tmp_path):
    """Twelve files; returns the settings of the data, and the bytes of an undisturbed run."""
    random = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for number in range(12):
        lines = (
            json.dumps({"text": " ".join(map(str, random.integers(0, 10**6, 400)))})
            for _ in range(400)
        )
        (tmp_path / "texts" / f"{number}.jsonl").write_text("\n".join(lines))
    data = {"path": f"{tmp_path}/texts/*.jsonl", "prepared_dir": f"{tmp_path}/prepared"}
    alone = DataConfig(**data)
    preparation.prepare(
        [sources.find_source_of_glob(alone.path, "text")],
        load_tokenizer("bytes"),
        preparation.RowRecipe(64, alone.heldout_fraction, alone.seed),
        tmp_path / "undisturbed",
        workers=1,
    )
    return data, _files(tmp_path / "undisturbed")


def _files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.parent.name not in ("digests", "indexes")
        # what a killed process left is removed an hour later
        and ".partial" not in str(path)
    }


def _launch(tmp_path, environment=None, **arguments):
    script = tmp_path / "launch.py"
    script.write_text(textwrap.dedent(LAUNCH))
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    return subprocess.Popen(
        [sys.executable, script, json.dumps(arguments)],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_killed_workers_and_another_number_of_tasks(corpus, tmp_path):
    data, undisturbed = corpus
    prepared = tmp_path / "prepared"
    for tasks in (2, 3, 5):
        before = len(list(prepared.glob("tokens/*/*.json")))
        process = _launch(
            tmp_path, data=data, tasks=tasks, slurm=False, logs=f"{tmp_path}/logs-{tasks}"
        )
        while len(list(prepared.glob("tokens/*/*.json"))) == before and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert 0 < len(list(prepared.glob("tokens/*/*.json"))) < 12, "no kill came in between"
    last = _launch(tmp_path, data=data, tasks=4, slurm=False, logs=f"{tmp_path}/logs-4")
    assert last.wait() == 0
    assert _files(prepared) == undisturbed


def test_an_array_that_lost_nodes_is_resubmitted(corpus, tmp_path):
    data, undisturbed = corpus
    commands = tmp_path / "bin"
    commands.mkdir()
    names = {
        "python": sys.executable,
        "folder": tmp_path,
        "bin": pathlib.Path(sys.executable).parent,
    }
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(textwrap.dedent(text).format(**names))
        (commands / name).chmod(0o755)
    environment = {"PATH": f"{commands}:{names['bin']}:{os.environ['PATH']}"}
    logs = tmp_path / "logs"

    def submit(lost):
        (tmp_path / "lost").write_text(lost)
        launched = _launch(tmp_path, environment, data=data, tasks=4, slurm=True, logs=str(logs))
        assert launched.wait() == 0
        _wait_for_tasks(tmp_path)
        return sorted(int(path.name) for path in (logs / "completions").glob("*"))

    assert submit("1 2") == [0, 3]
    assert not list(tmp_path.glob("prepared/rows/*"))
    assert submit("") == [0, 1, 2, 3]
    assert _files(tmp_path / "prepared") == undisturbed


def _wait_for_tasks(folder, seconds=300):
    """Waits until no process runs the job's script."""
    end = time.monotonic() + seconds
    pattern = str(folder / "job.sh")
    while subprocess.run(["pgrep", "-f", pattern], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < end, "the tasks do not end"
        time.sleep(0.1)
