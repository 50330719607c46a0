"""Sums the costs of this package's functions (a plan's `parts`) by parts of a step that a reader
knows, such as the router or the experts.
"""

import re
from collections.abc import Mapping

from qwen3next_jax.planner.roofline import FunctionCost

OTHER = "other"
# (part, pattern of the keys of `Estimate.cost_by_function` that belong to it, matched at their
# beginning); the first that matches counts. A key is "file function", or the name of a library's
# kernel.
_PARTS = (
    ("router", r"router|top_k|moe (choose|\S*route|_counts|\S*statistics)"),
    ("shared expert, dense MLPs", r"moe (\S*shared|_swiglu)|block_parts|layers swiglu"),
    (
        "experts",
        r"expert|routed_experts|grouped_matmul|moe|row_groups|sum_by_token|ragged_exchange|decode_moe",
    ),
    (
        "recurrent layers: delta rule",
        r"(api|dispatch) gated_delta_rule|delta_rule|gated_delta_rule",
    ),
    ("recurrent layers: convolution", r"causal_conv1d"),
    (
        "recurrent layers: projections, gates",
        r"gated_deltanet|recurrent|gated_norm|pallas_gated_norm|kda",
    ),
    ("attention: scores", r"splash|(api|dispatch) attention|ring|xla attention"),
    ("attention: projections, norms", r"gated_attention|attention_heads|pallas_heads|mla"),
    ("residual streams", r"gated_residual|residual_streams|hyper_connections|attention_residual"),
    ("head and loss", r"cross_entropy|loss"),
    ("embedding", r"language_model \S*(embed|look_up)"),
    (
        "optimizer, guards",
        r"optimizer|adamw|lazy_adamw|muon|update |parameter_groups|average|guards|gradients|state"
        r"|diagnostics",
    ),
    (
        "weights: gathers, scatters",
        r"gathering|rules|all-gather|reduce-scatter|all-reduce|all_gather",
    ),
    (
        "layer stack, multi-token prediction",
        r"language_model|layer_stack|block|multi_token|remat|layers",
    ),
)


def part_of_function(source: str) -> str:
    """Returns the part to which a key of `Estimate.cost_by_function` belongs."""
    return next((part for part, pattern in _PARTS if re.match(pattern, source)), OTHER)


def cost_by_part(by_source: Mapping[str, FunctionCost]) -> dict[str, FunctionCost]:
    """Sums the costs of functions by part, the longest first."""
    sums: dict[str, FunctionCost] = {}
    for source, cost in by_source.items():
        name = part_of_function(source)
        before = sums.get(name, FunctionCost(0.0, 0.0, 0.0))
        sums[name] = FunctionCost(*(a + b for a, b in zip(before, cost)))
    return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))
