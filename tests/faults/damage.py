"""Rows 4, 5, 6, 8, 9, 10, 17: bytes that are not what was written, in checkpoints, exports and
data.
"""

import contextlib
import io
import json
import pathlib
import pickle
import shutil
import struct

import numpy as np

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data.pipeline import TextData
from tests.faults.lab import EVERY, Lab, Trial, attempt, flip_bit, lost_steps, random_bits

# ---- checkpoints


def _copy_of_reference(lab: Lab) -> pathlib.Path:
    workdir = lab.new_folder() / "run"
    shutil.copytree(lab.reference(), workdir)
    return workdir


def _fallback(workdir: pathlib.Path) -> int | None:
    """The step that a restore would take; what is said is swallowed."""
    from qwen3next_jax.runs.checkpoint import Checkpoints

    with contextlib.redirect_stderr(io.StringIO()) as said, Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_valid_step()
    return step if step == checkpoints.steps()[-1] or "is skipped" in said.getvalue() else None


def flips_in_checkpoint(lab: Lab, count: int, goes_on: int = 50) -> list[Trial]:
    """A random bit of the newest checkpoint, its manifest included; after every 50th (`goes_on`)
    the run goes on.
    """
    workdir, last = _copy_of_reference(lab), lab.config.train.steps
    newest, trials = workdir / "checkpoints" / str(last), []
    for i, (path, position, bit) in enumerate(random_bits(newest, count, seed=4)):
        flip_bit(path, position, bit)
        step = _fallback(workdir)
        same = None
        if goes_on and i % goes_on == 0:
            resumed = lab.new_folder() / "run"
            shutil.copytree(workdir, resumed)
            assert lab.run(resumed) == 0
            same = lab.same(resumed, lab.reference())
        trials.append(
            Trial(
                told=step == last - EVERY,
                recovered=step == last - EVERY,
                steps_lost=last - step,
                bitwise=same,
            )
        )
        flip_bit(path, position, bit)
    assert _fallback(workdir) == last
    return trials


def files_of_checkpoint(lab: Lab, _: int, goes_on: int = 8) -> list[Trial]:
    """Every file of the newest checkpoint truncated to half, and deleted; after every 8th
    (`goes_on`) the run goes on.
    """
    workdir, last = _copy_of_reference(lab), lab.config.train.steps
    newest, trials = workdir / "checkpoints" / str(last), []
    for path in sorted(f for f in newest.rglob("*") if f.is_file()):
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2] if content else None, None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            step = _fallback(workdir)
            same = None
            if goes_on and len(trials) % goes_on == 0:
                resumed = lab.new_folder() / "run"
                shutil.copytree(workdir, resumed)
                assert lab.run(resumed) == 0
                same = lab.same(resumed, lab.reference())
            trials.append(
                Trial(
                    told=step == last - EVERY,
                    recovered=step == last - EVERY,
                    steps_lost=last - step,
                    bitwise=same,
                    note=path.name,
                )
            )
            path.write_bytes(content)
    return trials


def newest_checkpoints(lab: Lab, k: int) -> list[Trial]:
    """The newest k of the kept checkpoints with a flipped bit each; the run goes on from the one
    before them.
    """
    workdir = _copy_of_reference(lab)
    folders = sorted((workdir / "checkpoints").iterdir(), key=lambda p: -int(p.name))
    for folder in folders[:k]:
        ((path, position, bit),) = random_bits(folder, 1, seed=k, pattern="d/*")
        flip_bit(path, position, bit)
    assert lab.run(workdir) == 0, lab.log(workdir)
    told = all(
        f"checkpoints/{folder.name} is skipped" in lab.log(workdir) for folder in folders[:k]
    )
    return [
        Trial(
            told=told,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, lab.reference()),
        )
    ]


def plain_flips_in_checkpoint(lab: Lab, count: int) -> list[Trial]:
    """The same bits' share of an Orbax checkpoint read as Orbax reads it."""
    import jax
    import orbax.checkpoint as ocp

    from qwen3next_jax.runs.store.arrays import with_text_keys
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.resolve import resolve_run

    state = with_text_keys(resolve_run(lab.config, single_device_mesh()).init_state()["params"])
    folder = lab.new_folder() / "plain"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
        trials = []
        for path, position, bit in random_bits(folder, count, seed=4):
            flip_bit(path, position, bit)
            restored, error = attempt(
                lambda: checkpointer.restore(folder, jax.tree.map(np.zeros_like, state))
            )
            same = not error and all(
                np.array_equal(a, b)
                for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
            )
            trials.append(Trial(told=bool(error), harmless=same, note=error))
            flip_bit(path, position, bit)
    return trials


def plain_newest_checkpoints(lab: Lab, k: int) -> list[Trial]:
    """A truncated array file in the newest k steps of an Orbax manager, which is asked for the
    latest step.
    """
    import orbax.checkpoint as ocp

    from qwen3next_jax.runs.store.arrays import with_text_keys
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.resolve import resolve_run

    state = with_text_keys(resolve_run(lab.config, single_device_mesh()).init_state()["params"])
    folder = lab.new_folder() / "plain"
    with ocp.CheckpointManager(folder) as manager:
        for step in range(1, 5):
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    for step in range(5 - k, 5):
        largest = max((folder / str(step)).rglob("d/*"), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:100])
    with ocp.CheckpointManager(folder) as manager:
        latest = manager.latest_step()
        _, error = attempt(lambda: manager.restore(latest, args=ocp.args.StandardRestore(state)))
    return [Trial(told=bool(error), note="the latest step is still the damaged one")]


def plain_files_of_checkpoint(lab: Lab, _: int) -> list[Trial]:
    """Every file of an Orbax checkpoint truncated to half, and deleted."""
    import jax
    import orbax.checkpoint as ocp

    from qwen3next_jax.runs.store.arrays import with_text_keys
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.resolve import resolve_run

    state = with_text_keys(resolve_run(lab.config, single_device_mesh()).init_state()["params"])
    folder, trials = lab.new_folder() / "plain", []
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
        for path in sorted(f for f in folder.rglob("*") if f.is_file()):
            content = path.read_bytes()
            for damaged in (content[: len(content) // 2] if content else None, None):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                restored, error = attempt(
                    lambda: checkpointer.restore(folder, jax.tree.map(np.zeros_like, state))
                )
                same = not error and all(
                    np.array_equal(a, b)
                    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
                )
                trials.append(
                    Trial(told=bool(error), harmless=same, note="no fallback" if error else "")
                )
                path.write_bytes(content)
    return trials


# ---- exports


def _export(lab: Lab) -> pathlib.Path:
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.runs.checkpoint import load_trained

    folder = lab.new_folder() / "export"
    save_hf(load_trained(lab.reference())[0], folder)
    return folder


def _weights(folder: pathlib.Path) -> list[bytes]:
    import jax
    from flax import nnx

    from qwen3next_jax.interop.huggingface import load_hf

    return [
        np.asarray(leaf).tobytes()
        for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(load_hf(folder), nnx.Param)))
    ]


def flips_in_export(lab: Lab, count: int) -> list[Trial]:
    folder = _export(lab)
    right, trials = _weights(folder), []
    for path, position, bit in random_bits(folder, count, seed=5):
        flip_bit(path, position, bit)
        try:
            trials.append(Trial(told=False, harmless=_weights(folder) == right, note=path.name))
        except UserError:
            trials.append(Trial(told=True))
        flip_bit(path, position, bit)
    return trials


def plain_flips_in_export(lab: Lab, count: int) -> list[Trial]:
    from safetensors.numpy import load_file

    folder = _export(lab)
    right, trials = load_file(folder / "model.safetensors"), []
    for path, position, bit in random_bits(folder, count, seed=5, pattern="model.safetensors"):
        flip_bit(path, position, bit)
        found, error = attempt(lambda: load_file(path))
        same = (
            not error
            and found.keys() == right.keys()
            and all(found[n].tobytes() == right[n].tobytes() for n in right)
        )
        trials.append(Trial(told=bool(error), harmless=same, note=error))
        flip_bit(path, position, bit)
    return trials


class _Code:
    """Runs code when it is unpickled."""

    def __init__(self, marker: pathlib.Path):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def _header(fields: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def hostile_files(marker: pathlib.Path) -> dict[str, tuple[str, bytes]]:
    """name → (file, content) that is offered as weights."""
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    name, file = "model.embed_tokens.weight", "model.safetensors"
    code = pickle.dumps(_Code(marker))
    return {
        "header of 2^63 bytes": (file, _header(b"{}", length=2**63)),
        "header longer than the file": (file, _header(b"{}", length=10**6)),
        "header of 200 MB announced": (file, _header(b"{}", length=200 * 10**6)),
        "header that is no JSON": (file, _header(b"\xff\xfe{" * 10)),
        "nested JSON": (file, _header(b"[" * 100_000)),
        "offsets past the end": (
            file,
            _header({name: tensor | {"data_offsets": [0, 10**9]}}, b"\0" * 8),
        ),
        "negative offsets": (file, _header({name: tensor | {"data_offsets": [-8, 0]}}, b"\0" * 8)),
        "overlapping tensors": (file, _header({name: tensor, "lm_head.weight": tensor}, b"\0" * 8)),
        "shape that overflows": (
            file,
            _header({name: tensor | {"shape": [2**40, 2**40]}}, b"\0" * 8),
        ),
        "bytes that no tensor owns": (file, _header({name: tensor}, b"\0" * 800)),
        "unknown dtype": (file, _header({name: tensor | {"dtype": "F9"}}, b"\0" * 8)),
        "pickle as model.safetensors": (file, code),
        "pickle as pytorch_model.bin": ("pytorch_model.bin", code),
        "index that leaves the folder": (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {name: "../../x.safetensors"}}).encode(),
        ),
        "empty file": (file, b""),
    }


def hostile(lab: Lab, _: int) -> list[Trial]:
    """Weights that are no weights: refused in one line, and nothing in them is run."""
    folder, trials = _export(lab), []
    (folder / "SHA256SUMS").unlink()  # whoever made the file could have made that, too
    marker = folder.parent / "ran"
    for what, (file, content) in hostile_files(marker).items():
        target = lab.new_folder() / "export"
        shutil.copytree(folder, target)
        (target / "model.safetensors").unlink()
        (target / file).write_bytes(content)
        try:
            _weights(target)
            trials.append(Trial(told=False, note=what))
        except UserError as error:
            trials.append(Trial(told="\n" not in str(error) and not marker.exists(), note=what))
    return trials


def plain_hostile(lab: Lab, _: int) -> list[Trial]:
    """safetensors itself refuses its headers; a pickle read as one is run."""
    marker = lab.new_folder() / "ran"
    pickle.loads(pickle.dumps(_Code(marker)))
    return [Trial(told=not marker.exists(), note="a pickle is run")]


# ---- data


def _prepared(lab: Lab, name: str) -> TextData:
    """Rows of a larger corpus: shards come in blocks of 64 KiB, and a small one is mostly
    padding.
    """
    texts = lab.folder / "larger.jsonl"
    if not texts.exists():
        rng = np.random.default_rng(1)
        lines = (
            json.dumps({"text": rng.bytes(int(n)).hex()}) for n in rng.integers(100, 2000, 200)
        )
        texts.write_text("\n".join(lines) + "\n")
    config = lab.with_(
        data={"path": str(texts), "prepared_dir": str(lab.folder / "damaged-data" / name)}
    ).data
    return TextData(config, 512, 8, 257)


def _rows(data: TextData) -> list[bytes]:
    return [
        row.tokens.tobytes() + row.segment_ids.tobytes()
        for p in data._prepared
        for rows in p.rows.values()
        for row in (rows[i] for i in range(len(rows)))
    ]


def flips_in_shard(lab: Lab, count: int) -> list[Trial]:
    """A random bit of the prepared shards, every row of which is then read."""
    data = _prepared(lab, "flips")
    right, trials, folder = _rows(data), [], data._prepared[0].common_row_folder
    for path, position, bit in random_bits(folder, count, seed=8, pattern="*.array_record"):
        flip_bit(path, position, bit)
        try:
            trials.append(Trial(told=False, harmless=_rows(_prepared(lab, "flips")) == right))
        except UserError:
            trials.append(Trial(told=True))
        flip_bit(path, position, bit)
    return trials


def plain_flips_in_shard(lab: Lab, count: int) -> list[Trial]:
    """The same in a file of uint16 tokens, read through a memory map."""
    path = lab.new_folder() / "train.bin"
    tokens = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)
    tokens.tofile(path)
    trials = []
    for file, position, bit in random_bits(path.parent, count, seed=8):
        flip_bit(file, position, bit)
        trials.append(
            Trial(told=False, harmless=np.array_equal(np.memmap(path, np.uint16, "r"), tokens))
        )
        flip_bit(file, position, bit)
    return trials


def missing_shards(lab: Lab, _: int) -> list[Trial]:
    """Every shard deleted, and truncated; prepared again as the message says, the rows are the
    same.
    """
    data = _prepared(lab, "missing")
    right, trials, folder = _rows(data), [], data._prepared[0].common_row_folder
    for path in sorted(folder.glob("*.array_record")):
        for half in (False, True):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2]) if half else path.unlink()
            try:
                _prepared(lab, "missing")
                trials.append(Trial(told=False))
            except UserError as error:
                told = path.name in str(error) and f"delete {folder}" in str(error)
                shutil.rmtree(folder)
                again = _rows(_prepared(lab, "missing")) == right
                trials.append(Trial(told=told, recovered=again, steps_lost=0, bitwise=again))
    return trials


def malformed_records(lab: Lab, _: int) -> list[Trial]:
    """Records that are no documents: refused with the file and the place in it."""
    good = json.dumps({"text": "def f(): return 1\n" * 20}).encode() + b"\n"
    records = {
        "torn JSON": b'{"text": "def',
        "no object": b"[1, 2]",
        "no such field": b'{"txt": "x"}',
        "not text": b'{"text": 3}',
        "not UTF-8": b'{"text": "\xff\xfe"}',
        "half a surrogate pair": b'{"text": "\\ud800"}',
        "null": b'{"text": null}',
    }
    trials = []
    for what, record in records.items():
        folder = lab.new_folder()
        (folder / "a.jsonl").write_bytes(good * 5 + record + b"\n" + good * 5)
        try:
            TextData(
                lab.with_(
                    data={"path": f"{folder}/*.jsonl", "prepared_dir": str(folder / "p")}
                ).data,
                64,
                8,
                257,
            )
            trials.append(Trial(told=False, note=what))
        except UserError as error:
            trials.append(Trial(told="a.jsonl" in str(error) and "\n" not in str(error), note=what))
    return trials
