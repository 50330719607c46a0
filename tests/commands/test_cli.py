"""The commands as a user types them: mistakes cost one line and no compute."""

import ast
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from qwen3next_jax.commands import config_flags
from qwen3next_jax.commands.help import help_on_word
from qwen3next_jax.commands.run_flags import parse_step_flag
from qwen3next_jax.common import installation
from qwen3next_jax.config import Config, Stage, default_config, from_dict
from qwen3next_jax.config.describe import list_settings
from qwen3next_jax.config.files import apply_overrides, load_config_file
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.runs.vocabulary import fill_vocabulary_from_tokenizer
from qwen3next_jax.sweeps.points import load_sweep
from tests.records import record
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[2]
TINY = "--config=configs/tiny.py"
UNREAD = "--config.eval.suite_rows=3"
HF = "tests/fixtures/qwen3_next_tiny"
GENERATE = ("-m", "qwen3next_jax", "generate", "--prompt=x")


def _run(*command, input=None, **environment):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        input=input,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("text", ["bset", "-1", "1e3", "", "٣"])
def test_a_step_is_a_number_or_best(text):
    assert [parse_step_flag(given) for given in (None, "0", "500", "best")] == [
        None,
        0,
        500,
        "best",
    ]
    with refused(f"--step={text}", "best"):
        parse_step_flag(text)


# command → what the one line names with which it ends
MISTAKES = [
    (["train.py", "--config=configs/tiny.py", "--workdir="], ("--workdir=''",)),
    (["train.py"], ("--config", "--config=configs/tiny.py")),
    (
        ["train.py", TINY, "--config.train.stesp=5"],
        ("--config.train.stesp", "'steps'"),
    ),
    (
        ["train.py", TINY, "--config.train.steps", "many"],
        ("--config.train.steps=many",),
    ),
    (
        ["train.py", TINY, "--config.train=5"],
        ("--config.train",),
    ),
    (["train.py", TINY, "--workdri=x"], ("--workdri", "--workdir")),
    (
        ["train.py", TINY, "--learning_rate=1"],
        ("--learning_rate", "--config.optimizer.learning_rate=…"),
    ),
    (
        ["train.py", TINY, "--config.learning_rate=1"],
        ("--config.learning_rate", "--config.optimizer.learning_rate=…"),
    ),
    (
        ["train.py", TINY, "--config.train.learning_rate=1"],
        ("--config.train.learning_rate", "--config.optimizer.learning_r"),
    ),
    (
        ["train.py", TINY, "--config.lora.rank=1"],
        ("--config.lora", "--config.model.lora.rank=…"),
    ),
    (
        ["train.py", TINY, "--config.model.lora_rank=1"],
        ("--config.model.lora_rank", "--config.model.lora.rank=…"),
    ),
    (
        ["train.py", "--help", "lerning"],
        ("--help", "'learning_rate'"),
    ),
    (["train.py", "--help=lerning"], ("--help lerning", "'learning_rate'")),
    (["train.py", TINY, "--dry-run=maybe"], ("--dry-run=maybe: expected true or false",)),
    (
        ["train.py", "--config=configs/tiy.py"],
        ("--config=configs/tiy.py", "'tiny.py'"),
    ),
    (["train.py", "--config=configs"], ("--config=configs",)),
    (["-m", "qwen3next_jax", "plan", TINY, UNREAD], ("eval.suite_rows = 3",)),
    (["eval.py", TINY, UNREAD, f"--workdir={HF}"], ("eval.suite_rows = 3",)),
    (["train.py", TINY, "steps=5"], ("'steps=5'",)),
    (
        ["train.py", TINY, "--config.model.num_experts_per_tok=9"],
        ("model.num_experts_per_tok = 9", "1", "model.num_experts = 8"),
    ),
    (
        ["train.py", TINY, "--config.data.path=nowhere/*.txt"],
        ("data.path 'nowhere/*.txt'", "'nowhere'"),
    ),
    (
        ["train.py", TINY, "--config.eval.suite_rows=3"],
        ("eval.suite_rows = 3", "eval.suites"),
    ),
    (
        ["train.py", TINY, "--config.model.vocab_size=0", f"--config.name={'n' * 300}"],
        ("300", "255"),
    ),
    (
        ["train.py", TINY, "--config.name=../../evil"],
        ("name = '../../evil'", "'/'"),
    ),
    (["train.py", TINY, "--workdir=a\udcff\x1b[31m"], ("--workdir=a\\udcff\\x1b[31m",)),
    (["train.py", TINY, f"--config.train.init_from={'x' * 300}"], ("train.init_from = 'xxx",)),
    (["eval.py"], ("--workdir",)),
    (
        ["eval.py", "--workdir=docs", "--config.data.path=x"],
        ("--config", "--config.data.path"),
    ),
    (
        ["train.py", TINY, "--config.train.remat=keep=querys"],
        ("train.remat = 'keep=querys'", "'querys'"),
    ),
    (["eval.py", "--workdir=docs", "--suite=heldut"], ("--suite = 'heldut'",)),
    (
        ["eval.py", "--workdir=docs"],
        ("--workdir=docs",),
    ),
    (
        [*GENERATE, "--model=nowhere"],
        ("--model=nowhere",),
    ),
    (
        [*GENERATE, "--model=tests/fixtures/qwen3_nxt_tiny"],
        ("'qwen3_next_tiny'",),
    ),
    (
        [*GENERATE, "--model=nowhere", "--max_new_tokens=0"],
        ("--max_new_tokens=0", "0"),
    ),
    (
        [*GENERATE, "--model=tests/fixtures/qwen3_next_tiny", "--max_new_tokens=99999999"],
        ("512",),
    ),
    (
        [*GENERATE, "--model=nowhere", "--record_routing=/dev/null/x"],
        ("--record_routing=/dev/null/x", "/dev/null"),
    ),
    (
        [*GENERATE, "--model=nowhere", f"--record_routing={'x/' * 2500}"],
        ("5,064",),
    ),
    (
        [*GENERATE, "--model=nowhere", "--temperature=nan"],
        ("--temperature=nan",),
    ),
    (
        ["-m", "qwen3next_jax", "sweep", "configs/sweeps/mqar.py", "--set=train.stesp=3"],
        ("train.stesp",),
    ),
    (
        ["-m", "qwen3next_jax", "sweep", "configs/sweeps/mqar.py", "--set=train.learning_rate=3"],
        ("train.learning_rate", "'optimizer.learning_rate'"),
    ),
    (
        ["-m", "qwen3next_jax", "sweep", "configs/sweeps/mqar.py", "--set=eval.suite_lengths=0"],
        ("eval.suite_lengths = (0,)",),
    ),
    (
        ["-m", "qwen3next_jax", "sweep", "configs/sweeps/mqar.py", "--set=train.steps=many"],
        ("--set train.steps=many",),
    ),
    (["-m", "qwen3next_jax", "report", "nowhere"], ("nowhere",)),
    (
        ["-m", "qwen3next_jax", "export", "--workdir=nowhere", "--out=x"],
        ("--workdir=nowhere",),
    ),
    (
        ["-m", "qwen3next_jax", "export", f"--workdir={HF}", "--out=docs"],
        ("docs",),
    ),
    (
        ["-m", "qwen3next_jax", "merge", "x@1", "--out=docs", "--export"],
        ("docs",),
    ),
]

# Runs commands, each in a fork of one process that has loaded what all of them need.
FORKS = """
import json, os, runpy, sys
import qwen3next_jax.commands.cli
from tests.records import record
commands, folder = json.load(sys.stdin), sys.argv[1]
for number, command in enumerate(commands):
    if not os.fork():
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        is_module = command[0] == "-m"
        sys.argv = command[is_module:]
        run = runpy.run_module if is_module else runpy.run_path
        run(sys.argv[0], run_name="__main__")
        sys.exit()
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in commands]
print(set(codes))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(stdout, stderr) of each command in MISTAKES. All have the exit code 2. An import of JAX
    fails.
    """
    folder = tmp_path_factory.mktemp("answers")
    (folder / "jax.py").write_text("raise ImportError('JAX was loaded')")
    commands = json.dumps([command for command, _ in MISTAKES])
    path = os.pathsep.join((str(folder), str(ROOT)))
    done = _run("-c", FORKS, str(folder), input=commands, PYTHONPATH=path)
    assert done.stdout.strip() == "{2}", done.stdout + done.stderr
    return [
        [(folder / f"{number}.{stream}").read_text(errors="replace") for stream in (1, 2)]
        for number in range(len(MISTAKES))
    ]


@pytest.mark.parametrize(
    "number, names",
    [(number, names) for number, (_, names) in enumerate(MISTAKES)],
    ids=[" ".join(command) for command, _ in MISTAKES],
)
def test_a_mistake_is_one_line_before_jax_is_loaded(answers, number, names):
    stdout, stderr = answers[number]
    (line,) = stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(name in line for name in names)
    assert stdout == ""


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--help"],
        pytest.param(["eval.py", "-h"], marks=pytest.mark.slow),
        pytest.param(["-m", "qwen3next_jax", "generate", "--help"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_help_shows_the_commands_own_flags(command):
    result = _run(*command)
    flag = {"train.py": "--max-restarts", "eval.py": "--suite"}.get(command[0], "--temperature")
    assert result.returncode == 0
    assert flag in result.stdout
    assert "--verbosity" not in result.stdout
    assert result.stderr == ""
    assert (
        ("--config=" in result.stdout)
        == ("--config.train.steps=1000" in result.stdout)
        == ("gated_attention:" in result.stdout)  # the settings of mixers
        == (command[0] != "-m")
    )


def test_help_on_a_word_shows_what_has_it(monkeypatch):
    monkeypatch.setattr(config_flags, "_accepts_setting_flags", True)
    shown = help_on_word("Warmup")
    names = re.findall(r"--config\.([\w.]+)", shown)
    assert "optimizer.warmup_steps" in names
    assert all("warmup" in entry.lower() for entry in re.split(r"\n  (?=-)", shown))


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(writer)
    assert result.stderr == b""
    assert result.returncode in (0, 141)


def test_a_command_that_a_scheduler_ends_says_so():
    code = (
        "import os, signal, time, types\nfrom qwen3next_jax.commands import cli, interrupts\n"
        "def main():\n"
        "    interrupts.interrupt_at_sigterm()\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "cli.run_command(types.SimpleNamespace(main=main, __doc__=''))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")


HEAD = "from configs.tiny import get_config as tiny\ndef get_config():\n  c = tiny()\n"


@pytest.mark.parametrize(
    "text, names",
    [
        (
            HEAD + "  c.trian.steps = 3\n  return c\n",
            ("line 4", "'trian'"),
        ),
        (HEAD + "  c.train.steps = 'a'\n  return c\n", ("line 4",)),
        (HEAD + "  1 / 0\n", ("line 4", "ZeroDivisionError")),
        ("import nowhere\n", ("line 1", "'nowhere'")),
        ("def get_config(:\n", ("line 1",)),
        (HEAD, ("get_config()",)),
        ("def get_config(): return {}\n", ("get_config()", "{}")),
        ("x = 1\n", ("get_config()",)),
        (HEAD + "  exit(3)\n", ("line 4", "SystemExit")),
    ],
    ids=("misspelled", "type", "zero", "import", "syntax", "None", "dict", "no function", "exit"),
)
def test_mistakes_in_config_files_are_located(tmp_path, text, names):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with refused(f"--config={path}", *names):
        load_config_file(path)


def test_the_command_line_sets_values_of_every_type():
    values = default_config()
    apply_overrides(
        values,
        [
            ("train.steps", "7"),
            ("optimizer.learning_rate", "1e-3"),
            ("telemetry.tensorboard", "true"),
            ("eval.suites", "mqar,niah"),
            ("data.weights", "1,2.5"),
            ("data.path", "a,b"),
            ("eval.suite_pairs", "4"),
            ("train.stages", "({'steps': 3}, {'steps': 4, 'batch_size': 2})"),
        ],
    )
    config = from_dict(Config, values)
    assert (config.train.steps, config.optimizer.learning_rate, config.telemetry.tensorboard) == (
        7,
        1e-3,
        True,
    )
    assert (config.eval.suites, config.data.weights, config.eval.suite_pairs) == (
        ("mqar", "niah"),
        "1,2.5",
        (4,),
    )
    assert config.train.stages == (Stage(3), Stage(4, batch_size=2))


def test_the_tokenizer_sets_what_the_model_leaves_to_it():
    values = default_config()
    values["model"]["vocab_size"] = 0
    fill_vocabulary_from_tokenizer(values)
    assert (values["model"]["vocab_size"], values["model"]["eos_token_id"]) == (257, 256)


def test_a_resumed_run_keeps_its_vocabulary(tmp_path):
    values = default_config()
    values["model"]["vocab_size"] = 0
    values["train"]["init_from"] = str(tmp_path / "gone")
    # no parent is no reason to read bytes
    with refused("train.init_from", "gone"):
        fill_vocabulary_from_tokenizer(values, tmp_path)
    open_store(tmp_path).write_run_json(
        record(config={"model": {"vocab_size": 2000, "eos_token_id": 7}})
    )
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    fill_vocabulary_from_tokenizer(values, tmp_path)
    assert (values["model"]["vocab_size"], values["model"]["eos_token_id"]) == (2000, 7)


def test_every_setting_has_a_meaning():
    """The comment above each field, which `--help` shows, is found."""
    assert [setting.name for setting in list_settings(Config) if not setting.meaning] == []


def test_the_settings_of_a_group_are_listed_together():
    """So `--help` and the page of settings name each group once."""
    groups = [setting.name.rpartition(".")[0] for setting in list_settings(Config)]
    names = [group for group, _ in itertools.groupby(groups)]
    assert len(names) == len(set(names))


def test_the_help_s_example_is_a_sweep():
    # its import would define flags
    text = ast.get_docstring(
        ast.parse((ROOT / "qwen3next_jax" / "commands" / "sweep.py").read_text()), clean=False
    )
    words = shlex.split(re.sub(r"[\[\]]", "", re.search(r"qwen3next sweep (.*\n.*)", text)[1]))
    name, _, value = words[words.index("--set") + 1].partition("=")
    assert len(load_sweep(ROOT / words[0], {name: ast.literal_eval(value)}).points) == 20


@pytest.mark.parametrize(
    "chips, chosen, platforms",
    [(False, {}, "cpu"), (True, {}, None), (False, {"JAX_PLATFORMS": ""}, "")],
)
def test_a_compiler_for_tpus_alone_is_not_started(tmp_path, monkeypatch, chips, chosen, platforms):
    monkeypatch.setattr(installation, "has_tpu_chips", lambda: chips)
    monkeypatch.setattr(installation, "GPU_DEVICES", (tmp_path / "none",))
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: name == "libtpu")
    environment = dict(chosen)
    installation.exclude_absent_tpu_from_jax(environment)
    assert environment.get("JAX_PLATFORMS") == platforms
