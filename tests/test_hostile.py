"""What others wrote, at random and with fixed seeds: Hugging Face files, records of runs, chat
templates, sampling settings, sweeps. Each ends in one line or in a right result, and soon.
"""

import contextlib
import dataclasses
import io
import json
import math
import pathlib
import re
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from qwen3next_jax.commands.show import print_model
from qwen3next_jax.commands.verify import verify
from qwen3next_jax.common import object_stores
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, DataConfig, from_dict
from qwen3next_jax.data import conversations, pipeline, recorded, sources, token_files
from qwen3next_jax.data.chat_template import ChatTemplate
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.progress import PreparationProgress
from qwen3next_jax.data.store import write_json_with_digest
from qwen3next_jax.data.tokens import ByteTokenizer, load_tokenizer
from qwen3next_jax.inference.end_tokens import read_end_token_ids
from qwen3next_jax.inference.sampling import Sampling, log_probabilities
from qwen3next_jax.interop.checksums import compare_with_checksums
from qwen3next_jax.interop.hf_config import hf_config_fields, parse_hf_config
from qwen3next_jax.interop.huggingface import check_hf
from qwen3next_jax.interop.weights import Weights
from qwen3next_jax.model.targets import target_weights
from qwen3next_jax.reporting.page import write_report
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.store.lease import Lease
from qwen3next_jax.sweeps.points import load_sweep
from qwen3next_jax.sweeps.results import is_done
from tests.core.test_data_token_files import BYTES, write_levanter_offsets
from tests.core.test_data_token_files import FORMATS as TOKEN_FORMATS
from tests.references import checkpoint

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FAMILIES = (
    "qwen3_next_tiny",
    "qwen3_5_tiny",
    "qwen3_5_moe_tiny",
    "qwen3_5_wrapper_tiny",
    "kimi_linear_tiny",
    "olmo_hybrid_tiny",
)
TEXTS = st.sampled_from(
    [
        "",
        "x",
        "nan",
        "../x",
        "\0.safetensors",
        "a" * 5000 + ".safetensors",
        "\ud800",
        "a\n\x1b[31m",
        "</script><script>alert(1)",
        "=1+1",
    ]
) | st.text(st.characters(), max_size=6)
NUMBERS = st.sampled_from(
    [0, 1, -1, 3, 2**31, 10**30, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)


def fuzzed(examples: int, **strategies):
    """A test of so many examples, the same ones at every call, each within ten seconds."""

    def decorate(test):
        seeded = settings(
            max_examples=examples,
            deadline=10_000,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return seeded(given(**strategies)(test))

    return decorate


def result_or_refusal(work, longest: int = 1500):
    """What `work` returns; None where it refuses in one printable line of bounded length."""
    try:
        return work()
    except UserError as error:
        assert str(error).isprintable()
        assert 0 < len(str(error)) < longest
        return None


def replaced(tree: dict, path: tuple[str, ...], value: object) -> dict:
    name, *rest = path
    return tree | {name: replaced(tree[name], tuple(rest), value) if rest else value}


def each_path(tree: dict, above: tuple[str, ...] = ()):
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from each_path(value, (*above, name))


CONFIGS = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in FAMILIES}
PLACES = [
    (family, path)
    for family, fields in CONFIGS.items()
    for path in (
        *each_path(fields),
        *(
            (name,)
            for name in ("text_config", "rope_scaling", "mtp_num_hidden_layers", "\x1b[2Junknown")
        ),
    )
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder of each family, of the first with a tokenizer, whose small files may be damaged."""
    root = tmp_path_factory.mktemp("hostile")
    for family in FAMILIES:
        (root / family).mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(checkpoint(family) / name, root / family)
    ByteTokenizer().save(root / FAMILIES[0])
    return root


def plain(config) -> dict:
    """Settings; two ways to say the same layers are one."""
    fields = dataclasses.asdict(config) | {"mixers": config.mixers}
    return {k: v for k, v in fields.items() if k not in ("layer_types", "full_attention_interval")}


@fuzzed(120, place=st.sampled_from(PLACES), value=VALUES)
def test_any_config_is_refused_or_exported_right(checkpoints, place, value):
    family, path = place
    folder, fields = checkpoints / family, replaced(CONFIGS[family], path, value)
    (folder / "config.json").write_text(json.dumps(fields))
    config = result_or_refusal(lambda: check_hf(folder))
    result_or_refusal(lambda: read_end_token_ids(folder, 300))
    if config is not None:
        exported = hf_config_fields(config, "float32", fields)
        again = parse_hf_config(exported, Weights(folder).names, "")
        assert plain(again) == plain(config)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))


@pytest.mark.slow
@fuzzed(
    120,
    name=st.sampled_from(
        [
            "model.safetensors.index.json",
            "generation_config.json",
            "tokenizer_config.json",
            "SHA256SUMS",
        ]
    ),
    key=TEXTS,
    value=VALUES,
    shape=st.integers(0, 5),
)
def test_damaged_checkpoint_files_are_refused_or_harmless(checkpoints, name, key, value, shape):
    folder = checkpoints / FAMILIES[0]
    kept = (folder / name).read_bytes() if (folder / name).exists() else None
    if name == "SHA256SUMS":
        lines = f"0  {key}\n{key}\n{'0' * 64} *{value}\n"
        (folder / name).write_text(lines, errors="replace")
    else:
        fields = {
            0: {"weight_map": value},
            1: {"weight_map": {"model.norm.weight": value}},
            2: {"weight_map": {key: "model.safetensors"}},
            3: {"eos_token_id": value, "eos_token": value},
            4: {"eos_token_id": [3, value], "eos_token": {"content": value}},
            5: {key: value},
        }[shape]
        (folder / name).write_text(json.dumps(fields))
    try:
        config = result_or_refusal(lambda: check_hf(folder))
        assert config is None or config.hidden_size == CONFIGS[FAMILIES[0]]["hidden_size"]
        ends = result_or_refusal(lambda: read_end_token_ids(folder, 300))
        assert ends is None or all(0 <= end < 300 for end in ends)
        tokenizer = result_or_refusal(lambda: load_tokenizer(str(folder)))
        assert tokenizer is None or tokenizer.decode(tokenizer.encode("né")) == "né"
        damages = result_or_refusal(lambda: list(compare_with_checksums(folder)))
        assert name != "SHA256SUMS" or damages is None or any(damage for _, damage in damages)
    finally:
        (folder / name).unlink() if kept is None else (folder / name).write_bytes(kept)


EVENTS = [
    {"event": "start", "step": 0, "time": 0.0, "first_step": 0, "devices": 1, "hosts": 2},
    {"event": "stage", "step": 1, "time": 0.5, "stage": "main"},
    {"event": "train", "step": 1, "time": 1.0, "loss": 2.0, "seconds": 1.0, "mfu": 0.1}
    | {"grad_norm": 1.0, "mtp_loss/0": 2.0},
    {"event": "diagnostics", "step": 1, "time": 1.5, "grad_norm": [1.0, 2.0]}
    | {"groups": {"embedding": {"grad_norm": 1.0}}, "expert_load": [[1.0, 1.0], [0.5, 1.5]]}
    | {"router_entropy": [0.5, 0.5]},
    {"event": "sample", "step": 1, "time": 2.0, "text": "hello"},
    {"event": "skip", "step": 2, "time": 2.5, "reason": "not finite"},
    {"event": "start", "step": 2, "time": 3.0, "previous_end": 2.6, "lost_steps": 1},
    {"event": "heldout", "step": 3, "time": 4.0, "loss": 2.0, "bits_per_byte": 3.0},
    {"event": "suite", "step": 3, "time": 5.0, "suite": "mqar", "accuracy": 0.5}
    | {"figures": {"accuracy": {"title": "accuracy", "unit": "share", "better": "higher"}}},
]
FIELDS = [
    (i, name) for i, event in enumerate(EVENTS) for name in (*event, "loss") if name != "event"
]
SETTINGS = from_dict(Config, {"train": {"steps": 3}})


@pytest.mark.slow
@fuzzed(90, place=st.sampled_from(FIELDS), key=TEXTS, value=VALUES, several=st.booleans())
def test_a_record_with_any_value_gives_a_page(tmp_path_factory, place, key, value, several):
    folder = tmp_path_factory.getbasetemp() / "hostile_record"
    folder.mkdir(exist_ok=True)
    at, name = place
    events = [*EVENTS, EVENTS[at] | {name: value}, EVENTS[at] | {key: 1.0}]
    (folder / "run.json").write_text(json.dumps({"config": {"train": {"steps": 3}, key: value}}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    with contextlib.suppress(FileNotFoundError):
        (folder / "report.html").unlink()
    result_or_refusal(lambda: write_report([folder] * (1 + several), folder / "report.html"))
    is_done(folder, SETTINGS.train.steps, SETTINGS.eval.suites)
    if (folder / "report.html").exists():
        page = (folder / "report.html").read_text(encoding="utf-8")
        assert "<script>alert" not in page
        for data in re.findall(r'<script type="application/json">(.*?)</script>', page, re.S):
            json.loads(data, parse_constant=pytest.fail)
        for drawn in re.findall(r' (?:d|x|y|cx|cy|x1|y1)="([^"]*)"', page):
            assert "nan" not in drawn
            assert "inf" not in drawn


TEMPLATES = st.lists(
    st.sampled_from(
        [
            "{% for m in messages %}",
            "{% endfor %}",
            "{{ m.content }}",
            "{{ messages[0].role * 3 }}",
            "{{ messages[7] }}",
            "{{ ''.__class__.__subclasses__() }}",
            "{{ cycler.__init__.__globals__ }}",
            "{% include 'config.json' %}",
            "{% if add_generation_prompt %}",
            "{% endif %}",
            "{{ raise_exception('no\\nrole') }}",
            "{{ messages | tojson }}",
            "{% set x = 1 / 0 %}",
            "{{ 'a' | center(60) }}",
            "{% break %}",
            "{#",
            "\x1b[2J",
            "text",
        ]
    ),
    max_size=5,
).map("".join)


# Two processes an example.
@fuzzed(8, template=TEMPLATES | TEXTS, special=VALUES, listed=st.booleans())
def test_a_chat_template_gives_text_or_one_line(tmp_path_factory, template, special, listed):
    folder = tmp_path_factory.getbasetemp() / "hostile_template"
    folder.mkdir(exist_ok=True)
    several = [{"name": special, "template": 1}, {"name": "default", "template": template}]
    fields = {"chat_template": several if listed else template, "eos_token": special}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    messages = [{"role": "user", "content": "hello"}]
    text = result_or_refusal(lambda: ChatTemplate.of_folder(folder, "").render_prompt(messages))
    assert text is None or 0 < len(text) <= 1 << 20


@fuzzed(
    40,
    logits=st.lists(st.sampled_from([-1e30, -5.0, 0.0, 1e-3, 4.0, 1e30]), min_size=5, max_size=5),
    temperature=st.sampled_from([0.0, -1.0, 1e-46, 1e-40, 1e-30, 0.7, 1.0, 1e38, math.nan]),
    top_k=st.sampled_from([0, 1, 3, 10**9, -1, 2**40]),
    top_p=st.sampled_from([1.0, 0.0, 5e-324, 1e-46, 1e-8, 0.5, 0.999999, math.inf]),
    min_p=st.sampled_from([0.0, 1e-46, 0.3, 1.0, 2.0]),
)
def test_sampling_settings_leave_the_likeliest_token_or_are_refused(
    logits, temperature, top_k, top_p, min_p
):
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if result_or_refusal(lambda: sampling.check() or True) and not sampling.is_greedy:
        log_p = np.asarray(log_probabilities(jnp.array(logits), sampling, sampling.has_filters))
        assert not np.isnan(log_p).any()
        assert np.isfinite(log_p[np.argmax(logits)])
        assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-5)
        if top_k:
            # tokens as likely as the last one that is left are left, too
            least = np.sort(logits)[-min(top_k, len(logits))]
            assert np.isneginf(log_p[np.array(logits, np.float32) < least]).all()


NAMES = st.sampled_from(["a/../../x", "..", "train.seed", "ratio", "group", 3]) | TEXTS
GROUPS = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(
    lambda names: {name: {"train.seed": i} for i, name in enumerate(names)}
)
LISTS = st.lists(st.sampled_from([0, 1, "1:1", "0:0", None, "x" * 300]) | TEXTS, max_size=2)
AXES = st.dictionaries(NAMES, GROUPS | LISTS | VALUES, min_size=1, max_size=1)


@fuzzed(50, axes=AXES)
def test_points_of_a_sweep_lie_in_its_folder(tmp_path_factory, axes):
    folder = tmp_path_factory.getbasetemp() / "hostile_sweep"
    folder.mkdir(exist_ok=True)
    record = {"base": "configs/tiny.py", "axes": axes}
    (folder / "sweep.py").write_text(f"def get_sweep():\n    return {ascii(record)}\n")
    sweep = result_or_refusal(lambda: load_sweep(folder / "sweep.py"), longest=20_000)
    for point in sweep.points if sweep else ():
        place = folder / point.name
        assert place.resolve().parent == folder.resolve()
        place.mkdir()
        place.rmdir()


WRITTEN = st.lists(
    st.sampled_from(
        [
            "{{ m.content }}",
            "{% generation %}{{ m.content }}{% endgeneration %}",
            "{% if m.role == 'assistant' %}{% generation %}x{% endgeneration %}{% endif %}",
            "<|{{ m.role }}|>",
            "{{ m.thinking }}{{ m.tool_calls }}",
            "{{ '\\n' }}",
            "{{ eos_token }}",
            "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
            "{{ m | tojson(indent=1) }}",
            "{% if loop.last %}{{ m.content }}{% endif %}",
        ]
    ),
    min_size=1,
    max_size=4,
).map(lambda pieces: "{% for m in messages %}" + "".join(pieces) + "{% endfor %}")
PROMPTS = st.sampled_from(["", "{% if add_generation_prompt %}<|assistant|>{% endif %}"])
SAID = st.sampled_from(["x", "né", "a\nb", "long " * 12, " "])
WEIGHTS = st.sampled_from([0, 0.5, 1, 1, 1e-9, 1e9])
TURNS = st.lists(st.tuples(SAID, SAID, WEIGHTS), min_size=1, max_size=3).map(
    lambda turns: [
        message
        for asked, said, weight in turns
        for message in (
            {"role": "user", "content": asked},
            {"role": "assistant", "content": said, "weight": weight},
        )
    ]
)


def open_conversations(folder, records, template, length=64, **settings):
    """Rows of conversations that a template of a tokenizer of bytes writes."""
    ByteTokenizer().save(folder)
    fields = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    config = DataConfig(
        path=str(folder / "chat.jsonl"),
        messages_field="messages",
        tokenizer=str(folder),
        prepared_dir=str(folder / "prepared"),
        heldout_fraction=0.3,
        bad_records_limit=1.0,
        **settings,
    )
    return open_data(config, length, 1)


# A process an example, and rows on the disk.
@fuzzed(
    6,
    template=st.builds(str.__add__, WRITTEN, PROMPTS),
    conversations=st.lists(TURNS, min_size=4, max_size=10),
    length=st.sampled_from([16, 40, 128]),
)
def test_targets_are_counted_as_in_rows(tmp_path_factory, template, conversations, length):
    folder = tmp_path_factory.getbasetemp() / "hostile_conversations"
    folder.mkdir(exist_ok=True)
    records = [{"messages": messages} for messages in conversations]
    data = result_or_refusal(
        lambda: open_conversations(folder, records, template, length, bad_records="skip")
    )
    if data is None:
        return
    counts = data.describe()
    rows = [data.row(i) for i in range(data.rows)]
    rows += [data.heldout_row(i) for i in range(data.heldout_rows)]
    segments = np.stack([row["segment_ids"] for row in rows])
    weights = np.stack([row["loss_weights"] for row in rows])
    targets = np.asarray(target_weights({"segment_ids": segments, "loss_weights": weights}, 1))
    assert (targets > 0).sum() == counts["tokens"] - counts["ignored_tokens"]
    assert (targets > 0).any(axis=1).all()  # every row trains something
    assert counts["tokens"] == (segments > 0).sum()
    assert counts["documents"] == sum(row["segment_ids"].max() for row in rows)
    bad = sum(counts["sources"][0]["bad_records"].values())
    # One conversation may be divided, so that a part of it is held out.
    in_all = counts["documents"] + counts["left_out_documents"] + bad
    assert in_all - len(records) in (0, 1)


PLACES_IN_RECORDS = st.sampled_from(
    [("messages",), ("tools",), (0,), (1,)]
    + [
        (i, name)
        for i in (0, 1)
        for name in ("role", "content", "weight", "tool_calls", "thinking", "reasoning_content")
    ]
)
NAMED_VALUES = VALUES | st.sampled_from([10**308, "assistant", "tool", [[[["x"]]]], {"role": "x"}])


# Of the records of an example, one alone ends the preparation, and all together are left out.
@fuzzed(2, changes=st.lists(st.tuples(PLACES_IN_RECORDS, NAMED_VALUES), min_size=30, max_size=60))
def test_any_record_is_read_or_left_out(tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp() / "hostile_records"
    folder.mkdir(exist_ok=True)
    records = [{"messages": chat(f"{i}")} for i in range(8)]
    for (place, *name), value in changes:
        record = {"messages": chat("question")}
        if isinstance(place, str):
            record[place] = value
        elif name:
            record["messages"][place][name[0]] = value
        else:
            record["messages"][place] = value
        records.append(record)
        assert conversations.conversation_fault(record["messages"]).isprintable()
    template = "{% for m in messages %}" + "{{ m.role }}{{ m.content }}{{ m.tool_calls }}" * 2
    template += "{{ m.thinking }}{% endfor %}"
    counts = open_conversations(folder, records, template, 4096, bad_records="skip").describe()
    left_out = sum(counts["sources"][0]["bad_records"].values())
    left_out += counts["left_out_documents"]  # a text of 5,000 characters
    assert counts["documents"] + left_out == len(records)
    assert counts["documents"] >= 8
    result_or_refusal(
        lambda: open_conversations(folder, [*records[:8], records[8]], template, 4096)
    )


def chat(question):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "answer"}]


@pytest.fixture(scope="module")
def token_folders(tmp_path_factory):
    """A folder of files of tokens for each of their formats."""
    root = tmp_path_factory.mktemp("token_files")
    for number, write in enumerate(TOKEN_FORMATS.values()):
        (root / str(number)).mkdir()
        write(root / str(number))
    return root


HEADERS = st.sampled_from([b"(True,)", b"(10**9,)", b"((((", b"{[]: 1}", b"'shape': (-1,)", b"\\"])
OFFSETS = st.sampled_from([-1, 0, 7, 2**31, 10**12, 2**53, 2**62, 2**63 - 1])


@fuzzed(
    120,
    number=st.integers(0, len(TOKEN_FORMATS) - 1),
    which=st.integers(0, 9),
    at=st.integers(0, 10**4),
    bytes_=st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, b"\0" * 8]) | HEADERS,
    cut=st.booleans(),
    place=st.integers(0, 40),
    value=VALUES | st.sampled_from([[10**12], [2**54], [-1], [0], 10**12]),
    offsets=st.none() | st.lists(OFFSETS, min_size=1, max_size=3),
)
def test_damaged_files_of_tokens_are_refused_or_give_tokens(
    token_folders, tmp_path_factory, number, which, at, bytes_, cut, place, value, offsets
):
    folder = tmp_path_factory.getbasetemp() / "hostile_tokens"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(token_folders / str(number), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[which % len(files)]
    content = path.read_bytes()
    if offsets and (folder / "input_ids").exists():
        write_levanter_offsets(folder, offsets)
    elif path.name == "zarr.json":
        fields = json.loads(content)
        paths = list(each_path(fields))
        path.write_text(json.dumps(replaced(fields, paths[place % len(paths)], value)))
    else:
        at %= len(content)
        path.write_bytes(content[:at] + bytes_ + (b"" if cut else content[at + len(bytes_) :]))
    pattern = f"{folder}/{'shard_*' if (folder / 'input_ids').exists() else '*'}"
    source = sources.find_source_of_glob(pattern, "text")

    def read() -> int:
        found = [
            ids for file in source.files for ids, _ in token_files.read_token_file(file, BYTES)
        ]
        assert all(ids.dtype == np.int32 and ((0 <= ids) & (ids < 257)).all() for ids in found)
        return sum(map(len, found))

    tokens = result_or_refusal(read)
    assert tokens is None or tokens < 2 * sum(len(path.read_bytes()) for path in files) + 10_000


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 13, 14]), max_size=4).map(tuple)
DTYPES = st.sampled_from(
    [np.int16, np.uint8, np.int64, np.uint64, np.float32, np.bool_]
    + [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)


@fuzzed(
    60,
    shapes=st.tuples(SHAPES, SHAPES) | st.just(((14,), (13, 3, 2))),
    dtypes=st.tuples(DTYPES, DTYPES) | st.just((np.int16, np.int16)),
    filled=st.sampled_from([0, 1, 255]),
    key=st.sampled_from(["prompt_tokens", "model"]),
    value=VALUES.map(json.dumps) | TEXTS | st.just("[" * 10**5),
)
def test_any_routing_file_is_refused_or_right(tmp_path_factory, shapes, dtypes, filled, key, value):
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    arrays = [np.full(shape, filled).astype(dtype) for shape, dtype in zip(shapes, dtypes)]
    text = value.encode(errors="replace").decode()
    named = dict(zip(("tokens", "routed_experts"), arrays))
    safetensors.numpy.save_file(named, path, {key: text})
    record = result_or_refusal(lambda: recorded.read_recorded_text(path))
    if record is not None:
        assert record.routed_experts.shape == (len(record.tokens), *shapes[1][1:])
        assert 1 <= record.prompt_length <= len(record.tokens)
        result_or_refusal(lambda: recorded.check_recorded_text(path, record, SETTINGS.model))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(settings, folder) of prepared data, of which one file at a time is spoilt."""
    root = tmp_path_factory.mktemp("prepared")
    for number in range(9):
        (root / f"{number}.txt").write_text(f"document {number} " * 9)
    config = DataConfig(path=f"{root}/*.txt", prepared_dir=f"{root}/p", heldout_fraction=0.3)
    pipeline.TextData(config, 16, 2)
    return config, root / "p"


@fuzzed(
    60,
    pattern=st.sampled_from(["rows/*/metadata.json", "tokens/*/*.json", "corpora/*.json"]),
    place=st.integers(0, 60),
    value=VALUES,
)
def test_verify_reports_any_damaged_record(prepared, pattern, place, value):
    """Also where a record has the digest of what is in it."""
    path = sorted(prepared[1].glob(pattern))[0]
    content = path.read_bytes()
    fields = json.loads(content)
    del fields["digest"]
    paths = list(each_path(fields))
    write_json_with_digest(path, replaced(fields, paths[place % len(paths)], value))
    try:
        for name, damage in verify(prepared[1]):
            assert damage is None or 0 < len(damage) < 1500 and "\n" not in damage, name
    finally:
        path.write_bytes(content)


@fuzzed(
    8, name=st.sampled_from(["header", "0.train.rows", "0.folders", "0.metadata"]), value=VALUES
)
def test_a_spoilt_index_is_made_anew(prepared, name, value):
    config, folder = prepared
    (path,) = (folder / "indexes").iterdir()
    seal, _, archive = path.read_bytes().partition(b"\n")
    with np.load(io.BytesIO(archive)) as file:
        arrays = {key: file[key] for key in file.files}
    rows = arrays["0.train.rows"]
    other = {
        "header": np.frombuffer(json.dumps(value).encode(), np.uint8),
        "0.train.rows": -rows,
        "0.folders": arrays["0.folders"][:0],
        "0.metadata": np.zeros(3),
    }
    with path.open("wb") as file:
        file.write(seal + b"\n")
        np.savez(file, **arrays | {name: other[name]})
    before = path.read_bytes()
    assert len(pipeline.TextData(config, 16, 2)._prepared[0].rows["train"]) == rows.sum()
    assert path.read_bytes() != before


@fuzzed(
    60,
    name=st.sampled_from(["piece", "files", "arrays", "step", "run"]),
    value=VALUES
    | st.sampled_from(
        ["../../../../..", "../../arrays/..", {"d": [10**30, ["0"]]}, {"d": [3, [1]]}]
    ),
)
def test_any_manifest_of_a_checkpoint_is_damage_or_true(tmp_path_factory, name, value):
    folder = tmp_path_factory.getbasetemp() / "hostile_run" / "10"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "d").write_text("abc")
    manifest.write_manifest(folder, 10)
    path = folder / manifest.FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    damage = manifest.find_damage(folder)
    assert damage is None or 0 < len(damage) < 1500
    assert damage is not None or name not in ("piece", "files") or value == manifest.PIECE_BYTES


class _Lock:
    """The lock object of a run in a bucket."""

    def __init__(self, content: bytes):
        self._content = content

    def __truediv__(self, name):
        return self

    def __str__(self):
        return "gs://bucket/run/lock"

    def with_patience(self, seconds):
        return self

    def file_info(self):
        return object_stores.FileInfo("run/lock", len(self._content), "1", "", 0.0)

    def read_bytes(self):
        return self._content


@fuzzed(
    60,
    field=st.sampled_from(["owner", "host", "process", "seconds", "released"]),
    value=VALUES | st.sampled_from(["\x1b[2J", 10**12, True, "30"]),
    content=st.none() | VALUES,
)
def test_any_lock_is_refused_or_ends_soon(field, value, content):
    fields = {"owner": "x", "host": "h", "process": 1, "seconds": 30.0, "released": False}
    text = json.dumps(fields | {field: value} if content is None else content)
    lease = Lease(_Lock(text.encode(errors="replace")), 1.0)
    found = result_or_refusal(lease._read_lock)
    if found is not None:
        assert 0 < found[1]["seconds"] <= 30
        assert str(lease._taken_error(found[1])).isprintable()
        assert len(str(lease._taken_error(found[1]))) < 500


def test_names_reach_the_terminal_without_control_characters(capsys):
    PreparationProgress()("\x1b]0;owned\a\x9b2J", 1, 1)
    print_model(dataclasses.replace(SETTINGS, name="[red]"), (1,), (1,), Console())
    lines = capsys.readouterr().out.splitlines()
    assert r"\x1b]0;owned\x07\x9b2J" in lines[0]
    assert "[red]" in lines[1]
    assert all(line.isprintable() for line in lines)
