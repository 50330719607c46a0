"""s3://, as far as it goes: rows and Hugging Face directories, against the server of moto
(`pip install 'moto[server]'`).
"""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax import load_hf, save_hf
from qwen3next_jax.common.storage import ABSENT, VersionConflict, to_path
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.pipeline import TextData
from tests.refusals import refused

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "qwen3_next_tiny"


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket. One server serves all tests, as clients are kept for a process."""
    server = pytest.importorskip("moto.server", reason="needs moto's server")
    session = pytest.importorskip("botocore.session", reason="needs the extra s3")
    served = server.ThreadedMotoServer(port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        session.get_session().create_client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    served.stop()


def test_objects(bucket):
    path = to_path(f"{bucket}/folder/a")
    path.write_bytes(b"0123456789")
    to_path(f"{bucket}/folder/deep/b").write_text("b")
    assert path.read_bytes() == b"0123456789"
    assert sorted(child.name for child in to_path(f"{bucket}/folder").iterdir()) == ["a", "deep"]
    assert not to_path(f"{bucket}/folder/c").exists()
    with pytest.raises(FileNotFoundError):
        to_path(f"{bucket}/folder/c").read_bytes()
    path.unlink()
    assert not path.exists()
    with refused("absent"):
        load_hf("s3://absent/model")


def test_a_write_on_a_condition(bucket):
    path = to_path(f"{bucket}/lock")
    version = path.write(b"one", replaces=ABSENT)
    with pytest.raises(VersionConflict):
        path.write(b"two", replaces=ABSENT)
    path.write(b"two", replaces=version)
    with pytest.raises(VersionConflict):
        path.write(b"three", replaces=version)
    assert path.read_bytes() == b"two"


def test_rows_are_the_local_rows(bucket, tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    config = DataConfig(path=f"{tmp_path}/*.txt", heldout_fraction=0.2)
    local, remote = (
        TextData(dataclasses.replace(config, prepared_dir=place), 64, 4)
        for place in (str(tmp_path / "prepared"), f"{bucket}/prepared")
    )
    assert remote.fingerprint == local.fingerprint
    for found, expected, _ in zip(remote.batches(2), local.batches(2), range(3)):
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_a_hugging_face_directory(bucket, tmp_path):
    model = load_hf(FIXTURE)
    save_hf(model, tmp_path / "local")
    save_hf(model, f"{bucket}/out")
    for path in (tmp_path / "local").iterdir():
        assert to_path(f"{bucket}/out/{path.name}").read_bytes() == path.read_bytes()
    again = load_hf(f"{bucket}/out")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    with refused("out"):
        save_hf(model, f"{bucket}/out")
