"""Times one training step of the peer on one GPU: transformers' Qwen3-Next or Qwen3.5 with the
kernels of flash-linear-attention.

    PYTHON_WITH_TORCH benchmarks/gpu/peer.py --shape=period [--compile] [--json=FILE]
    PYTHON_WITH_TORCH benchmarks/gpu/peer.py --shape=small --tiny    on a CPU, by torch alone

What a user of these libraries picks: transformers 5.23, flash-linear-attention 0.6 (delta rule,
causal convolution, gated norm), torch's grouped products for the experts, its scaled dot-product
attention (FlashAttention or cuDNN), weights and moments in bfloat16, the fused AdamW, clipping.
`--weights=float32` keeps float32 weights and moments, with products in bfloat16 by autocast, as
this project does. `--compile` puts the model through torch.compile.

Packed rows are one row of all tokens with `cu_seq_lens_q`, which flash-linear-attention reads; for
attention they need the package flash-attn, or `--attention=flex_attention`, the default then.

Imports nothing of this project but `shapes`, `measuring` and `harness`, so that its interpreter
needs no JAX.
Prints and writes what `step.py` does.
"""

import argparse
import functools
import importlib
import importlib.util
import os
import pathlib
import sys
import time
import traceback

# The interpreter with torch does not have this project.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.gpu import measuring, shapes


def config_of(transformers, shape: shapes.Shape, attention: str):
    """Returns the configuration of transformers."""
    fields = dict(shape.model) | {
        "max_position_embeddings": max(shape.tokens, 32_768),
        "use_cache": False,
    }
    name = {"qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig"}[shape.family]
    if shape.family == "qwen3_5":
        fields.pop("num_experts")
    fields.setdefault("tie_word_embeddings", False)
    config = getattr(transformers, name)(**fields)
    config._attn_implementation = attention
    if fields.get("num_experts"):
        config._experts_implementation = "grouped_mm"
    return config


def use_kernels(modeling, family: str) -> list[str]:
    """Puts flash-linear-attention's convolution and gated norm into transformers' module, which
    finds its delta rule by itself. Returns what runs.
    """
    import fla
    from fla.modules import FusedRMSNormGated
    from fla.modules.convolution import causal_conv1d

    def convolution(hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, **_):
        y = causal_conv1d(
            hidden_states.transpose(1, 2).contiguous(),
            weight,
            bias,
            activation=activation,
            cu_seqlens=cu_seq_lens_q,
        )
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)

    class GatedNorm(FusedRMSNormGated):
        def __init__(self, hidden_size, eps=1e-6, **_):
            super().__init__(hidden_size, eps=eps, activation="swish")

    modeling.causal_conv1d_fn = convolution
    prefix = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}[family]
    setattr(modeling, f"{prefix}RMSNormGated", GatedNorm)
    return [f"flash-linear-attention {fla.__version__}"]


def separate_documents(modeling) -> None:
    """Lets transformers' reference forms in torch, which refuse packed rows, run one document
    after the other: on a CPU, where flash-linear-attention has no kernels.
    """
    import torch

    def by_document(function, boundaries, time_axis, arrays, **more):
        parts = []
        for begin, end in zip(boundaries, boundaries[1:]):
            cut = [x.narrow(time_axis, begin, end - begin) for x in arrays]
            parts.append(function(*cut, **more))
        return parts

    convolution, rule = modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule

    @functools.wraps(convolution)
    def convolve(x, weight, bias=None, activation=None, cu_seq_lens_q=None, **_):
        boundaries = [0, x.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
        more = {"weight": weight, "bias": bias, "activation": activation}
        return torch.cat(by_document(convolution, boundaries, 2, [x], **more), dim=2)

    @functools.wraps(rule)
    def chunk(q, k, v, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False, **_):
        boundaries = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()

        def one(q, k, v, g, beta):
            return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

        parts = by_document(one, boundaries, 1, [q, k, v, g, beta])
        return torch.cat([o for o, _ in parts], dim=1), None

    modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule = convolve, chunk


def batch_of(torch, shape: shapes.Shape, device: str) -> dict:
    """Returns what the model takes: rows of random tokens, or one row of all packed documents."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.rows, shape.length)
    tokens = torch.randint(shape.model["vocab_size"], size, generator=generator).to(device)
    if shape.documents == 1:
        return {"input_ids": tokens, "labels": tokens}
    lengths = shape.document_lengths * shape.rows
    tokens = tokens.reshape(1, -1)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": positions,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def profile(torch, step, on_gpu: bool) -> dict[str, tuple[float, float]]:
    """Returns kernel → (milliseconds, calls) of one step; on a CPU, of torch's operators."""
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        step()
    times = {}
    for event in found.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            times[event.key] = (1e-3 * microseconds, event.count)
    return times


def attention_of(shape: shapes.Shape, on_gpu: bool) -> str:
    """The attention that transformers has for rows of these documents."""
    if shape.documents == 1 or not on_gpu:
        return "sdpa"
    has_flash_attention = importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash_attention else "flex_attention"


def measure(shape: shapes.Shape, options: argparse.Namespace) -> dict:
    """Builds and times the step; returns what is written."""
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    modeling = importlib.import_module(
        f"transformers.models.{shape.family}.modeling_{shape.family}"
    )
    versions = [f"transformers {transformers.__version__}", f"torch {torch.__version__}"]
    if on_gpu:
        versions += use_kernels(modeling, shape.family)
    elif shape.documents > 1:
        separate_documents(modeling)
    config = config_of(transformers, shape, options.attention or attention_of(shape, on_gpu))
    torch.manual_seed(0)
    weights = torch.bfloat16 if on_gpu and options.weights == "bfloat16" else torch.float32
    torch.set_default_dtype(weights)
    with torch.device(device):
        name = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
        model = getattr(modeling, name[shape.family])(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    batch = batch_of(torch, shape, device)
    if config.to_dict().get("num_experts"):
        batch["output_router_logits"] = True  # adds the balance loss
    forward = torch.compile(model) if options.compile else model
    autocast = torch.autocast(
        device, dtype=torch.bfloat16, enabled=on_gpu and weights == torch.float32
    )
    loss = None

    def one():
        nonlocal loss
        with autocast:
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()

    one()
    result = {
        "side": side(options),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": ", ".join(versions),
        "attention": config._attn_implementation,
        "weights": str(weights).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_step_seconds": time.time() - measuring.STARTED,
        "loss_of_first_step": float(loss.detach()),
    }
    if options.first_step_alone:
        return result
    with harness.alone():
        median, seconds = harness.median_seconds(one, options.rounds)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        kernels = profile(torch, one, on_gpu)
    return result | {
        "seconds": median,
        "all_seconds": seconds,
        "peak_bytes": peak,
        "loss": float(loss.detach()),
        "profile": measuring.report(kernels),
    }


def side(options: argparse.Namespace) -> str:
    """The name of this side of the comparison."""
    return "transformers and fla, " + ("torch.compile" if options.compile else "eager")


def main() -> int:
    parser = harness.arguments(__doc__)
    with_peer = [name for name, shape in shapes.SHAPES.items() if shape.family]
    parser.add_argument("--shape", required=True, choices=with_peer)
    parser.add_argument("--json", type=pathlib.Path, help="the file to write")
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--attention", default="", help="of transformers, instead of the default")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--first_step_alone", action="store_true")
    options = parser.parse_args()
    shape = shapes.SHAPES[options.shape]
    if options.tiny:
        shape = shapes.tiny(shape)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        result = measure(shape, options)
    except Exception as error:
        traceback.print_exc()
        result = {"side": side(options), "failed": harness.one_line(error)}
    result = {"shape": options.shape, "tokens": shape.tokens} | result
    if options.json:
        harness.write_json(options.json, result)
    print(measuring.summary(result), flush=True)
    return int("failed" in result)


if __name__ == "__main__":
    sys.exit(main())
