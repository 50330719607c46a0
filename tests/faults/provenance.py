"""Rows 18 to 24: what a folder says against what was trained. Parts of a run that are gone or
not its own, sources that change, runs and weights that are no good, and starts that come to
nothing.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.data import preparation, readers, sources, tokenized_parts
from qwen3next_jax.data.tokens import load_tokenizer
from tests.faults.lab import EVERY, Lab, Trial, events, flip_bit, kill, wait_for

REFUSED = ExitCode.USER_ERROR


def _copy(lab: Lab) -> pathlib.Path:
    workdir = lab.new_folder() / "run"
    shutil.copytree(lab.reference(), workdir)
    return workdir


def _snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time, but the lock, which is opened."""
    return {
        str(f.relative_to(folder)): (f.stat().st_size, f.stat().st_mtime_ns)
        for f in folder.rglob("*")
        if f.is_file() and f.name not in ("lock", "done")
    }


def _started(lab: Lab, workdir: pathlib.Path, says: str, note: str, config=None) -> Trial:
    """Whether a start is refused in a line with `says` and leaves the folder as it is."""
    before = _snapshot(workdir)
    code = lab.run(workdir, config)
    return Trial(
        told=code == REFUSED and says in lab.log(workdir) and _snapshot(workdir) == before,
        note=note,
    )


# ---- 18: parts of the folder


def lost_parts(lab: Lab, _: int) -> list[Trial]:
    """run.json, checkpoints, metrics gone: refused, untouched; with --restart the run begins
    anew and nothing is lost.
    """

    def without(*names):
        workdir = _copy(lab)
        for name in names:
            path = workdir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return workdir

    other_seed, other_data = lab.with_(train={"seed": 1}), lab.with_(data={"seed": 1})
    longer = lab.with_(train={"steps": lab.config.train.steps + 1})
    trials = [
        _started(lab, without("run.json"), "but no run.json", "run.json gone"),
        _started(
            lab, without("run.json"), "but no run.json", "run.json gone, another seed", other_seed
        ),
        _started(
            lab, without("run.json"), "but no run.json", "run.json gone, other data", other_data
        ),
        _started(
            lab,
            without("run.json", "metrics.jsonl"),
            "but no run.json",
            "run.json and metrics gone",
        ),
        _started(
            lab,
            without("run.json", "checkpoints"),
            "but no run.json",
            "run.json and checkpoints gone",
        ),
        _started(lab, without("checkpoints"), "every checkpoint is missing", "checkpoints gone"),
        _started(
            lab,
            without("checkpoints", "metrics.jsonl"),
            "neither its checkpoints nor",
            "checkpoints and metrics gone",
        ),
    ]
    workdir = without("checkpoints")
    (workdir / "metrics.jsonl").write_bytes(
        (workdir / "metrics.jsonl").read_bytes().replace(b'"step"', b'"stfp"')
    )
    trials.append(
        _started(lab, workdir, "neither its checkpoints nor", "checkpoints gone, metrics damaged")
    )
    workdir = without("metrics.jsonl")
    code = lab.run(workdir, longer)
    trials.append(
        Trial(
            told=code == 0 and "metrics.jsonl is missing" in lab.log(workdir), note="metrics gone"
        )
    )
    workdir = _copy(lab)
    for manifest in (workdir / "checkpoints").glob("*/manifest.json"):
        flip_bit(manifest, 40, 0)
    trials.append(_started(lab, workdir, "every checkpoint is damaged", "all checkpoints damaged"))
    lost = (workdir / "metrics.jsonl").read_bytes()
    code = lab.run(workdir, restart=True)
    kept = [f.read_bytes() for f in workdir.glob("before-*/metrics.jsonl")]
    trials.append(
        Trial(
            told=code == 0 and kept == [lost],
            recovered=True,
            bitwise=lab.same(workdir, lab.reference()),
            note="--restart",
        )
    )
    return trials


# ---- 19: checkpoints of other steps


def other_steps(lab: Lab, _: int) -> list[Trial]:
    """A checkpoint renamed, copied to another step, and of another run."""
    last, trials = lab.config.train.steps, []
    further = lab.with_(train={"steps": last + EVERY})
    for what in ("renamed", "copied"):
        workdir = _copy(lab)
        folder, target = (
            workdir / "checkpoints" / str(last - EVERY),
            workdir / "checkpoints" / str(last + 2),
        )
        folder.rename(target) if what == "renamed" else shutil.copytree(folder, target)
        code = lab.run(workdir, further)
        told = (
            code == 0
            and f"it holds step {last - EVERY}" in lab.log(workdir)
            and events(workdir, "start")[-1]["first_step"] == last
        )
        trials.append(Trial(told=told, recovered=told, note=what))
    workdir = _copy(lab)
    shutil.rmtree(workdir / "checkpoints" / str(last))
    other = lab.reference("another seed", lab.with_(train={"seed": 1}))
    shutil.copytree(other / "checkpoints" / str(last), workdir / "checkpoints" / str(last))
    code = lab.run(workdir)
    same = lab.same(workdir, lab.reference())
    trials.append(
        Trial(
            told=code == 0 and "a checkpoint of another run" in lab.log(workdir),
            recovered=same,
            bitwise=same,
            note="of another run",
        )
    )
    return trials


def older_folders(lab: Lab, _: int) -> list[Trial]:
    """A folder of an older format is refused, untouched."""
    workdir = _copy(lab)
    record = json.loads((workdir / "run.json").read_text())
    del record["digest"]
    record["format"] -= 1
    record["digest"] = digests.sha256_json(record)
    (workdir / "run.json").write_text(json.dumps(record))
    return [_started(lab, workdir, "written by an older version", "older folder")]


# ---- 20: sources


def changing_sources(lab: Lab, _: int) -> list[Trial]:
    """A source that changes while it is read: no rows of it stand under the fingerprint of what
    it was.
    """

    def change(kind: str, path: pathlib.Path) -> None:
        content = path.read_bytes()
        path.write_bytes(
            {
                "rewritten": content.replace(b"a", b"b"),
                "longer": content * 2,
                "shorter": content[: len(content) // 2],
            }[kind]
        )

    trials = []
    for kind in ("rewritten", "longer", "shorter"):
        for name in ("a.txt", "z.txt"):
            folder = lab.new_folder()
            for other in ("a.txt", "m.txt", "z.txt"):
                (folder / other).write_text(f"{other} aaaa bbbb " * 300)
            source = sources.find_source_of_glob(f"{folder}/*.txt", "text")
            tokenizer = load_tokenizer("bytes")
            encode = tokenizer.encode_documents

            def meanwhile(texts):
                change(kind, folder / name)
                return encode(texts)

            tokenizer.encode_documents = meanwhile
            recipe = preparation.RowRecipe(64, 0.1, 0)
            with _small_batches():
                trials.append(
                    _refused(
                        lambda: preparation.prepare([source], tokenizer, recipe, folder / "rows"),
                        "changed while it was being prepared",
                        f"{name} {kind}",
                    )
                )
            assert not list((folder / "rows").glob("rows/*")), "rows were packed"
    return trials


@contextlib.contextmanager
def _small_batches():
    before, tokenized_parts._BATCH_CHARACTERS = tokenized_parts._BATCH_CHARACTERS, 10
    try:
        yield
    finally:
        tokenized_parts._BATCH_CHARACTERS = before


def parquet_pages(lab: Lab, count: int) -> list[Trial]:
    """A random bit of the pages of a Parquet file that carries check sums."""
    import pyarrow
    import pyarrow.parquet

    folder, rng = lab.new_folder(), np.random.default_rng(18)
    path = folder / "a.parquet"
    texts = ["".join(map(chr, rng.integers(97, 123, 400))) for _ in range(100)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}),
        path,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )

    right = path.read_bytes()

    def read():
        return [
            document.text
            for document in readers.read_documents(sources.find_source_of_glob(str(path), "text"))
        ]

    trials = []
    for position in rng.integers(1000, 40_000, count):
        flip_bit(path, int(position), int(rng.integers(8)))
        trials.append(
            _refused(read, "a.parquet", "a bit of a page", harmless=lambda: read() == texts)
        )
        path.write_bytes(right)
    assert read() == texts
    return trials


def links(lab: Lab, _: int) -> list[Trial]:
    """Links that lead in circles and to what is there already: every file once."""
    folder = lab.new_folder()
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("a/1.txt", "a/b/2.txt", "3.txt"):
        (folder / name).write_text(name)
    (folder / "a" / "up").symlink_to("..")
    (folder / "a" / "b" / "up").symlink_to("../..")
    (folder / "again").symlink_to("a")
    (folder / "0.txt").symlink_to("3.txt")
    trials = []
    for pattern, count in (
        ("**/*.txt", 3),
        ("**", 3),
        ("*.txt", 1),
        ("a/**/*.txt", 3),
        ("**/b/**/*.txt", 3),
    ):
        found = sources.find_source_of_glob(f"{folder}/{pattern}", "text").files
        trials.append(
            Trial(told=False, harmless=len(found) == count, note=f"{pattern}: {len(found)}")
        )
    return trials


# ---- 21: runs and weights that are no good


def diverged_at_the_end(lab: Lab, batches: int) -> list[Trial]:
    """The last `batches` have a loss of NaN, too few for the guards: told by the exit code,
    again by the next start, and a sweep does not count it.
    """
    from qwen3next_jax.sweeps.results import is_done
    from tests.faults.worker import POISON

    steps = lab.config.train.steps
    workdir = lab.new_folder() / "run"
    codes = [
        lab.run(workdir, poison={steps - 1 - i: POISON for i in range(batches)}),
        lab.run(workdir),
    ]
    told = (
        codes == [ExitCode.DIVERGED] * 2
        and "diverged by step" in lab.log(workdir)
        and not is_done(workdir, lab.config.train.steps, lab.config.eval.suites)
    )
    return [Trial(told=told, note=f"the last {batches}: {codes}")]


def weights_that_are_not_finite(lab: Lab, _: int) -> list[Trial]:
    """NaN or infinity in a tensor of a Hugging Face directory, in float32 and bfloat16."""
    from safetensors.numpy import load_file, save_file

    from qwen3next_jax.interop.huggingface import load_hf, save_hf
    from qwen3next_jax.runs.checkpoint import load_trained

    folder = lab.new_folder() / "export"
    save_hf(load_trained(lab.reference())[0], folder)
    (folder / "SHA256SUMS").unlink()
    right, trials = load_file(folder / "model.safetensors"), []
    for name in list(right)[::3]:
        for value in (np.nan, -np.inf):
            tensor = right[name].copy()
            tensor.reshape(-1)[tensor.size // 2] = value
            save_file(
                right | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"}
            )
            trials.append(_refused(lambda: load_hf(folder), name, f"{name} {value}"))
    return trials


def tokens_outside(lab: Lab, _: int) -> list[Trial]:
    """Ids that are none of the vocabulary, by the Python API."""
    import jax

    from qwen3next_jax.inference import generate
    from qwen3next_jax.runs.checkpoint import load_trained

    model, trials = load_trained(lab.reference())[0], []
    for prompt in (
        [257],
        [-1],
        np.array([2**32 + 5]),
        np.array([5 - 2**32]),
        np.array([2**63], np.uint64),
        [1.5],
        [True],
        ["5"],
    ):
        for drafts in (0, 1):
            trials.append(
                _refused(
                    lambda: generate(model, [prompt], max_new_tokens=1, speculative=drafts),
                    "prompt 0",
                    f"{drafts} drafts {prompt}",
                )
            )
    for token in (257, -1):

        def run():
            with jax.debug_nans(True):
                jax.block_until_ready(model(np.array([[1, token]], np.int32)).logits)
                jax.effects_barrier()

        try:
            run()
            trials.append(Trial(told=False, note=f"debug_nans {token}"))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            trials.append(Trial(told="the vocabulary" in str(error), note=f"debug_nans {token}"))
    return trials


# ---- 22: starts that come to nothing, and what moved


def corrected_mistakes(lab: Lab, _: int) -> list[Trial]:
    """A mistyped init_from, data.path: refused; corrected, the same folder just runs. Texts that
    moved go on, and it is said. A start that has nothing to do writes nothing.
    """
    short, workdir = lab.with_(train={"steps": 4}), lab.new_folder() / "run"
    trials = []
    for note, section, wrong in (
        ("init_from", "train", {"steps": 4, "init_from": str(lab.folder / "nowhere")}),
        ("data.path", "data", {"path": str(lab.folder / "texst/*.txt")}),
    ):
        trials.append(
            Trial(told=lab.run(workdir, lab.with_(**{section: wrong})) == REFUSED, note=note)
        )
    code = lab.run(workdir, short)
    trials.append(_first_run(workdir, code, "corrected"))
    before = _snapshot(workdir)
    code = lab.run(workdir, dataclasses.replace(short, name="renamed"))
    trials.append(
        Trial(told=False, harmless=code == 0 and _snapshot(workdir) == before, note="nothing to do")
    )
    moved = lab.new_folder() / "moved"
    shutil.copytree(lab.folder / "texts", moved)
    code = lab.run(workdir, lab.with_(train={"steps": 8}, data={"path": f"{moved}/*.txt"}))
    told = code == 0 and [
        c[0] for e in events(workdir, "changed") for c in e["changes"] if "data" in c[0]
    ] == ["config.data.path"]
    trials.append(Trial(told=told, recovered=code == 0, note="texts moved"))
    return trials


def killed_before_a_step(lab: Lab, _: int) -> list[Trial]:
    """A process that is killed before its first step has trained nothing: another run may begin
    in its folder.
    """
    workdir, other = lab.new_folder() / "run", lab.with_(train={"steps": 4, "seed": 7})
    process = lab.start(workdir, other, stall=0)
    wait_for(workdir / "run.json", "digest", process)
    kill(process)
    code = lab.run(workdir, lab.with_(train={"steps": 4}))
    return [_first_run(workdir, code, "killed before the first step")]


def _first_run(workdir: pathlib.Path, code: int, note: str) -> Trial:
    good = code == 0 and [e["step"] for e in events(workdir, "train")] == [1, 2, 3, 4]
    return Trial(told=False, harmless=good, recovered=good, note=note)


def _refused(work, expected: str, note: str, harmless=lambda: False) -> Trial:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            work()
        except UserError as error:
            return Trial(told=expected in str(error) and "\n" not in str(error), note=note)
    return Trial(told=False, harmless=harmless(), note=note)
