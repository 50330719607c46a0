"""`qwen3next show`: what it prints of a model agrees with the model, and its figure is an SVG."""

import math
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import jax
import pytest
from flax import nnx

from qwen3next_jax.commands.config_flags import load_settings_of_file_or_run
from qwen3next_jax.commands.show import layers_text
from qwen3next_jax.config import Config, ModelConfig, default_config, from_dict
from qwen3next_jax.config.files import load_config_file
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.description import context_memory, layer_kinds
from qwen3next_jax.model.flops import parameter_counts
from qwen3next_jax.model.language_model import parameter_declarations
from qwen3next_jax.reporting.architecture import LayerKindPanel, draw_model
from qwen3next_jax.runs.record import run_json_text
from tests.records import record
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["tiny", "small", "qwen3_8_flash_next", "qwen3_next_80b_a3b"])
def test_kinds_of_layers_add_up_to_the_model(name):
    values = load_config_file(ROOT / f"configs/{name}.py")
    values["model"]["vocab_size"] = values["model"]["vocab_size"] or 256
    model = from_dict(Config, values).model
    kinds, counts = layer_kinds(model), parameter_counts(model)
    shapes = nnx.eval_shape(lambda: Qwen3Next(model, rngs=nnx.Rngs(0)))
    layers = jax.tree.leaves(nnx.state(shapes, nnx.Param)["layers"])
    assert sum(kind.parameter_count * len(kind.layer_indices) for kind in kinds) == sum(
        math.prod(leaf.shape) for leaf in layers
    )
    used = sum(kind.parameters_per_token * len(kind.layer_indices) for kind in kinds)
    others = sum(
        parameter.size
        for path, parameter in parameter_declarations(model).items()
        if not path.startswith(("layers/", "mtp/")) and parameter.kind not in ("embedding", "head")
    )
    assert used + others == counts.active
    assert sorted(i for kind in kinds for i in kind.layer_indices) == [
        *range(model.num_hidden_layers)
    ]


def test_the_released_model_s_context_memory():
    """12 attention layers with 2 heads of 256 keys and values each, in bfloat16."""
    assert context_memory(ModelConfig()).bytes_per_token == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    "layers, text",
    [
        ((0, 1, 2), "0–2"),
        ((3, 7, 11), "3, 7, 11"),
        ((), "multi-token prediction"),
        ((0, 2, 4, 6, 8, 9), "0, 2, 4, … 8–9"),
    ],
)
def test_layers_are_written_briefly(layers, text):
    assert layers_text(layers) == text


def test_figure_has_every_layer_and_is_well_formed():
    kinds = [
        LayerKindPanel("a < b", range(0, 60, 2), "dense", [("mixer/w", "2 × 3")], "6 parameters"),
        LayerKindPanel("c", range(1, 60, 2), "dense", [("mixer/v", "2")], "2 parameters"),
        LayerKindPanel("c", (), "dense", [("mixer/v", "2")], "2 parameters"),
    ]
    root = xml.etree.ElementTree.fromstring(draw_model("model & more", "sub", kinds))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert texts.count("a < b") + texts.count("c") == 24 + 2  # the stack, two panels
    assert any("36" in text for text in texts)  # layers left out


def test_show_refuses_a_third_config():
    from qwen3next_jax.commands import show

    with refused("3"):
        show.main(["a.py", "b.py", "c.py"])


def test_a_run_is_shown_by_its_folder(tmp_path):
    config = default_config()
    config["model"] |= {"num_hidden_layers": 3, "num_experts": 0}
    (tmp_path / "run.json").write_text(run_json_text(record(config=config)))
    assert load_settings_of_file_or_run(str(tmp_path))["model"]["num_hidden_layers"] == 3
    (tmp_path / "run.json").unlink()
    with refused(tmp_path, "run.json"):
        load_settings_of_file_or_run(str(tmp_path))


def test_an_unwritable_figure_is_one_line():
    command = [sys.executable, "-m", "qwen3next_jax", "show", "tiny", "--svg=/proc/tiny.svg"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert said.returncode
    assert "--svg=/proc/tiny.svg" in said.stderr.splitlines()[-1]


def test_too_many_layers_are_refused_at_once():
    with refused("num_hidden_layers = 100000", "4096"):
        ModelConfig(num_hidden_layers=100_000)
