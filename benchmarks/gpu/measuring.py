"""What the benchmarks on a GPU share: taking a profile apart by kind of kernel, printing what was
found, and waiting for a process that measures. Imports nothing but the standard library.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping

STARTED = time.time()  # of this process, if it imports this file first
OTHERS = "passes over memory"
# Kind of kernel → names of kernels of XLA, Triton, CUDA's libraries and torch; the first that
# matches counts. What nothing matches are the loops that pass over arrays in memory.
GROUPS = {
    "delta rule": r"delta_rule|chunk_(fwd|bwd|gla|scaled)|wy_repr|recompute_w_u|merge_16x16|l2norm"
    r"|cumsum_(scalar|vector)|chunk_local_cumsum|solve_tril|_dqkwg|_dv_local",
    "convolution": r"conv1d|convolution",
    "gated norm": r"gated_norm|layer_norm_gated|norm_gated",
    "attention": r"flash|fmha|sdpa|cudnn_generated_fort_native|attention",
    "experts' products": r"ragged|grouped|GroupProblem|gmm|group_gemm",
    "optimizer": r"multi_tensor|FusedAdam|fused_adam",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|\bdot|_dot_|splitK|matmul|(?:^|aten::)(?:add)?mm",
    "collectives": r"nccl|all_reduce|all_gather|reduce_scatter",
    "sort, gather, scatter": r"sort|radix|gather|scatter|index|embedding|top_?k|histogram",
    "copies": r"memcpy|memset|copy|transpose",
    "reductions": r"reduce|softmax|_red_|_per_|logsumexp|(^|::)sum",
}


def wait_or_kill(child: subprocess.Popen, seconds: float) -> int | None:
    """Waits until `child` ends, at most for `seconds`; then, or if this process is interrupted,
    kills `child` and the processes that it started.

    Args:
      child: a process that was started with start_new_session=True.

    Returns:
      its exit code; None if it took too long.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def by_group(kernels: Mapping[str, float]) -> dict[str, float]:
    """Adds up {kernel: milliseconds} by kind of kernel, the longest first."""
    sums: dict[str, float] = {}
    for name, milliseconds in kernels.items():
        group = next((g for g, names in GROUPS.items() if re.search(names, name, re.I)), OTHERS)
        sums[group] = sums.get(group, 0.0) + milliseconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def report(kernels: Mapping[str, tuple[float, float]], longest: int = 12) -> dict:
    """What is written of a profile.

    Args:
      kernels: kernel → (milliseconds, calls) of one step.
      longest: how many kernels are named.
    """
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "milliseconds": sum(ms for ms, _ in kernels.values()),
        "calls": sum(calls for _, calls in kernels.values()),
        "groups": by_group({name: ms for name, (ms, _) in kernels.items()}),
        "longest": [[name[:120], ms, calls] for name, (ms, calls) in ordered[:longest]],
    }


def summary(result: dict) -> str:
    """What a process measured, in a few lines."""
    head = f"{result['side']}, {result['shape']}"
    if "failed" in result:
        return f"{head}: failed: {result['failed']}"
    lines = [f"{head}: first step after {result['first_step_seconds']:.1f} s"]
    if "seconds" in result:
        found = [
            f"{result['seconds']:.4f} s",
            f"{result['tokens'] / result['seconds']:,.0f} tokens/s",
        ]
        found += [f"MFU {result['mfu']:.1%}"] if result.get("mfu") else []
        if result["peak_bytes"]:
            found.append(f"{result['peak_bytes'] / 2**30:.1f} GiB")
        lines.append(f"a step: {', '.join(found)}; loss {result['loss']:.4f}")
        profile = result["profile"]
        lines.append(
            f"kernels: {profile['milliseconds']:.1f} ms in {profile['calls']:,.0f} calls: "
            + ", ".join(f"{name} {ms:.1f}" for name, ms in profile["groups"].items())
        )
        lines += [f"  {ms:9.3f} ms {calls:7.0f} x {name}" for name, ms, calls in profile["longest"]]
    return "\n".join(lines)
