"""`train.py --dry-run`: everything of a start that can be checked, and what the run would take.
Nothing is written.
"""

import pathlib

import jax
import numpy as np

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import Config
from qwen3next_jax.data import sources
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.inference.decode import check_request
from qwen3next_jax.model.block import partial_ablations
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.processes.distributed import is_leader, run_on_all
from qwen3next_jax.runs import preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.loop import check_start
from qwen3next_jax.runs.telemetry import memory
from qwen3next_jax.sharding.compiler_options import compiler_options, options_text
from qwen3next_jax.sharding.mesh import make_mesh, mesh_text
from qwen3next_jax.training.stages import parts_of, tokens_seen
from qwen3next_jax.training.step import abstract_train_state


def rehearse(config: Config, workdir: pathlib.Path, restart: bool = False) -> int:
    """Prints parameters, memory, data, tokens, FLOPs and from where the run would start. Returns
    the exit code.

    Raises:
      UserError: a mistake that `train` would meet, but for those in the text behind the first
      document of each glob and in the
        tensors of `init_from`, which are not read.
    """
    mesh = make_mesh(config.parallel)
    state = abstract_train_state(config, mesh)
    run_on_all(lambda: check_start(config, mesh, workdir, restart))
    config = run_on_all(lambda: preflight.with_tokenizer(config, workdir, restart))
    data = run_on_all(lambda: _data(config))
    if not is_leader():
        return ExitCode.DONE
    train, kind = config.train, mesh.devices.flat[0].device_kind
    step = 0 if restart else _newest_step(workdir)
    parent = preflight.find_parent(config, workdir, restart)
    taken = parent["step"] if parent and train.init_state == "all" else step
    sizes = {
        "parameters": _bytes(state["params"]),
        "optimizer state": _bytes(state["opt_state"]),
        "gradients": _bytes(state["params"]),
    }
    limit = memory()[1]
    for line in partial_ablations(config.model):
        print(line)
    print(
        f"{config.name}: {sum(leaf.size for leaf in jax.tree.leaves(state['params'])):,} "
        f"parameters on {mesh.size} × {kind} ({mesh_text(dict(mesh.shape))})"
    )
    if options := compiler_options(config.parallel, mesh):
        print(f"The step's {options_text(options)}")
    print(
        "Memory of a device: "
        + ", ".join(f"{name} {_mega(size)}" for name, size in sizes.items())
        + f": {_mega(sum(sizes.values()))}"
        + (f" of {_mega(limit)}" if limit else "")
        + ". Left out: activations, which grow with its tokens in a micro-batch, and what the "
        "program needs besides (qwen3next plan compiles the real step)"
    )
    print(f"Data: {data}")
    total = 0.0
    for part in parts_of(config):
        first = max(part.first, taken)
        if part.last <= first:
            continue
        one, steps, of = (
            part.config.train,
            part.last - first,
            f" of stage {part.name}" if part.name else "",
        )
        tokens, flops = (
            one.batch_size * one.sequence_length,
            flops_per_token(config.model, one.sequence_length),
        )
        total += flops * tokens * steps
        print(
            f"Tokens{of}: {one.batch_size} × {one.sequence_length} = {tokens:,} a step, "
            f"{tokens * steps:,} in {steps:,} steps ({first + 1:,} … {part.last:,}), "
            f"{-(-tokens // (one.gradient_accumulation * mesh.size)):,} a device and micro-batch"
        )
        print(
            f"FLOPs of the model{of}, forward and backward: {flops:.4g} a token, "
            f"{flops * tokens:.4g} a step, {flops * tokens * steps:.4g} in all"
        )
    if train.stages:
        print(
            f"Together: {tokens_seen(config, train.steps) - tokens_seen(config, taken):,} tokens, "
            f"{total:.4g} FLOPs in {train.steps - taken:,} steps"
        )
    if step:
        begin = f"after step {step}"
    elif not train.init_from:
        begin = f"from random weights (train.seed = {train.seed})"
    else:
        model = (
            f"{parent['path']}, step {parent['step']}"
            f"{preflight.passed_over(train.init_from, parent)}, "
            f"train.init_state = {train.init_state!r}"
            if parent
            else train.init_from
        )
        begin = f"from {model}, reading {preflight.compare_tokens(config)}"
    print(
        f"Start in {workdir}: {'nothing is left to do ' if step >= train.steps else ''}{begin}. "
        "Nothing has been written"
    )
    return ExitCode.DONE


def _data(config: Config) -> str:
    """What there is to train on."""
    tokenizer = source_of(config.data).tokenizer_of(config.data, config.model.vocab_size)
    if config.eval.sample_tokens:
        check_request(
            config.model,
            [tokenizer.encode(config.eval.sample_prompt)],
            config.eval.sample_tokens,
            0.7,
        )
    if config.data.source != "text":
        return f"{config.data.source}, made as it is read"
    found = [
        sources.resolve(glob, config.data.text_field, config.data.on_bad_text)
        for glob in config.data.globs or ("",)
    ]
    for source in found:
        next(sources.documents(source))
    return (
        f"{sum(len(source.files) for source in found):,} files, "
        f"{_mega(sum(source.size for source in found))}, tokenizer of "
        f"{tokenizer.vocab_size:,} tokens; the first document of "
        f"{'each glob' if len(found) > 1 else 'it'} has been read"
    )


def _newest_step(workdir: pathlib.Path) -> int:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.newest_good_step() or 0


def _bytes(state) -> int:
    """Of the part of `state` (shapes and places) that lies on one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def _mega(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
