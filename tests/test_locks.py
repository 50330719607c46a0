"""A file system without locks: whoever writes to a folder says so."""

import errno
import os

import pytest

from qwen3next_jax.interop.writing import LocalExport
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sweeps.folder import open_sweep_folder


def lock_run(folder):
    with open_store(folder) as store:
        assert store.run_locked(lambda: 3) == 3


def lock_sweep(folder):
    with open_sweep_folder(folder).locked():
        pass


def lock_export(folder):
    with LocalExport(folder / "out", {}, None) as export:
        export.begin()


@pytest.mark.parametrize("lock", [lock_run, lock_sweep, lock_export])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_missing_lock_is_said_once(tmp_path, monkeypatch, capfd, lock, number):
    def fail(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    lock(tmp_path)
    (line,) = capfd.readouterr().err.splitlines()
    assert str(tmp_path) in line and os.strerror(number) in line and "overwrites" in line
