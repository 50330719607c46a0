"""Runs whose folder is in a bucket: what is written there, who may write, and what faults do."""

import dataclasses
import json
import os
import pathlib
import threading

import jax
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.commands.verify import verify
from qwen3next_jax.common import object_stores
from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.common.storage import (
    ABSENT,
    StoreUnavailable,
    VersionConflict,
    check_bucket_access,
    to_path,
)
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LoRAConfig,
    SyntheticConfig,
    TrainConfig,
)
from qwen3next_jax.data import remote_shard
from qwen3next_jax.data.pipeline import TextData
from qwen3next_jax.interop.huggingface import load_hf, save_hf
from qwen3next_jax.interop.peft import save_adapter
from qwen3next_jax.processes import supervisor
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.checkpoint import load_trained
from qwen3next_jax.runs.store import arrays, open_store
from qwen3next_jax.runs.store.bucket_checkpoints import BucketCheckpoints
from qwen3next_jax.runs.store.bucket_events import BucketEvents
from qwen3next_jax.runs.store.lease import Lease
from tests.bucket import Bucket
from tests.in_process import train
from tests.models import HYBRID
from tests.refusals import refused

# The same program as there, so that one of the two test files finds it compiled.
from tests.runs.test_adapting_runs import BASE

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "qwen3_5_tiny"
SECRET = "planted-4f1c9d"


@pytest.fixture(scope="module")
def served():
    """One bucket for all tests, because TensorStore reads its address once in a process."""
    # here, not where the file is collected, since gcsfs takes 1.5 s to import
    pytest.importorskip("gcsfs")
    pytest.importorskip("google.cloud.storage")
    with Bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", SECRET)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        object_stores.open_store.cache_clear()
        yield bucket
        object_stores.open_store.cache_clear()


@pytest.fixture
def bucket(served):
    served.objects.clear()
    served.only = ""
    served.faults.update(dict.fromkeys(served.faults, 0.0))
    return served


CONFIG = Config(
    name="nano",
    model=BASE.model,
    data=DataConfig(source="mqar", synthetic=SyntheticConfig(pairs=4)),
    optimizer=BASE.optimizer,
    train=TrainConfig(steps=4, batch_size=2, sequence_length=32, log_every=1),
    checkpoint=CheckpointConfig(every=2, keep_last=2, patience=5),
    eval=EvalConfig(every=1000, rows=2, sample_tokens=0),
)


def _with_steps(steps):
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps))


def _losses(workdir):
    events = read_events(workdir / "metrics.jsonl")
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "train"]


def test_a_run_resumes_bitwise_and_is_read_and_moved_like_a_local_one(bucket, tmp_path, capfd):
    local, workdir = tmp_path / "local", to_path("gs://bucket/runs/a")
    assert train(_with_steps(6), local) == ExitCode.DONE
    assert train(_with_steps(4), workdir) == ExitCode.DONE
    # What a killed process leaves: metrics after the checkpoint, and arrays without a manifest.
    piece = to_path("gs://bucket/runs/a/metrics/000000.jsonl")
    piece.write_bytes(piece.read_bytes() + b'{"event": "train", "step": 5, "time": 1, "loss": 0}\n')
    run = json.loads((workdir / "run.json").read_text())["id"]
    (workdir / f"arrays/5-{run[:8]}-0000/d/x").write_bytes(b"left")
    assert train(_with_steps(6), workdir) == ExitCode.DONE
    assert _losses(workdir) == _losses(local)
    assert not bucket.names(f"runs/a/arrays/5-{run[:8]}")
    assert load_trained(workdir).step == 6
    assert [damage for _, damage in verify(workdir)] == [None] * 3  # run.json, two checkpoints
    assert "runs/a/report.html" in bucket.names()

    largest = max(bucket.names("runs/a/arrays/6-"), key=lambda n: len(bucket.objects[n]["data"]))
    damaged = bytearray(bucket.objects[largest]["data"])
    damaged[len(damaged) // 2] ^= 1
    to_path(f"gs://bucket/{largest}").write_bytes(bytes(damaged))
    assert train(_with_steps(6), workdir) == ExitCode.DONE
    assert _losses(workdir) == _losses(local)
    assert any(name.startswith("runs/a/damaged/6-") for name in bucket.names())

    assert train(_with_steps(2), workdir, restart=True) == ExitCode.DONE
    (before,) = (path for path in workdir.iterdir() if path.name.startswith("before-"))
    assert load_trained(before).step == 6
    assert load_trained(workdir).step == 2
    assert _losses(before) == _losses(local)
    everything = b"".join(bucket.objects[name]["data"] for name in bucket.names())
    assert SECRET.encode() not in everything
    assert SECRET not in "".join(capfd.readouterr())


def test_one_process_has_the_lease_and_who_lost_it_writes_nothing(bucket, monkeypatch):
    workdir, ended = to_path("gs://bucket/run"), []
    patience = 1.2
    monkeypatch.setattr(Lease, "end_process", lambda self, code, _: ended.append(code))
    first, second = Lease(workdir, patience), Lease(workdir, patience)
    first.run_locked(lambda: None)
    pieces = BucketEvents(workdir / "metrics.jsonl", first, patience)
    pieces.append(b'{"event": "train", "step": 1, "time": 1}\n')
    pieces.flush()
    with pytest.raises(UserError, match="another process"):
        second.run_locked(lambda: None)
    first._done.set()  # frozen: it renews nothing
    first._thread.join()
    second.run_locked(lambda: None)
    content = (workdir / "metrics/000000.jsonl").read_bytes()
    successor = BucketEvents(workdir / "metrics.jsonl", second, patience)
    successor.remove_events_after(1)
    successor.close()
    pieces.append(b'{"event": "train", "step": 2, "time": 2}\n')
    with pytest.raises(VersionConflict):
        pieces._write_piece(workdir / "metrics/000000.jsonl", b"stale", pieces._version)
    first._renew_or_ping()
    assert set(ended) == {ExitCode.TAKEN_OVER}
    assert (workdir / "metrics/000000.jsonl").read_bytes() == content
    pieces._pending = b""
    pieces.close()
    second.__exit__()
    with Lease(workdir, 60) as third:  # released: it does not wait
        third.run_locked(lambda: None)


def test_the_same_events_are_kept_on_a_disk_and_in_a_bucket(bucket, tmp_path):
    lines = [
        json.dumps({"event": kind, "step": step, "time": time})
        for time, (kind, step) in enumerate(
            [("start", 0), ("train", 1), ("train", 2), ("heldout", 2), ("stop", 3), ("train", 3)]
        )
    ]
    text = "\n".join([*lines, '{"event": "tra'])
    found = []
    for workdir in (tmp_path, to_path("gs://bucket/run")):
        (workdir / "metrics.jsonl").write_text(text)
        with open_store(workdir) as store:
            store.run_locked(lambda: None)
            log = store.open_events()
            before = log.remove_events_after(2, ["heldout"])
            log.append(lines[2].encode() + b"\n")
            log.close()
        found.append((before, read_events(workdir / "metrics.jsonl")))
    assert found[0] == found[1]
    assert found[0][0] == (5, 3)
    assert [(e["event"], e["step"]) for e in found[0][1]] == [
        *(("start", 0), ("train", 1), ("train", 2), ("stop", 3), ("train", 2))
    ]


def test_a_folder_copied_into_a_bucket_is_compared_with_its_digests(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_BYTES", 100)
    copy = to_path("gs://bucket/copy")
    for name, size in {"empty": 0, "large": 250}.items():
        (tmp_path / name).write_bytes(bytes(size))
    manifest.write_manifest(tmp_path)
    for file in tmp_path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert manifest.find_damage(copy) is None
    (copy / "large").write_bytes(bytes(150) + b"1" + bytes(99))
    assert "large is not what was written" in manifest.find_damage(copy)


def test_the_owner_replaces_a_manifest_that_an_earlier_owner_wrote_late(bucket):
    workdir = to_path("gs://bucket/run")
    late = workdir / "checkpoints/2/manifest.json"

    def write_late(trainer):
        content = b'{"run": "x", "step": 2, "arrays": "../../arrays/2-x-frozen-0", "files": {}}'
        trainer.add_hook(lambda info: info.step == 1 and late.write_bytes(content), every=1)

    assert train(_with_steps(2), workdir, add_hooks=write_late) == ExitCode.DONE
    assert "frozen" not in late.read_text()
    assert load_trained(workdir).step == 2


@pytest.mark.parametrize("failures, outcome", [(2, 0), (3, ExitCode.STORAGE)])
def test_the_supervisor_asks_again_while_the_bucket_does_not_answer(monkeypatch, failures, outcome):
    answers = [StoreUnavailable(503, "busy", "gs://bucket/run")] * failures + [(0, 0)]

    def newest_checkpoint(_):
        if isinstance(answer := answers.pop(0) if len(answers) > 1 else answers[0], Exception):
            raise answer
        return answer

    monkeypatch.setattr(supervisor, "_newest_checkpoint_time_and_step", newest_checkpoint)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.0)
    try:
        code = supervisor.supervise(to_path("gs://bucket/run"), 1, ["true"])
    except UserError as error:
        code = error.exit_code
    assert code == outcome


def test_requests_that_fail_are_repeated_and_writes_are_not_done_twice(bucket):
    bucket.faults["fail"] = 0.4
    path, version = to_path("gs://bucket/run/x"), ABSENT
    for i in range(8):
        version = path.write(f"{i}".encode(), replaces=version)
        assert path.read_text() == f"{i}"
    with pytest.raises(VersionConflict):
        path.write(b"other", replaces=ABSENT)
    bucket.faults["fail"] = 1.0
    with pytest.raises(StoreUnavailable):
        path.with_patience(0.3).write(b"never")


def test_a_bucket_that_is_absent_or_forbidden_is_one_line(bucket):
    with pytest.raises(UserError, match="gs://absent"):
        train(CONFIG, to_path("gs://absent/run"))
    bucket.faults["forbidden"] = 1.0
    with pytest.raises(UserError, match="403"):
        check_bucket_access("--workdir", to_path("gs://bucket/run"))
    bucket.faults.update(forbidden=0.0, read_only=1.0)
    with pytest.raises(UserError, match="403"):
        train(CONFIG, to_path("gs://bucket/run"))
    assert not bucket.names()


def test_an_object_of_another_program_is_not_overwritten(bucket):
    (lock := to_path("gs://bucket/run/lock")).write_bytes(b"theirs")
    with pytest.raises(UserError, match="lock"):
        train(CONFIG, to_path("gs://bucket/run"))
    assert lock.read_bytes() == b"theirs"


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5,
        b'{"owner": "x", "seconds": 1000000000000}',
        b'{"owner": "x", "seconds": "30"}',
        b'{"owner": "x", "seconds": NaN}',
        b'{"owner": "x"}',
        b"[]",
        b"x" * 10**6,
    ],
    ids=("deep", "for ever", "text", "nan", "none", "list", "large"),
)
def test_a_lock_that_no_run_wrote_is_refused(content, bucket):
    (lock := to_path("gs://bucket/run/lock")).write_bytes(content)
    with pytest.raises(UserError, match="not the lock of a run"):
        Lease(to_path("gs://bucket/run"), 1.2).run_locked(lambda: None)
    assert lock.read_bytes() == content


def test_the_owner_of_a_lock_is_printed_without_control_characters(bucket, capfd):
    record = {"owner": "x", "host": "\x1b]0;owned\a", "process": "\x1b[2J", "seconds": 0.1}
    to_path("gs://bucket/run/lock").write_text(json.dumps(record))
    with Lease(to_path("gs://bucket/run"), 1.2) as lease:
        lease.run_locked(lambda: None)
    out, _ = capfd.readouterr()
    assert "waiting" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_a_bucket_that_turns_read_only_prints_no_traceback(bucket, monkeypatch, capfd):
    """The writes of a failed save end when Orbax's event loop is closed."""
    workdir, ended, raised = to_path("gs://bucket/[run]*"), [], []
    monkeypatch.setattr(arrays, "_previous_hook", raised.append)
    monkeypatch.setattr(Lease, "end_process", lambda self, code, _: ended.append(code) or 1 / 0)
    state = {f"{i}": jax.numpy.arange(1000.0) for i in range(60)}
    with Lease(workdir, 1.2) as lease:
        lease.run_locked(lambda: None)
        lease._done.set()
        retention = dataclasses.replace(CONFIG.checkpoint, patience=1)
        with BucketCheckpoints(workdir, retention, (), lease) as checkpoints:
            checkpoints.prepare_folder(0)
            bucket.faults["read_only"] = 1.0
            checkpoints.save(2, state)
            with pytest.raises(ZeroDivisionError):
                checkpoints.wait()
            bucket.faults["read_only"] = 0.0
            checkpoints.save(4, state)
            checkpoints.wait()
            assert checkpoints.steps() == [4]
    assert ended == [ExitCode.STORAGE]
    assert not raised
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_bucket_keeps_the_best_and_waits_for_it(bucket, monkeypatch):
    workdir, state = to_path("gs://bucket/run"), {"w": jax.numpy.arange(10.0)}
    retention = dataclasses.replace(CONFIG.checkpoint, keep_best=True)
    with Lease(workdir, 60) as lease:
        lease.run_locked(lambda: None)
        with BucketCheckpoints(workdir, retention, (), lease) as checkpoints:
            checkpoints.prepare_folder(0)
            # as if every save were still being written when the next one begins
            monkeypatch.setattr(checkpoints, "_is_saving", lambda: checkpoints._saving is not None)
            for step, loss in {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0}.items():
                checkpoints.note_heldout_loss({"event": "heldout", "step": step, "loss": loss})
                checkpoints.save(step, state, may_skip=step < 4)
            checkpoints.wait()
            assert checkpoints.steps() == [2, 4]
            checkpoints.save(5, state)
            checkpoints.wait()
            assert checkpoints.steps() == [2, 4, 5]
            assert [
                step for event, step, _ in checkpoints.take_events() if event == "save_failed"
            ] == [3]


@pytest.mark.slow
def test_the_loop_does_not_wait_for_an_outage_and_nothing_is_lost(bucket, tmp_path):
    """The bucket fails from step 3 on, until the loop has taken its last step."""
    local, workdir = tmp_path / "local", to_path("gs://bucket/run")
    train(_with_steps(6), local)
    ended = threading.Event()

    def outage(trainer):
        def hook(info):
            if info.step == 3:
                bucket.faults["fail"] = 1.0
            if info.step == 6:
                ended.set()
                threading.Timer(1.0, bucket.faults.update, [{"fail": 0.0}]).start()

        trainer.add_hook(hook, every=1)

    assert train(_with_steps(6), workdir, add_hooks=outage) == ExitCode.DONE
    assert ended.is_set()
    assert _losses(workdir) == _losses(local)
    assert load_trained(workdir).step == 6


def test_rows_in_a_bucket_are_the_local_rows_and_damage_is_named(bucket, tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    config = DataConfig(path=f"{tmp_path}/*.txt", heldout_fraction=0.2)

    def opened(place):
        return TextData(dataclasses.replace(config, prepared_dir=str(place)), 64, 4)

    local, remote = opened(tmp_path / "prepared"), opened("gs://bucket/prepared")
    assert remote.fingerprint == local.fingerprint
    for ours, theirs in (
        (remote.batches(2), local.batches(2)),
        (remote.heldout_batches(), local.heldout_batches()),
    ):
        for found, expected, _ in zip(ours, theirs, range(3)):
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
    (name,) = (name for name in bucket.names("prepared/rows") if "train-00000" in name)
    content = bytearray(bucket.objects[name]["data"])
    content[200] ^= 1
    to_path(f"gs://bucket/{name}").write_bytes(bytes(content))
    remote_shard._cache = remote_shard._ChunkCache(0)
    with pytest.raises(UserError, match="damaged"):
        damaged = opened("gs://bucket/prepared")  # it samples rows for its fingerprint
        for i in range(damaged.rows):
            damaged.row(i)


def test_a_hugging_face_directory_is_exported_into_a_bucket_and_read_there(bucket, tmp_path):
    model = load_hf(FIXTURE)
    save_hf(model, tmp_path / "local")
    save_hf(model, "gs://bucket/out")
    for path in (tmp_path / "local").iterdir():
        assert bucket.objects[f"out/{path.name}"]["data"] == path.read_bytes()
    written = sorted(os.listdir(tmp_path / "local"))
    assert bucket.names("out") == [f"out/{name}" for name in written]
    for found, expected in zip(
        jax.tree.leaves(nnx.state(load_hf("gs://bucket/out"))),
        jax.tree.leaves(nnx.state(model)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(UserError, match="already there"):
        save_hf(model, "gs://bucket/out")
    weights = bytearray(bucket.objects["out/model.safetensors"]["data"])
    weights[-1] ^= 1
    to_path("gs://bucket/out/model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(UserError, match="SHA256SUMS"):
        load_hf("gs://bucket/out")


def test_adapters_are_written_into_a_bucket(bucket):
    targets = ("kind=matrix name!=*/expert_*",)
    config = dataclasses.replace(HYBRID, lora=LoRAConfig(rank=2, targets=targets))
    out = to_path("gs://bucket/adapter")
    save_adapter(config, {}, out, "base", "digest")
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert bucket.names("adapter") == [f"adapter/{name}" for name in names]
    with refused("gs://bucket/adapter"):
        save_adapter(config, {}, out, "base", "digest")


def test_orbax_has_no_s3_and_a_run_there_is_refused():
    with pytest.raises(UserError, match="s3://"):
        train(CONFIG, to_path("s3://bucket/run"))
