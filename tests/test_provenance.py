"""What a folder says is what was trained: the short form of rows 18 to 23 of the fault table, in
this process.
"""

import contextlib
import io

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.runs.loop import train
from tests.faults import provenance
from tests.faults.lab import Lab


class Here(Lab):
    """A lab that trains in this process, which spares the start of others."""

    def run(self, workdir, config=None, timeout=0, restart=False):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            try:
                code = train(config or self.config, workdir, restart)
            except UserError as error:
                print(error)
                code = error.exit_code
        with self.log_file(workdir).open("a") as log:
            log.write(said.getvalue())
        return code


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Here(tmp_path_factory.mktemp("lab"), steps=8)
    lab.config = lab.with_(
        model={"num_hidden_layers": 1, "full_attention_interval": 1, "layer_types": ()}
    )
    return lab


@pytest.mark.parametrize(
    "row, argument",
    [
        pytest.param(provenance.lost_parts, 0, marks=pytest.mark.slow),
        (provenance.other_steps, 0),
        (provenance.older_folders, 0),
        (provenance.changing_sources, 0),
        (provenance.links, 0),
        (provenance.parquet_pages, 20),
        (provenance.weights_that_are_not_finite, 0),
        (provenance.tokens_outside, 0),
        (provenance.corrected_mistakes, 0),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_nothing_is_mixed_silently_and_no_folder_is_a_dead_end(lab, row, argument):
    trials = row(lab, argument)
    assert trials and [t for t in trials if t.silent or t.bitwise is False] == []
