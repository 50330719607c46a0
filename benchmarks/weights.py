"""Weights in and out: host memory beyond the arrays kept, and bytes read, on CPU devices.

    python benchmarks/weights.py [--folder=/tmp]

1. Names and shapes of the released model in 8 of its 48 layers, 30 GB of bfloat16 in sparse
   files, read as process 0 of 8, which
   owns 1/8 (split over `data`, then over `expert`).
2. A model of 4 GB at most (released dimensions, 4 layers of 64 experts), random weights:
   imported and exported on one device, on 8
   virtual ones, and by 2 real processes. Every export must have the digests of the checkpoint
   that was read.

Every line is a process of its own. Memory is what the kernel tells (VmHWM), bytes are those of
all its reads (rchar).
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

DEVICES = {"one device": 1, "8 virtual devices": 8, "2 processes": 1}
HEADER = (
    f"{'':36}{'kept':>10}{'read':>10}{'beyond, in':>13}{'beyond, out':>13}"
    f"{'allowed':>10}{'in':>8}{'out':>8}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help="where 8 GB of files go, and are removed again",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return globals()[f"part_{args.part}"](**json.loads(os.environ["BENCHMARK"]))
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="weights-") as name:
        folder = pathlib.Path(name)
        _run("make", 1, folder=name)
        print(HEADER)
        for axis in ("data", "expert"):
            _run("eighth", 8, folder=name, axis=axis)
        for title, devices in DEVICES.items():
            port = _free_port()
            _run(
                "whole",
                devices,
                *range(2) if title == "2 processes" else [0],
                title=title,
                folder=name,
                port=port,
            )
            assert (folder / "out" / "SHA256SUMS").read_text() == (folder / "SUMS").read_text(), (
                f"{title}: other digests than the source's"
            )
            shutil.rmtree(folder / "out")


def _run(part: str, devices: int, *processes: int, **arguments) -> None:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    count = len(processes) or 1
    running = [
        subprocess.Popen(
            [sys.executable, __file__, f"--part={part}"],
            env=environment
            | {
                "BENCHMARK": json.dumps(
                    arguments | ({"process": process, "processes": count} if processes else {})
                )
            },
        )
        for process in processes or [0]
    ]
    if any([process.wait() for process in running]):
        sys.exit(f"{part} failed")


def part_make(folder: str) -> None:
    """Writes sparse/ and model/, whose digests go to SUMS: without them in model/, no byte is
    read but the tensors' own.
    """
    import ml_dtypes
    import numpy as np

    from qwen3next_jax.config import ModelConfig
    from qwen3next_jax.interop.hf_config import format_hf_config
    from qwen3next_jax.interop.huggingface import stored_dtype
    from qwen3next_jax.interop.layout import parameters
    from qwen3next_jax.interop.writing import PartialExport, Tensor, files_of, header, write_json

    folder, random = pathlib.Path(folder), np.random.default_rng(0)
    values = random.standard_normal(2**25, np.float32) * np.float32(0.02)

    def tensors(config, dtype_of, blocks):
        for parameter in parameters(config):
            dtype = np.dtype(dtype_of(parameter))
            for prefix, part in itertools.product(parameter.prefixes, parameter.entry.slices):
                yield Tensor(
                    prefix + part.name,
                    dtype,
                    part.shape,
                    lambda size=math.prod(part.shape), dtype=dtype: blocks(size, dtype),
                )

    def some(size, dtype):
        while size:
            start = int(random.integers(len(values) // 2))
            block = values[start : start + size].astype(dtype)
            yield block
            size -= len(block)

    config = dataclasses.replace(ModelConfig(), num_hidden_layers=8)
    files = files_of(list(tensors(config, lambda _: ml_dtypes.bfloat16, None)))
    (folder / "sparse").mkdir()
    for name, held in files.items():
        with (folder / "sparse" / name).open("wb") as file:
            size = file.write(header(held))
            file.truncate(size + sum(tensor.nbytes for tensor in held))
    weight_map = {tensor.name: name for name, held in files.items() for tensor in held}
    write_json(folder / "sparse" / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(folder / "sparse" / "config.json", format_hf_config(config, "bfloat16"))

    config = dataclasses.replace(config, num_hidden_layers=4, num_experts=64)
    files = files_of(
        list(tensors(config, lambda parameter: stored_dtype(parameter.declared, "bfloat16"), some))
    )
    fields = format_hf_config(config, "bfloat16")

    def rest(directory):
        write_json(directory / "config.json", fields)
        write_json(
            directory / "generation_config.json",
            {
                "_from_model_config": True,
                "bos_token_id": fields["bos_token_id"],
                "eos_token_id": fields["eos_token_id"],
            },
        )

    with PartialExport(folder / "model", files, None) as unfinished:
        unfinished.begin()
        for name, held in files.items():
            unfinished.write(name, (block for tensor in held for block in tensor.blocks()))
        unfinished.finish(rest)
    (folder / "model" / "SHA256SUMS").rename(folder / "SUMS")


def part_eighth(folder: str, axis: str) -> None:
    """What `load_params` does on process 0 of 8 with one device each, but for meeting the
    others.
    """
    import jax
    from jax.sharding import NamedSharding

    from qwen3next_jax.config import MeshConfig, ParallelConfig
    from qwen3next_jax.interop import arrays
    from qwen3next_jax.interop.hf_config import read_hf_config
    from qwen3next_jax.interop.huggingface import read_parameter_slice, stored_dtype
    from qwen3next_jax.interop.layout import parameters
    from qwen3next_jax.interop.weights import Weights
    from qwen3next_jax.sharding.mesh import make_mesh
    from qwen3next_jax.sharding.rules import storage_spec

    path = pathlib.Path(folder) / "sparse"
    mesh, first = (
        make_mesh(ParallelConfig(mesh=MeshConfig(**{"data": 1, axis: 8}))),
        jax.devices()[0],
    )
    meter, kept = _Meter(), []
    with Weights(path) as weights:
        for parameter in parameters(read_hf_config(path)):
            dtype = stored_dtype(parameter.declared, "bfloat16")
            place = NamedSharding(
                mesh, storage_spec(parameter.declared, parameter.shape, mesh)
            ).devices_indices_map(parameter.shape)[first]
            kept += arrays.make_shards(
                parameter,
                dtype,
                {first: place},
                lambda box: read_parameter_slice(weights, parameter, box, dtype),
            )
        weights.check_unchanged()
    jax.block_until_ready(kept)
    size = sum(array.nbytes for array in kept)
    _print(
        f"30 GB as process 0 of 8 ({axis} = 8)",
        size,
        meter,
        meter.beyond(size),
        None,
        2 * 151_936 * 2048,
    )


def part_whole(title: str, folder: str, port: int, process: int, processes: int) -> None:
    import jax
    from flax import nnx

    from qwen3next_jax import load_hf, save_hf
    from qwen3next_jax.config import ParallelConfig
    from qwen3next_jax.processes import distributed
    from qwen3next_jax.processes.launch import Launch
    from qwen3next_jax.sharding.mesh import compute_mesh, make_mesh

    folder = pathlib.Path(folder)
    distributed.initialize(
        Launch("flags", f"127.0.0.1:{port}", processes, process), ParallelConfig()
    )
    mesh = compute_mesh(make_mesh(ParallelConfig()))
    meter = _Meter()
    model = load_hf(folder / "model", "bfloat16", mesh)
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
    size = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    inwards = meter.beyond(size)
    meter.stop()
    outwards = _Meter()
    save_hf(model, folder / "out")
    name = f"{title}, {process}" if processes > 1 else title
    _print(name, size, meter, inwards, (outwards.beyond(0), outwards.stop()), 2 * 151_936 * 2048)
    distributed.barrier()


class _Meter:
    """Seconds, bytes read and the peak of this process's memory from now on."""

    def __init__(self):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.before, self.read, self.started = _status("VmRSS"), _rchar(), time.perf_counter()

    def beyond(self, kept: int) -> int:
        return _status("VmHWM") - self.before - kept

    def stop(self) -> float:
        self.read, self.started = _rchar() - self.read, time.perf_counter() - self.started
        return self.started


def _status(field: str) -> int:
    (line,) = [
        line
        for line in pathlib.Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    ]
    return int(line.split()[1]) * 1024


def _rchar() -> int:
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


def _print(
    title: str,
    kept: int,
    meter: _Meter,
    inwards: int,
    outwards: tuple[int, float] | None,
    largest: int,
) -> None:
    if outwards is None:
        meter.stop()
    allowed = largest + 2**30
    assert max(inwards, outwards[0] if outwards else 0) <= allowed, (
        f"{title}: more memory than allowed"
    )
    cells = [kept, meter.read, inwards, outwards and outwards[0], allowed]
    text = [f"{cell / 1e9:.2f} GB" if cell is not None else "–" for cell in cells]
    text += [f"{meter.started:.0f} s", f"{outwards[1]:.0f} s" if outwards else "–"]
    print(
        f"{title:36}{text[0]:>10}{text[1]:>10}{text[2]:>13}{text[3]:>13}{text[4]:>10}{text[5]:>8}{text[6]:>8}",
        flush=True,
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main()
