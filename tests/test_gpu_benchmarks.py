"""The table of training steps that benchmarks/gpu measures, and how it sorts kernels."""

import pathlib

import pytest

from benchmarks.gpu import measure_all, measuring, shapes, step
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.config.files import load_config_file
from qwen3next_jax.model.flops import flops_per_token, parameter_counts

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["small", "qwen3_5_0p8b"])
def test_a_step_has_its_configs_model(name):
    """Without multi-token prediction, which the peer does not have."""
    values = load_config_file(ROOT / "configs" / f"{name}.py")
    values["model"]["mtp_depth"] = 0
    shape = shapes.SHAPES[name]
    want, got = from_dict(Config, values).model, step.config_of(shape).model
    assert parameter_counts(got) == parameter_counts(want)
    assert flops_per_token(got, shape.length) == flops_per_token(want, shape.length)


def test_documents_fill_their_rows():
    for shape in shapes.SHAPES.values():
        for each in (shape, shapes.tiny(shape)):
            assert sum(each.document_lengths) == each.length
            assert len(set(each.document_lengths)) == each.documents
            ids = step.batch_of(each)["segment_ids"]
            assert ids.shape == (each.rows, each.length)
            assert ids.max() == each.documents
            assert each.rows % each.micro_batches == 0


def test_separate_documents_cost_less_than_one():
    """A query reads its own document, so `packed` has fewer FLOPs than `period`, by attention
    alone: the same parameters, and 12 N H T / 2 for every token.
    """
    one, packed = shapes.SHAPES["period"], shapes.SHAPES["packed"]
    read = lambda shape: sum(t * (t + 1) / 2 for t in shape.document_lengths) * shape.rows
    a_pair = 12 * 16 * 256
    less = step.flops_of(one) - step.flops_of(packed)
    assert less == pytest.approx(a_pair * (read(one) - read(packed)), rel=1e-9)


@pytest.mark.parametrize(
    "kernel, group",
    [
        ("gated_delta_rule_gradients_mosaic_gpu_kernel", "delta rule"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("recompute_w_u_fwd_kernel", "delta rule"),
        ("causal_conv1d_bwd_kernel", "convolution"),
        ("gated_norm_forward_mosaic_gpu_kernel", "gated norm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_f16", "attention"),
        ("ragged_contracting_dim_dot_sm90_mosaic_gpu_kernel", "experts' products"),
        ("void cutlass::device_kernel<GroupProblemShape<Shape<int>>>", "experts' products"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata>", "optimizer"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("gemm_fusion_dot_general_62", "products"),
        ("loop_dynamic_update_slice_fusion_7", "passes over memory"),
        ("loop_convert_fusion_3", "passes over memory"),
        ("void at::native::vectorized_elementwise_kernel<4>", "passes over memory"),
        ("input_reduce_fusion_17", "reductions"),
        ("MemcpyD2D", "copies"),
    ],
)
def test_kernels_are_sorted_by_what_they_do(kernel, group):
    assert list(measuring.by_group({kernel: 1.0})) == [group]


def test_a_command_that_fails_ends_alone(monkeypatch, tmp_path):
    part = lambda name, code, minutes: measure_all.Part(name, ("-c", code), (), minutes)
    slow = "print('begun', flush=True); import time; time.sleep(60)"
    parts = part("bad", "1 / 0", 1), part("slow", slow, 1 / 60), part("good", "print(6 * 7)", 1)
    monkeypatch.setattr(measure_all, "PARTS", parts)
    arguments = ["measure_all", f"--folder={tmp_path}", "--only=bad,slow,good"]
    monkeypatch.setattr("sys.argv", arguments)
    assert measure_all.main() == 1
    log = (tmp_path / "log.txt").read_text()
    assert "ZeroDivisionError" in log
    assert "slow: ended after 1 s" in log and "begun" in log
    assert "good: code 0" in log and "\n42\n" in log
    assert [file.name for file in tmp_path.iterdir()] == ["log.txt"]
