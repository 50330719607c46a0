"""The gated delta rule with Mosaic GPU kernels for Hopper (sm_90a). `kernels.KERNELS` lists this
module as the implementation "pallas_gpu"; `delta_rule_passes` runs the kernels.
docs/notes/gpu.md says what the kernels do and how fast they are.
"""

import jax.numpy as jnp

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import delta_rule_self_test
from qwen3next_jax.kernels.gpu.delta_rule_passes import backward, forward
from qwen3next_jax.kernels.gpu.delta_rule_problem import WIDTHS, Problem, WorkSplit
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

__all__ = ["backward", "forward", "is_default", "unsupported_reason"]


def unsupported_reason(x: Inputs, settings: Settings, split: bool) -> str:
    """Returns why the kernels cannot run a call of the operator in this process; "" if they can.

    Args:
      x: the arrays with a time axis.
      settings: the static settings.
      split: whether the sequence is split over a mesh axis.
    """
    q, k, v = x.q, x.k, x.v
    if split:
        return "over a mesh axis: there is no kernel for it"
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"has q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: expected bfloat16"
    narrowest, widest = WIDTHS[0] // 2 + 1, WIDTHS[-1]
    if not all(narrowest <= x.shape[3] <= widest for x in (q, v)):
        return (
            f"has heads of {q.shape[3]} and {v.shape[3]} channels: expected {narrowest} to "
            f"{widest} (narrower heads would be padded to more than twice their width)"
        )
    return self_test.unsupported_chip_reason()


def is_default(x: Inputs, settings: Settings, split: bool) -> bool:
    """Returns whether a call that names no implementation runs the kernels. The call runs the
    kernels if rows have more than 32 tokens, if the kernels support the call and if the kernels
    passed their test on this GPU. For rows of more than 32 tokens the function prints the decision
    once.
    """
    if x.q.shape[1] <= C // 2:  # XLA takes shorter chunks for such short rows
        few = f"has rows of {x.q.shape[1]} tokens: the kernels run longer ones"
        implementations.record_why_default(False, f"{few} {implementations.BY_DEFAULT}")
        return False
    refusal = unsupported_reason(x, settings, split)
    # The heads of a call that the kernels refuse may be narrower than a tile: nothing to split.
    over_chip = WorkSplit(1, 1) if refusal else Problem.of_call(x, settings).work_split
    sizes = x.q.shape[3], x.v.shape[3]
    test = delta_rule_self_test.make_self_test(
        *sizes, settings.normalize_qk, settings.delta_term, over_chip
    )
    return self_test.kernels_run_by_default(test, refusal)
