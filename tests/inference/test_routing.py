"""Router replay: experts that are recorded while text is generated, and used in training."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from qwen3next_jax.config import DataConfig, TrainConfig
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.recorded import RecordedData, read_recorded_text, write_recorded_text
from qwen3next_jax.inference.decode import concatenate_tokens_by_row, generate
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.layers import ForwardOptions
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from tests.models import HYBRID
from tests.refusals import refused

MODEL = dataclasses.replace(
    HYBRID,
    vocab_size=257,
    num_hidden_layers=3,
    full_attention_interval=1,
    num_experts=8,
    mlp_only_layers=(0,),
    initializer_range=0.3,
)
PROMPTS = [np.array([3, 1, 4, 1, 5, 9, 2, 6]), np.array([7])]
NEW = 6


def make_model(config):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    init = jax.jit(lambda: nnx.state(Qwen3Next(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, init())


RECORD = ForwardOptions(record_routing=True)


@pytest.fixture(scope="module")
def model():
    return make_model(MODEL)


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    """(folder of the files, texts, experts) of sampled continuations."""
    folder = tmp_path_factory.mktemp("recorded")
    stream = generate(model, PROMPTS, max_new_tokens=NEW, temperature=1.0, record_routing=True)
    new = concatenate_tokens_by_row(stream, len(PROMPTS))
    texts = [np.concatenate(pair) for pair in zip(PROMPTS, new)]
    for text, experts, prompt in zip(texts, stream.routed_experts, PROMPTS):
        write_recorded_text(folder, MODEL, text, experts, len(prompt))
    return folder, texts, stream.routed_experts


@pytest.mark.slow
def test_generation_records_what_the_forward_pass_chooses(model, recorded):
    _, texts, experts = recorded
    features = jax.jit(lambda model, tokens: model.features(tokens, options=RECORD))
    longest = max(map(len, texts))
    tokens = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
    chosen = np.asarray(features(model, tokens).expert_ids)
    for row, text, own in zip(chosen, texts, experts):
        assert own.shape == (len(text) - 1, 3, 2)
        assert own.dtype == np.int16
        assert np.all(own[:, 0] == -1)  # layer 0 is dense
        assert np.all(own[:, 1:] >= 0)
        np.testing.assert_array_equal(np.sort(own), np.sort(row[: len(text) - 1]))


@pytest.mark.slow
def test_replayed_logits_are_the_recorded_ones(model):
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 257)
    rng = np.random.default_rng(0)
    other = rng.permuted(np.tile(np.arange(8), (2, 16, 3, 1)), axis=-1)[..., :2].astype(np.int16)

    @jax.jit
    def run(model, expert_ids):
        features = model.features(tokens, replayed_expert_ids=expert_ids, options=RECORD)
        return features.hidden, features.expert_ids

    hidden, chosen = run(model, jnp.full(other.shape, -1, jnp.int16))
    unchanged, again = run(model, chosen)
    np.testing.assert_array_equal(hidden, unchanged)
    np.testing.assert_array_equal(chosen, again)

    # Some tokens are replayed, the others choose by themselves.
    half = np.where(np.arange(16)[:, None, None] < 8, other, -1)
    replayed, used = map(np.asarray, run(model, jnp.asarray(half)))
    np.testing.assert_array_equal(used[:, :8, 1:], other[:, :8, 1:])
    assert np.all(used[:, 8:, 1:] >= 0)
    assert not np.array_equal(replayed[:, 0], hidden[:, 0])

    # With all tokens sent to experts 0 and 1, only these two and their scores have gradients.
    two = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int16), other.shape)
    unnormed = dataclasses.replace(MODEL, norm_topk_prob=False)
    graphdef, params = nnx.split(make_model(unnormed))
    batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens), "expert_ids": two}

    @jax.jit
    @jax.grad
    def gradient(params):
        train = TrainConfig(balance_loss_weight=0.0)
        counts = count_tokens_and_targets(batch, 0)
        return total_loss(nnx.merge(graphdef, params), batch, train, counts)[0]

    for block in nnx.to_pure_dict(gradient(params))["layers"].values():
        if "router" in block["mlp"]:
            of_expert = jnp.abs(block["mlp"]["expert_down"]).sum(axis=(0, 2, 3)) > 0
            assert of_expert.tolist() == [True] * 2 + [False] * 6
            assert np.any(block["mlp"]["router"])


@pytest.mark.slow
def test_recorded_texts_are_rows(recorded):
    folder, texts, experts = recorded
    data = open_data(DataConfig(source="recorded", path=str(folder)), 16, 2, 257)
    assert data.heldout_rows == 1
    (heldout,) = data.heldout_batches()
    batch = next(iter(data.batches(0)))
    assert batch["expert_ids"].shape == (2, 16, 3, 2)
    assert batch["expert_ids"].dtype == np.int16
    assert {len(texts[0]), len(texts[1])} == {
        int(b["segment_ids"][0].sum()) for b in (batch, heldout)
    }
    for i, text in enumerate(texts):
        n = len(text)
        row = next(
            {name: b[name][0] for name in b}
            for b in (batch, heldout)
            if b["segment_ids"][0].sum() == n
        )
        np.testing.assert_array_equal(row["tokens"], np.pad(text, (0, 16 - n)))
        np.testing.assert_array_equal(row["expert_ids"][: n - 1], experts[i])
        assert np.all(row["expert_ids"][n - 1 :] == -1)
        assert np.flatnonzero(row["target_mask"]).tolist() == list(range(len(PROMPTS[i]), n))


@pytest.mark.slow
def test_the_experts_of_another_model_are_refused(recorded):
    config = DataConfig(source="recorded", path=str(recorded[0]))
    RecordedData.check_model(config, MODEL)
    for change, names in (
        ({"num_experts": 16}, ("num_experts = 8", "16")),
        ({"num_hidden_layers": 4}, ("num_hidden_layers = 3", "4")),
        ({"num_experts_per_tok": 1}, ("num_experts_per_tok = 2", "1")),
    ):
        with refused(*names):
            RecordedData.check_model(config, dataclasses.replace(MODEL, **change))


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"routed_experts": None}, ("routed_experts",)),
        ({"routed_experts": np.zeros((5, 3, 2), np.int16)}, ("5", "13")),
        ({"routed_experts": np.zeros((13, 4, 2), np.int16)}, ("4", "3")),
        ({"routed_experts": np.zeros((13, 3, 2), np.int16)}, ("0", "1")),
        ({"routed_experts": np.tile(np.int32([1, 8]), (13, 3, 1))}, ("0", "1")),
        ({"routed_experts": np.tile(np.int32([1, -1]), (13, 3, 1))}, ("0", "1")),
        ({"tokens": np.full(14, 257)}, ("257", "256")),
        ({"tokens": np.zeros(14)}, ("float64",)),
        ({"routed_experts": np.zeros((13, 0, 2), np.int16)}, ("13", "0", "2")),
        ({"routed_experts": np.zeros((13, 2, 0), np.int16)}, ("13", "2", "0")),
        ({"tokens": np.full(14, 2**63, np.uint64)}, ("9223372036854775808",)),
        ({"routed_experts": np.zeros((13, 3, 2), ml_dtypes.float8_e4m3fn)}, ()),
    ],
    ids=(
        ("none", "length", "layers", "same", "too high", "half", "vocabulary", "dtype")
        + ("no layers", "no experts", "large", "float8")
    ),
)
def test_files_of_other_programs(arrays, names, tmp_path):
    """Without metadata; vLLM writes 0 for dense layers, and any type of integer."""
    good = {
        "tokens": np.arange(14),
        "routed_experts": np.tile(np.uint8([[0, 0], [1, 7], [4, 2]]), (13, 1, 1)),
    }
    config = DataConfig(source="recorded", path=f"{tmp_path}/*.safetensors")
    safetensors.numpy.save_file(good, tmp_path / "a.safetensors")
    RecordedData.check_model(config, MODEL)
    assert read_recorded_text(tmp_path / "a.safetensors").prompt_length == 1
    bad = {name: x for name, x in (good | arrays).items() if x is not None}
    safetensors.numpy.save_file(bad, tmp_path / "b.safetensors")
    with refused(*names):
        RecordedData.check_model(config, MODEL)


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"model": "[" * 10**5}, ()),
        ({"model": "[1]"}, ("JSON",)),
        ({"prompt_tokens": str(10**30)}, ("prompt_tokens",)),
        ({"prompt_tokens": "9" * 5000}, ()),
        ({"model": '{"__class__": 1}'}, ("__class__",)),
    ],
    ids=("deep", "list", "prompt", "digits", "name"),
)
def test_metadata_of_other_programs(metadata, names, tmp_path):
    arrays = {"tokens": np.arange(14), "routed_experts": np.full((13, 3, 2), -1)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", metadata)
    config = DataConfig(source="recorded", path=str(tmp_path))
    with refused(*names):
        RecordedData.check_model(config, MODEL)


def test_texts_of_two_models_are_no_data(tmp_path):
    """In a folder whose name is a pattern, too."""
    (folder := tmp_path / "[a]*").mkdir()
    for layers in (2, 3):
        arrays = {"tokens": np.arange(14), "routed_experts": np.zeros((13, layers, 2), np.int16)}
        safetensors.numpy.save_file(arrays, folder / f"{layers}.safetensors")
    with refused("3.safetensors", "3 layers"):
        RecordedData(DataConfig(source="recorded", path=str(folder)), 16, 2)
