"""Kernels for the operators in `qwen3next_jax.ops`, for TPUs and for NVIDIA GPUs. Most of the GPU
kernels need a Hopper GPU; the kernels of the experts run on all GPUs from Ampere on. If the folder
`kernels` is deleted, the operators run their XLA implementations.

`ops.implementations` reads the table `KERNELS`, which gives the modules as import strings. The
module of a kernel is imported when JAX traces a call for the kernel's platform of the operator that
the kernel computes, or when a call names the kernel.
"""

# {operator: {name of the implementation: (platform, module)}}. If an operator had several
# implementations for one platform, the preferred one would come first.
KERNELS = {
    "gated_delta_rule": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.delta_rule"),
        "pallas_gpu": ("gpu", "qwen3next_jax.kernels.gpu.delta_rule"),
    },
    "attention": {
        "splash": ("tpu", "qwen3next_jax.kernels.tpu.splash_attention"),
        "cudnn": ("gpu", "qwen3next_jax.kernels.gpu.attention"),
    },
    "attention_heads": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.attention_heads"),
    },
    "causal_conv1d": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.causal_conv1d"),
        "pallas_gpu": ("gpu", "qwen3next_jax.kernels.gpu.causal_conv1d"),
    },
    "gated_norm": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.gated_norm"),
        "pallas_gpu": ("gpu", "qwen3next_jax.kernels.gpu.gated_norm"),
    },
    "grouped_matmul": {
        "tokamax": ("gpu", "qwen3next_jax.kernels.gpu.grouped_matmul"),
    },
    "indexed_attention": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.indexed_attention"),
    },
    "residual_streams": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.residual_streams"),
    },
    "routed_experts": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.routed_experts"),
        "tokamax": ("gpu", "qwen3next_jax.kernels.gpu.routed_experts"),
    },
    "sum_by_token": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.sum_by_token"),
    },
    "top_k": {
        "pallas_tpu": ("tpu", "qwen3next_jax.kernels.tpu.top_k"),
    },
}
