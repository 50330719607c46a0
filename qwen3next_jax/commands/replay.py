"""Repeats the step at which a guard against spikes, or against numbers that are not finite, ended a
run, from the dump that the run wrote. Prints the norm of every parameter and of its gradient, and
the number of values that are not finite.

    qwen3next replay WORKDIR/dumps/STEP
"""

from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from qwen3next_jax.commands import process_setup
from qwen3next_jax.commands.console import make_console
from qwen3next_jax.common.errors import UserError, escape_control
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.common.trees import path_string

ARGUMENTS = "DUMP"  # the positional arguments, for --help


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise UserError("expected one folder: qwen3next replay WORKDIR/dumps/STEP")
    folder = to_path(arguments[0])
    if not (folder / "dump.json").is_file():  # before JAX loads
        raise UserError(
            f"{arguments[0]}: not a dump of a step (it has no dump.json): expected a folder such "
            "as WORKDIR/dumps/STEP"
        )
    process_setup.enable_compilation_cache()
    # Imported here, so that the user learns of a wrong flag before JAX loads.
    import jax

    from qwen3next_jax.runs.guard_flags import read_dump
    from qwen3next_jax.training.gradients import make_gradients
    from qwen3next_jax.training.loop import make_train_step
    from qwen3next_jax.training.stages import stage_at

    dump = read_dump(folder)
    reason = escape_control(f"step {dump.step}, halted because of {dump.reason}")
    print(f"{arguments[0]}: {reason}")
    for row, names in enumerate(dump.document_names):
        print(escape_control(f"row {row}: {', '.join(names)}"))

    stage = stage_at(dump.run.stages, dump.step)
    # what is frozen has no gradient, and lazy AdamW's tables have none of their shape
    params = dump.run.groups.select_main_group(dump.state["params"])
    gradients, *_ = jax.jit(make_gradients(dump.run, stage))(dump.state["params"], dump.batch)
    make_console().print(norms_table(jax.device_get(params), jax.device_get(gradients.main_group)))

    _, values = make_train_step(dump.run, stage)(dump.state, dump.batch)
    scalars = {
        name: float(value) for name, value in values.items() if getattr(value, "ndim", None) == 0
    }
    print("the step: " + ", ".join(f"{name} {value:.6g}" for name, value in scalars.items()))
    return 0


def norms_table(params: Any, gradients: Any) -> Table:
    """Returns a table with the norms of every parameter and its gradient.

    Args:
      params: tree of NumPy arrays.
      gradients: tree of NumPy arrays with the same structure.
    """
    import jax
    import numpy as np

    table = Table(
        # Where the terminal is too narrow, the names take several lines. Nothing is cut.
        Column("parameter", overflow="fold"),
        *(
            Column(heading, no_wrap=True)
            for heading in ("norm", "not\nfinite", "gradient\nnorm", "not\nfinite", "largest")
        ),
        title="before the update",
        title_justify="left",
        box=SIMPLE,
    )
    for (path, value), gradient in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(gradients), strict=True
    ):
        table.add_row(
            path_string(path, "."),
            *_norm_and_nonfinite_cells(np.asarray(value)),
            *_norm_and_nonfinite_cells(np.asarray(gradient)),
            f"{np.max(np.abs(gradient)):.3g}",
        )
    return table


def _norm_and_nonfinite_cells(values) -> tuple[str, str]:
    """Returns two texts: the L2 norm of `values`, and the number of values that are not finite (""
    if all are finite).
    """
    import numpy as np

    bad = int(np.sum(~np.isfinite(values)))
    return f"{np.linalg.norm(values.astype(np.float64).ravel()):.4g}", f"{bad}" if bad else ""
