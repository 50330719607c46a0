"""Contents of run.json for tests that need no run."""

from qwen3next_jax.runs.record import RunRecord

_ENTRIES = {
    "config": {},
    "data": (),
    "tokenizer": "tokens",
    "code": "code",
    "versions": {},
    "processes": 1,
    "devices": "1 × cpu",
    "source": None,
    "id": "run",
}


def record(**entries) -> RunRecord:
    """A record with these entries; the others mean nothing."""
    return RunRecord(**_ENTRIES | entries)
