"""How long the core is: what a reader needs to follow the main job, from the settings to the trained weights.

Not in it: the further lines of tables (mixers and their operators, optimizers beside AdamW, tasks beside text), kernels (Pallas,
splash attention), a row split over devices (attention's ring, the delta rule's `context.py`), and the rooms that nobody has to enter
for that: many devices beyond the mesh and its rules, planner, sweeps, reporting, evaluations, inference, exchange with other formats,
checkpoints, guards.
"""

import fnmatch
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "qwen3next_jax"
MOST = 6000  # lines, as an editor counts them

CORE = {
    "config": ("config/*.py",),
    "model": ("model/*.py",),
    "data": ("data/[!s]*.py", "data/sources.py"),  # not synthetic.py
    "ops": tuple(f"ops/{of_the_main_job}.py" for of_the_main_job in (
        "__init__", "blocks", "causal_conv1d", "checks", "cross_entropy", "grouped_matmul", "tpu", "attention/*", "delta_rule/*",
        "routed_experts/*")),
    "parallel": ("parallel/mesh.py", "parallel/rules.py"),
    "training": ("training/step.py", "training/loss.py", "training/optimizer*.py", "training/optimizers/adamw.py", "training/loop.py"),
    "leaves' names, digests": ("trees.py", "digests.py"),  # these came out of the rooms above
}
KERNELS = ("pallas*", "twins*", "tiling*", "splash*", "ring*", "context*")


def test_the_core_stays_short():
    lines = {room: sum(len(path.read_text().splitlines()) for pattern in patterns for path in PACKAGE.glob(pattern)
                       if not any(fnmatch.fnmatch(path.stem, kernel) for kernel in KERNELS)) for room, patterns in CORE.items()}
    assert all(lines.values()), f"a room of the core is empty: {lines}"
    total = sum(lines.values())
    assert total <= MOST, f"the core has {total} lines, {total - MOST} more than {MOST}: {lines}; shorten it, do not move code out of it"
