"""Import and export of Hugging Face directories: no value is lost, and a damaged or unsupported
directory is refused. test_reference.py compares the results of imported models with transformers'.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from configs import olmo_hybrid_7b, qwen3_5_0p8b
from qwen3next_jax import ModelConfig, Qwen3Next, hf_tensors, load_hf, save_hf
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, MeshConfig, ParallelConfig, from_dict, registry
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.data.synthetic import TaskTokenizer
from qwen3next_jax.interop import arrays, writing
from qwen3next_jax.interop.families import FORMS, qwen3_next
from qwen3next_jax.interop.families.form import NOT_IN_FILES
from qwen3next_jax.interop.hf_config import hf_config_fields, read_hf_config
from qwen3next_jax.interop.layout import stored_parameters
from qwen3next_jax.interop.source import config_for_export, with_end_token
from qwen3next_jax.interop.weights import Weights
from qwen3next_jax.interop.writing import LocalExport
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.runs.init_from import EXPERT_SETTINGS
from qwen3next_jax.sharding.mesh import make_mesh
from tests import references
from tests.models import HYBRID, drawn_model
from tests.refusals import refused

REFERENCE = pathlib.Path(__file__).parents[1] / "fixtures" / "qwen3_next_tiny"
SMALL = dataclasses.replace(
    HYBRID,
    num_hidden_layers=4,
    full_attention_interval=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    num_experts=3,
    mtp_depth=1,
)
VARIANTS = {
    "released pattern, scanned": {"num_hidden_layers": 8},
    "no period": {
        "layer_types": ("linear_attention", "full_attention", "full_attention", "linear_attention")
    },
    "dense, tied, YaRN": {
        "num_experts": 0,
        "tie_word_embeddings": True,
        "hf_form": "qwen3_5_text",
        "yarn_factor": 4.0,
    },
    "dense and sparse layers": {
        "full_attention_interval": 0,
        "num_hidden_layers": 5,
        "mlp_only_layers": (0,),
    },
    "tied, no shared expert, no MTP, YaRN": {
        "yarn_factor": 2.5,
        "tie_word_embeddings": True,
        "shared_expert_intermediate_size": 0,
        "mtp_depth": 0,
    },
    "deeper MTP, fused experts, other numbers": {
        "hf_form": "qwen3_5",
        "hf_fused_experts": ("trunk",),
        "mtp_depth": 3,
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 7,
    },
    "Kimi Linear": {
        "hf_form": "kimi_linear",
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_mixer": "kda",
        "full_mixer": "mla",
        "mtp_depth": 0,
        "zero_centered_norm": False,
        "attention_output_gate": False,
        "num_attention_heads": 2,
        "decay_init": "log_uniform",
        "partial_rotary_factor": 0.0,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 4,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": (0,),
        "mixer": MixerConfig(latent_rank=6, query_rank=5, shared_key_width=2, latent_norm_eps=1e-6),
        "moe": MoEConfig(
            scoring_func="sigmoid",
            router_bias=True,
            shared_expert_gate=False,
            routed_scaling_factor=2.5,
        ),
    },
}
OLMO_HYBRID = {
    "hf_form": "olmo_hybrid",
    "num_hidden_layers": 4,
    "mtp_depth": 0,
    "num_experts": 0,
    "attention_output_gate": False,
    "zero_centered_norm": False,
    "beta_range": 2,
    "decay_init": "log_uniform",
    "partial_rotary_factor": 0.0,
    "block": BlockConfig(placement="olmo_hybrid"),
    "mixer": MixerConfig(qk_norm_over="layer", output_norm_eps=1e-5),
}
VARIANTS |= {
    "Olmo Hybrid": OLMO_HYBRID,
    "Olmo Hybrid, attention first, positions, β in (0, 1), tied": OLMO_HYBRID
    | {
        "full_attention_placement": "first",
        "partial_rotary_factor": 1.0,
        "rope_theta": 5e5,
        "beta_range": 1,
        "tie_word_embeddings": True,
        "head_dim": 4,
        "linear_conv_kernel_dim": 3,
    },
}


def new_model(**changes) -> Qwen3Next:
    """A small model with random weights, whose settings are SMALL with `changes`."""
    config = dataclasses.replace(SMALL, **{"layer_types": (), **changes})
    return drawn_model(config)


def bits(model: Qwen3Next) -> dict[str, tuple]:
    """Parameter → (shape, dtype, bytes)."""
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]
    return {
        jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes())
        for path, leaf in flat
    }


def content(directory: pathlib.Path) -> dict[str, bytes]:
    """File name → bytes of all files in a directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory) -> pathlib.Path:
    """An export of a model with eight layers, which tests do not change."""
    folder = tmp_path_factory.mktemp("interop") / "eight"
    save_hf(new_model(num_hidden_layers=8), folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path) -> pathlib.Path:
    """A copy of the reference checkpoint, which a test may damage."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REFERENCE / name, tmp_path)
    return tmp_path


def edit_config(directory: pathlib.Path, **changes) -> None:
    """Sets fields of config.json. A field with the value None is removed."""
    fields = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in fields.items() if v is not None})
    )


def edit_tensors(directory: pathlib.Path, edit) -> None:
    """Calls `edit` with the dict of all tensors, and stores the result."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


SMALLEST, OLMO_7B = (
    from_dict(Config, file.get_config().to_dict()).model for file in (qwen3_5_0p8b, olmo_hybrid_7b)
)


# Transformers' classes count as many parameters, of the second model in the trunk.
@pytest.mark.parametrize(
    ("config", "inventory"),
    [
        (ModelConfig(), (75_944, 81_324_862_720)),
        (SMALLEST, (335, 752_393_024 + 20_452_864)),
        (OLMO_7B, (523, 7_430_870_688)),
    ],
    ids=("qwen3_next", "qwen3_5", "olmo_hybrid"),
)
def test_released_models_have_their_published_inventory(config, inventory):
    shapes = [
        part.shape
        for p in stored_parameters(config)
        for _ in p.layer_prefixes
        for part in p.entry.slices
    ]
    assert (len(shapes), sum(int(np.prod(shape)) for shape in shapes)) == inventory


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_then_import_gives_the_same_bits_and_config(tmp_path, variant):
    model = new_model(**VARIANTS[variant])
    save_hf(model, tmp_path / "out")
    again = load_hf(tmp_path / "out")
    # settings that not every form stores
    not_stored = {"intermediate_size"} if model.config.num_experts else EXPERT_SETTINGS
    assert set(again.config.differing_settings(model.config)) <= not_stored
    assert bits(again) == bits(model)


def test_both_namings_of_olmo_hybrid_s_norms_are_read_and_the_released_one_is_written(tmp_path):
    """transformers' save_pretrained names the norms of all layers like those of the second."""
    released = REFERENCE.parent / "olmo_hybrid_tiny"
    shutil.copytree(released, tmp_path / "renamed")
    renamed = {
        name.replace(".input_layernorm.", ".attention_layer_norm.").replace(
            ".post_attention_layernorm.", ".feedforward_layer_norm."
        ): values
        for name, values in load_file(released / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "renamed" / "model.safetensors")
    model = load_hf(tmp_path / "renamed")
    assert bits(model) == bits(load_hf(released))
    save_hf(model, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names == load_file(released / "model.safetensors").keys()


def test_forms_name_settings_that_exist():
    assert FORMS.keys() == set(typing.get_args(typing.get_type_hints(ModelConfig)["hf_form"]))
    for form in FORMS.values():
        assert form.supported_settings | NOT_IN_FILES <= ModelConfig.__dataclass_fields__.keys()
        assert form.mixer_entries.keys() <= registry.MIXERS.keys()


class OwnAttention(mixer_class("gated_attention")):
    hf_entries = staticmethod(qwen3_next.gated_attention_entries)


class Derived(OwnAttention):
    pass


class LeavesOneOut(OwnAttention):
    @staticmethod
    def hf_entries(config):
        entries = qwen3_next.gated_attention_entries(config)
        return (entry for entry in entries if entry.path != "q_norm")


def test_an_own_mixer_brings_its_own_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_trusted", set())

    def with_mixer(cls):
        own = f"{__name__}:{cls.__name__}"
        return {"layer_types": ("linear_attention", own, own, "linear_attention")}

    model = new_model(**with_mixer(OwnAttention))
    save_hf(model, tmp_path / "out")
    package = __name__.partition(".")[0]
    with refused("layer_types", ":OwnAttention", f"--trust={package}"):
        load_hf(tmp_path / "out")
    registry.trust(package)
    assert bits(load_hf(tmp_path / "out")) == bits(model)
    for cls, name in ((Derived, ":Derived"), (LeavesOneOut, "mixer/q_norm")):
        with refused(name):
            save_hf(new_model(**with_mixer(cls)), tmp_path / "other")


def _mesh(**sizes):
    """A mesh of the first virtual devices, with these numbers of devices along its axes."""
    return make_mesh(
        ParallelConfig(mesh=MeshConfig(**sizes)), jax.devices()[: math.prod(sizes.values())]
    )


@pytest.mark.parametrize(
    "mesh, dtype",
    [
        pytest.param({"data": 8}, "bfloat16", marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 3}, "float32", marks=pytest.mark.slow),
        ({"data": 2, "tensor": 4}, "float32"),
    ],
    ids=str,
)
def test_a_mesh_changes_no_bit_of_files(eight_layers, tmp_path, monkeypatch, mesh, dtype):
    whole = load_hf(eight_layers, dtype)
    save_hf(whole, tmp_path / "whole")
    monkeypatch.setattr(arrays, "MAX_PIECE_BYTES", 4000)  # so that parameters take many pieces
    sharded = load_hf(eight_layers, dtype, _mesh(**mesh))
    assert bits(sharded) == bits(whole)
    experts = sharded.layers[0].mlp.expert_gate_up[...]
    assert len({shard.index for shard in experts.addressable_shards}) == math.prod(mesh.values())
    save_hf(sharded, tmp_path / "sharded")
    assert content(tmp_path / "sharded") == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_mesh_changes_no_bit_of_separate_projections(tmp_path, monkeypatch):
    released = REFERENCE.parent / "olmo_hybrid_tiny"
    monkeypatch.setattr(arrays, "MAX_PIECE_BYTES", 4000)  # so that parameters take many pieces
    sharded = load_hf(released, mesh=_mesh(data=2, tensor=2))
    assert bits(sharded) == bits(load_hf(released))
    save_hf(sharded, tmp_path / "out")
    out, original = (load_file(d / "model.safetensors") for d in (tmp_path / "out", released))
    assert out.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_array_equal(out[name], values, err_msg=name)


def test_all_processes_read_the_same_bits():
    """The function that reads arrays that span processes, with an array of this process only."""
    mesh = _mesh(data=2, expert=2, tensor=2)
    for dtype in (jnp.float32, jnp.bfloat16):
        values = jax.random.normal(jax.random.key(0), (3, 8, 4, 6), dtype).at[:, ::3].set(-0.0)
        array = jax.device_put(values, NamedSharding(mesh, P(None, ("data", "expert"), "tensor")))
        for part in (
            (slice(1, 2), slice(0, 8), slice(0, 4), slice(0, 6)),
            (slice(0, 3), slice(1, 6), slice(1, 4), slice(2, 3)),
        ):
            sizes = tuple(side.stop - side.start for side in part)
            gather = arrays._make_slice_gather(array.sharding, sizes)
            found = gather(array, np.array([side.start for side in part], np.int32))
            assert np.asarray(found).tobytes() == np.asarray(values)[part].tobytes()


def test_a_killed_export_keeps_whole_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 8192)
    model, write, written = new_model(), LocalExport.write, []
    save_hf(model, tmp_path / "expected")

    def kill_after(count):
        """Makes exports fail once `count` files in all were written; -1: never."""

        def write_or_die(export, name, blocks):
            if len(written) == count:
                # what a SIGKILL leaves behind
                (export.folder / f"{name}.tmp").write_bytes(b"half")
                raise KeyboardInterrupt
            written.append(name)
            write(export, name, blocks)

        monkeypatch.setattr(LocalExport, "write", write_or_die)

    kill_after(3)
    for _ in range(2):  # the second attempt writes no file and loses none
        with pytest.raises(KeyboardInterrupt):
            save_hf(model, tmp_path / "out", identity="a")
        assert not (tmp_path / "out").exists()
        assert "3 of " in capsys.readouterr().err
    damaged = tmp_path / ".out.partial" / written[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    kill_after(-1)
    save_hf(model, tmp_path / "out", identity="a")
    # of the files of the first attempt, only the damaged one is written again
    assert written[3] == written[1]
    assert not {written[0], written[2]} & set(written[3:])
    assert content(tmp_path / "out") == content(tmp_path / "expected")

    count = len(written)
    kill_after(count + 3)
    with pytest.raises(KeyboardInterrupt):
        save_hf(model, tmp_path / "other", identity="a")
    kill_after(-1)
    with monkeypatch.context() as patch, refused(".other.partial"):
        # the disk fails after the last file
        patch.setattr(writing, "fsync", lambda path: open(path / "none"))
        save_hf(model, tmp_path / "other", identity="b")  # other weights: no file is kept
    assert written[count + 3 : count + 6] == written[count : count + 3]
    count = len(written)
    (tmp_path / "place").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "place")
    # the partial folder of an export to a link is beside the folder that the link names
    (tmp_path / ".other.partial").rename(tmp_path / ".place.partial")
    save_hf(model, tmp_path / "other", identity="b")
    assert len(written) == count
    assert content(tmp_path / "place") == content(tmp_path / "expected")
    assert {path.name for path in tmp_path.iterdir()} == {"expected", "out", "other", "place"}


def test_an_export_killed_at_its_end_recovers(tmp_path, monkeypatch):
    model, finish, done = new_model(), LocalExport.finish, False
    save_hf(model, tmp_path / "expected")
    for operations in itertools.count():
        out, left = tmp_path / f"out{operations}", iter(range(operations))

        def killed(path, *target, operation):
            if next(left, None) is None:
                raise KeyboardInterrupt  # which nothing here answers, as SIGKILL
            return operation(path, *target)

        def killed_at_its_end(*arguments):
            with monkeypatch.context() as patch:
                for name in ("rename", "unlink", "rmdir"):
                    operation = getattr(pathlib.Path, name)
                    patch.setattr(
                        pathlib.Path, name, functools.partialmethod(killed, operation=operation)
                    )
                finish(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalExport, "finish", killed_at_its_end)
            with contextlib.suppress(KeyboardInterrupt):
                save_hf(model, out, identity="a")
                done = True
        if not out.exists():
            save_hf(model, out, identity="a")
            assert not list(tmp_path.glob(f".{out.name}.*"))
        assert content(out) == content(tmp_path / "expected")
        if done:
            break
    # at least: the record of the other files, each of them, progress.json, the directory
    assert operations > 6
    (tmp_path / ".foreign.progress.json").write_text("{}")
    with refused(".foreign.progress.json"):
        save_hf(model, tmp_path / "foreign", identity="a")
    assert (tmp_path / ".foreign.progress.json").read_text() == "{}"


def test_a_changing_directory_is_refused(eight_layers, tmp_path, monkeypatch):
    shutil.copytree(eight_layers, tmp_path / "model")
    (tmp_path / "model" / "SHA256SUMS").unlink()
    file, read = tmp_path / "model" / "model.safetensors", Weights.read
    for change in (lambda: os.truncate(file, file.stat().st_size // 2), lambda: os.utime(file)):

        def read_and_change(weights, name, *where):
            change() if name == "model.norm.weight" else None
            return read(weights, name, *where)

        monkeypatch.setattr(Weights, "read", read_and_change)
        with refused("model.safetensors"):
            load_hf(tmp_path / "model")
        shutil.copy(eight_layers / "model.safetensors", file)


@pytest.fixture
def in_bfloat16(tmp_path, monkeypatch):
    """(a model in bfloat16, its export in several files)."""
    save_hf(new_model(), tmp_path / "float32")
    model = load_hf(tmp_path / "float32", dtype="bfloat16")
    monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 8192)
    save_hf(model, tmp_path / "out")
    return model, tmp_path / "out"


def test_a_bfloat16_model_keeps_some_float32(in_bfloat16):
    dtypes = {
        path.rsplit("'", 2)[-2] if "'" in path else path: dtype
        for path, (_, dtype, _) in bits(in_bfloat16[0]).items()
    }
    for name in ("q_proj", "embedding"):
        assert dtypes[name] == "bfloat16"
    for name in ("a_log", "mixer_norm", "router"):
        assert dtypes[name] == "float32"


def test_a_bfloat16_export_is_read_back(in_bfloat16, tmp_path):
    model, folder = in_bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert bits(load_hf(folder, dtype="bfloat16")) == bits(model)
    save_hf(load_hf(tmp_path / "float32"), tmp_path / "cast", dtype="bfloat16")
    assert content(tmp_path / "cast") == content(folder)


def test_shards_of_an_export_are_numbered(in_bfloat16):
    shards = sorted(in_bfloat16[1].glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"


def test_files_of_an_export_have_the_dtypes_of_serving(in_bfloat16):
    tensors = {
        name: tensor.dtype.name
        for shard in in_bfloat16[1].glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }
    recurrent = "model.layers.0.linear_attn."
    for name in ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj"):
        assert tensors[f"{recurrent}{name}.weight"] == "bfloat16"
    for name in ("norm.weight", "A_log", "dt_bias"):
        assert tensors[f"{recurrent}{name}"] == "float32"


def test_an_export_lists_the_digests_of_all_files(in_bfloat16):
    lines = (in_bfloat16[1] / "SHA256SUMS").read_text().splitlines()
    files = {file.name for file in in_bfloat16[1].iterdir()}
    assert {line.split()[1] for line in lines} == files - {"SHA256SUMS"}


def test_plain_dicts_and_gradients_map_as_the_state_does():
    model = new_model()
    state = nnx.state(model, nnx.Param)
    doubled = jax.tree.map(lambda x: 2 * x, nnx.to_pure_dict(state))
    # a restored checkpoint has string keys
    doubled["layers"] = {str(i): layer for i, layer in doubled["layers"].items()}
    ours, twice = hf_tensors(state, model.config), hf_tensors(doubled, model.config)
    assert ours.keys() == twice.keys()
    assert all(np.array_equal(2 * ours[name], twice[name]) for name in ours)


def test_fused_experts_read_as_the_separate_ones(checkpoint):
    expected = bits(load_hf(checkpoint))

    def fuse(tensors):
        """Replaces the tensors of single experts by fused ones."""
        for layer in [
            name.removesuffix("gate.weight")
            for name in list(tensors)
            if name.endswith("mlp.gate.weight")
        ]:
            gate, up, down = (
                np.stack([tensors.pop(f"{layer}experts.{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{layer}experts.gate_up_proj"] = np.concatenate((gate, up), 1)
            tensors[f"{layer}experts.down_proj"] = down

    edit_tensors(checkpoint, fuse)
    assert bits(load_hf(checkpoint)) == expected


def test_both_forms_of_config_json_read_alike(checkpoint):
    expected = read_hf_config(checkpoint)
    assert (expected.rope_theta, expected.mtp_depth, expected.dtype) == (1e7, 1, "float32")
    edit_config(
        checkpoint,
        rope_parameters=None,
        layer_types=None,
        dtype=None,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        torch_dtype="float32",
        num_nextn_predict_layers=1,
    )
    assert read_hf_config(checkpoint) == expected


def test_yarn_s_trained_context_may_stand_at_the_top(checkpoint):
    edit_config(
        checkpoint,
        max_position_embeddings=2048,
        original_max_position_embeddings=512,
        rope_parameters={"rope_type": "yarn", "factor": 4.0},
    )
    config = read_hf_config(checkpoint)
    assert (config.max_position_embeddings, config.yarn_factor) == (512, 4.0)


def test_the_model_s_end_token_leads_a_list(checkpoint):
    edit_config(checkpoint, eos_token_id=[5, 7])
    source = json.loads((checkpoint / "config.json").read_text())
    config = dataclasses.replace(read_hf_config(checkpoint), eos_token_id=7)
    assert hf_config_fields(config, "float32", source)["eos_token_id"] == [7, 5]


def test_a_task_without_end_token_keeps_the_model_s():
    config = ModelConfig(eos_token_id=7)
    assert with_end_token(config, TaskTokenizer(64).eos_id).eos_token_id == 7


def test_a_checkpoint_without_mtp_has_depth_0(checkpoint):
    edit_tensors(checkpoint, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    model = load_hf(checkpoint)
    assert model.config.mtp_depth == 0
    assert not hasattr(model, "mtp")


WRAPPER = references.checkpoint("qwen3_5_moe_wrapper_fused_mtp_tiny")


def test_an_export_without_vision_keeps_its_config(tmp_path, capsys):
    original = json.loads((WRAPPER / "config.json").read_text())
    save_hf(load_hf(WRAPPER), tmp_path / "without", vision=False)
    assert "vision" in capsys.readouterr().err
    tensors = load_file(tmp_path / "without" / "model.safetensors")
    assert not any("visual" in name for name in tensors)
    fields = json.loads((tmp_path / "without" / "config.json").read_text())
    assert fields["vision_config"] == original["vision_config"]
    assert fields["text_config"]["rope_parameters"] == original["text_config"]["rope_parameters"]


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_an_export_with_vision_prepares_images(name, tmp_path):
    source = shutil.copytree(WRAPPER, tmp_path / "source")
    (source / name).write_text('{"size": 5}')
    save_hf(load_hf(source), tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == '{"size": 5}'


def test_a_wrapper_has_the_end_token_of_its_text():
    source = json.loads((WRAPPER / "config.json").read_text()) | {"eos_token_id": 5}
    config = dataclasses.replace(read_hf_config(WRAPPER), eos_token_id=7)
    written = hf_config_fields(config, "float32", source)
    assert (written["eos_token_id"], written["text_config"]["eos_token_id"]) == (7, 7)


@pytest.fixture
def text_model():
    """The text model of a wrapper."""
    model = load_hf(WRAPPER)
    model.config = config_for_export(model.config, "qwen3_5_text", None)
    model.config = dataclasses.replace(model.config, hf_fused_experts=())
    return model


def test_the_text_model_of_a_wrapper_is_exported(text_model, tmp_path):
    save_hf(text_model, tmp_path / "text")
    expected = load_file(REFERENCE.parent / "qwen3_5_moe_tiny" / "model.safetensors")
    exported = load_file(tmp_path / "text" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[name], expected[name]) for name in expected)


def test_a_text_model_may_have_the_names_of_its_wrapper(tmp_path):
    """transformers writes them, if it has loaded the text model from a wrapper."""
    folder = shutil.copytree(references.checkpoint("qwen3_5_tiny"), tmp_path / "text")
    expected = bits(load_hf(folder))
    _rename(folder, "model.", "model.language_model.")
    assert bits(load_hf(folder)) == expected


def test_a_missing_origin_is_named(text_model, tmp_path):
    with refused("gone", "--source=DIR", "--form"):
        config_for_export(text_model.config, None, tmp_path / "gone")


def test_an_origin_of_another_shape_is_refused(text_model, tmp_path):
    with refused("hidden_size", "64", "48"):
        save_hf(text_model, tmp_path / "other", source=REFERENCE)


# Each of these returns a function that damages a directory.


def _drop(*names):
    """Removes tensors."""
    return lambda d: edit_tensors(d, lambda t: [t.pop(name) for name in names])


def _put(**tensors):
    """Adds or replaces tensors; "__" in a name stands for a dot."""
    return lambda d: edit_tensors(
        d, lambda t: t.update({name.replace("__", "."): value for name, value in tensors.items()})
    )


def _truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _fifo(file):
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def _as_pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _replace(reference, nested=None, **changes):
    """Replaces the checkpoint by another reference checkpoint, and sets fields of its config.json:
    `changes` at the top level, `nested` in `text_config`. None removes a field.
    """

    def damage(directory):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(references.checkpoint(reference) / name, directory)
        fields = json.loads((directory / "config.json").read_text())
        text_config = {}
        if nested:
            text = fields["text_config"] | nested
            text_config["text_config"] = {k: v for k, v in text.items() if v is not None}
        edit_config(directory, **changes, **text_config)

    return damage


def _rename(directory, old, new):
    """Replaces the beginning `old` of the tensors' names by `new`."""
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {re.sub(f"^{re.escape(old)}", new, name): array for name, array in tensors.items()},
        directory / "model.safetensors",
    )


def _index(**weight_map):
    """Adds an index that maps tensor names to file names."""
    return lambda d: (d / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


def _recut_convolutions(directory):
    """Cuts the convolutions of an Olmo Hybrid as transformers' save_pretrained does."""
    _replace("olmo_hybrid_tiny")(directory)

    def recut(tensors):
        for layer in range(3):
            name = f"model.layers.{layer}.linear_attn.%s_conv1d.weight"
            whole = np.concatenate([tensors[name % part] for part in "qkv"])
            third = -(-len(whole) // 3)
            for i, part in enumerate("qkv"):
                tensors[name % part] = whole[i * third : (i + 1) * third].copy()

    edit_tensors(directory, recut)


# Name → (function that damages a directory, what the message names beside the directory).
DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), ("config.json",)),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), ("config.json", "JSON")),
    "config a list": (
        lambda d: (d / "config.json").write_text("[]"),
        ("JSON",),
    ),
    "config deep": (
        lambda d: (d / "config.json").write_text("[" * 10**5 + "]" * 10**5),
        ("config.json", "100"),
    ),
    "config a FIFO": (lambda d: _fifo(d / "config.json"), ("config.json", "FIFO")),
    "weights a FIFO": (
        lambda d: (_fifo(d / "x.safetensors"), _index(a="x.safetensors")(d)),
        ("x.safetensors", "FIFO"),
    ),
    "digests a FIFO": (lambda d: _fifo(d / "SHA256SUMS"), ("SHA256SUMS", "FIFO")),
    "digests outside": (
        lambda d: (d / "SHA256SUMS").write_text("0  ../x\n"),
        ("SHA256SUMS", "'../x'"),
    ),
    "another prefix": (
        lambda d: _rename(d, "model.", "language_model.model."),
        ("model.layers.0.…", "language_model.model.layers.0"),
    ),
    "layers": (
        lambda d: edit_config(d, num_hidden_layers=10**9, layer_types=None),
        ("num_hidden_layers", "1000000000", "4"),
    ),
    "layer types": (
        lambda d: edit_config(d, layer_types=["linear_attention"] * 10**5),
        ("layer_types", "100000", "4"),
    ),
    "experts": (
        lambda d: edit_config(d, num_experts=10**9),
        ("num_experts = 1000000000",),
    ),
    "many heads": (
        lambda d: edit_config(d, linear_num_value_heads=2 * 10**9),
        ("linear_num_value_heads = 2000000000",),
    ),
    "a long number": (
        lambda d: edit_config(d, vocab_size=10**4000),
        ("vocab_size", "64"),
    ),
    "model_type": (
        lambda d: edit_config(d, model_type="llama"),
        ("qwen3_next", "qwen3_5"),
    ),
    "model_type a list": (
        lambda d: edit_config(d, model_type=["qwen3_next"]),
        ("model_type = ['qw",),
    ),
    "model_type an object": (lambda d: edit_config(d, model_type={}), ("model_type = {}",)),
    "rope scaling": (
        lambda d: edit_config(d, rope_scaling={"type": "dynamic", "factor": 4.0}),
        ("rope_type = 'dynamic'",),
    ),
    "YaRN, no factor": (
        lambda d: edit_config(d, rope_scaling={"type": "yarn"}),
        ("'yarn'", "factor = None"),
    ),
    "YaRN's turns": (
        lambda d: edit_config(d, rope_scaling={"type": "yarn", "factor": 4.0, "beta_fast": 16}),
        ("beta_fast = 16",),
    ),
    "YaRN's reach": (
        lambda d: edit_config(
            d, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
        ),
        ("max_position_embeddings = 512", "YaRN"),
    ),
    "no text model": (
        _replace("qwen3_5_wrapper_tiny", text_config=None),
        ("text_config = None",),
    ),
    "other text model": (
        _replace("qwen3_5_wrapper_tiny", {"model_type": "llama"}),
        ("text_config.model_type = 'llama'", "qwen3_5"),
    ),
    "tied and untied": (
        _replace("qwen3_5_wrapper_tiny", {"tie_word_embeddings": True}),
        ("tie_word_embeddings",),
    ),
    "rotary positions outside of the text model": (
        _replace("qwen3_5_wrapper_tiny", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        ("text_config",),
    ),
    "nested layers": (
        _replace("qwen3_5_wrapper_tiny", {"num_hidden_layers": 5, "layer_types": None}),
        ("5", "4"),
    ),
    "gate": (
        _replace("qwen3_5_tiny", attn_output_gate=False),
        ("attn_output_gate = False",),
    ),
    "gate's function": (
        _replace("qwen3_5_tiny", output_gate_type="sigmoid"),
        ("'sigmoid'", "'swish'", "'silu'"),
    ),
    "MTP embeddings": (
        _replace("qwen3_5_tiny", mtp_use_dedicated_embeddings=True),
        ("mtp_use_dedicated_embeddings = True",),
    ),
    "not renormalised": (
        _replace("qwen3_5_moe_tiny", norm_topk_prob=False),
        ("norm_topk_prob = False",),
    ),
    "other family": (_replace("qwen3_5_tiny", model_type="qwen3_5_moe_text"), ()),
    "positions": (
        _replace("kimi_linear_tiny", mla_use_nope=False),
        ("mla_use_nope = False",),
    ),
    "wide values": (
        _replace("kimi_linear_tiny", v_head_dim=8),
        ("v_head_dim = 8", "16", "qk_nope_head_dim"),
    ),
    "two names": (
        _replace("kimi_linear_tiny", num_experts_per_tok=3),
        ("num_experts_per_tok = 3", "2"),
    ),
    "layers left out": (
        _replace("kimi_linear_tiny", layer_types=None, linear_attn_config={"kda_layers": [1]}),
        ("5",),
    ),
    "convolutions in equal parts": (
        _recut_convolutions,
        ("q_conv1d.weight", "[54, 1, 4]", "[32, 1, 4]"),
    ),
    "a part without a tensor": (
        lambda d: (
            _replace("olmo_hybrid_tiny")(d),
            _drop("model.layers.1.linear_attn.k_conv1d.weight")(d),
        ),
        ("model.layers.1.linear_attn.k_conv1d.weight",),
    ),
    "a norm under both of its names": (
        lambda d: (
            _replace("olmo_hybrid_tiny")(d),
            edit_tensors(
                d,
                lambda tensors: tensors.update(
                    {
                        "model.layers.0.attention_layer_norm.weight": tensors[
                            "model.layers.0.input_layernorm.weight"
                        ]
                    }
                ),
            ),
        ),
        (
            "model.safetensors",
            "model.layers.0.attention_layer_norm.weight",
            "model.layers.0.input_layernorm.weight",
        ),
    ),
    "YaRN of Olmo Hybrid": (
        _replace(
            "olmo_hybrid_tiny",
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5},
        ),
        ("rope_type = 'yarn'", "'default'"),
    ),
    "one kind of layer": (
        _replace("olmo_hybrid_tiny", layer_types=["full_attention"] * 4),
        ("linear_attention", "full_attention"),
    ),
    "rope parameters": (
        lambda d: edit_config(d, rope_parameters={"rope_type": "linear"}),
        ("rope_type = 'linear'",),
    ),
    "activation": (lambda d: edit_config(d, hidden_act="gelu"), ("hidden_act = 'gelu'",)),
    "bias": (lambda d: edit_config(d, attention_bias=True), ("attention_bias = True",)),
    "quantized": (
        lambda d: edit_config(d, quantization_config={"quant_method": "fp8"}),
        ("quantization_config",),
    ),
    "type": (
        lambda d: edit_config(d, hidden_size="64"),
        ("config.json", "model.hidden_size = '64'"),
    ),
    "heads": (lambda d: edit_config(d, num_key_value_heads=3), ()),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ("model.safetensors",)),
    "pickle": (_as_pickle, ("pytorch_model.bin",)),
    "pickle renamed": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 20),
        (),
    ),
    "truncated": (_truncate, ()),
    "huge header": (
        lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64),
        (),
    ),
    "missing": (
        _drop("model.norm.weight", "mtp.fc.weight"),
        ("2", "model.norm.weight", "mtp.fc.weight"),
    ),
    "expert missing": (
        _drop("model.layers.1.mlp.experts.7.up_proj.weight"),
        ("1", "model.layers.1.mlp.experts.7.up"),
    ),
    "extra": (
        _put(model__layers__4__x=np.zeros(2, np.float32)),
        ("1", "model.layers.4.x"),
    ),
    "a name that moves the cursor": (
        _put(**{"a\x1b[2J\nb": np.zeros(2, np.float32)}),
        ("1", "a\\x1b[2J\\nb"),
    ),
    "misshapen": (
        _put(lm_head__weight=np.zeros((64, 256), np.float32)),
        ("[64, 256]", "[256, 64]"),
    ),
    "not finite": (
        _put(lm_head__weight=np.full((256, 64), 1e200)),
        ("lm_head.weight", "NaN"),
    ),
    "integers": (_put(lm_head__weight=np.zeros((256, 64), np.int8)), ("lm_head.weight", "I8")),
    "untied head": (lambda d: edit_config(d, tie_word_embeddings=True), ("lm_head.weight",)),
    "escaping index": (_index(a="../model.safetensors"), ("'../model.safetensors'",)),
    "shard missing": (
        _index(a="model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.safetensors",),
    ),
    "shards missing": (
        _index(a="1.safetensors", b="2.safetensors", c="model.safetensors"),
        ("2", "3", "model.safetensors.index.json", "1.safetensors", "2.safetensors"),
    ),
    "index with a NUL": (_index(a="a\0.safetensors"), ("'a\\x00.safetensors'",)),
    "index with a long name": (_index(a="a" * 5000 + ".safetensors"), ()),
    "index names more": (_index(a="model.safetensors"), ("1",)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(checkpoint, damage):
    apply_damage, names = DAMAGE[damage]
    apply_damage(checkpoint)
    with refused(checkpoint, *names):
        load_hf(checkpoint)


def test_an_index_is_read_before_a_file(checkpoint, capsys):
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "model-1.safetensors")
    names = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")})
    )
    load_hf(checkpoint)
    assert "model.safetensors.index.json" in capsys.readouterr().err


def test_a_quantised_wrapper_is_refused_without_a_note(checkpoint, capsys):
    _replace("qwen3_5_wrapper_tiny", quantization_config={"quant_method": "fp8"})(checkpoint)
    with refused("quantization_config"):
        load_hf(checkpoint)
    assert "note" not in capsys.readouterr().err


def test_an_export_in_float16_is_refused(tmp_path):
    with refused("dtype = 'float16'"):
        save_hf(new_model(), tmp_path / "out", dtype="float16")


def test_a_flipped_bit_is_found_in_an_export(tmp_path):
    save_hf(new_model(), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    with refused("model.safetensors"):
        load_hf(tmp_path / "out")


def test_export_never_overwrites_and_never_leaves_a_part(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with refused(tmp_path / "out"):
        save_hf(new_model(), tmp_path / "out")
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "notes.txt").write_text("mine")
    with refused(".new.partial"):
        save_hf(new_model(), tmp_path / "new", identity="a")
    for progress in ({"files": {}}, {"identity": "a", "files": {}}, {"identity": "a"}, {}, "[]"):
        (tmp_path / ".new.partial" / "progress.json").write_text(json.dumps(progress))
        with refused(".new.partial"):
            save_hf(new_model(), tmp_path / "new", identity="a")
    (tmp_path / ".new.partial" / "progress.json").unlink()
    with (
        monkeypatch.context() as patch,
        refused(tmp_path, "0.1 MB", "0.0 MB"),
    ):
        patch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000)
        )
        save_hf(new_model(), tmp_path / "other")

    class Tokenizer:
        def __init__(self, save):
            self.save = save

    def fail(directory):
        raise OSError("disk full")

    def interrupt(directory):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    def export_twice(directory):
        with refused(tmp_path):
            save_hf(new_model(), tmp_path / "other")
        raise KeyboardInterrupt

    # SIGTERM raises KeyboardInterrupt, as in the command `export`
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for save, error in (
            (fail, UserError),
            (interrupt, KeyboardInterrupt),
            (export_twice, KeyboardInterrupt),
        ):
            with pytest.raises(error):
                save_hf(new_model(), tmp_path / "other", Tokenizer(save))
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    assert sorted(f.name for f in tmp_path.rglob("*")) == [
        ".new.partial",
        "notes.txt",
        "notes.txt",
        "out",
    ]


def test_a_tree_of_another_config_is_refused():
    model = new_model()
    with refused("layers/0/mlp/router", "(1, 16, 4)", error=ValueError):
        hf_tensors(nnx.state(model, nnx.Param), dataclasses.replace(model.config, num_experts=4))
