"""Conversations: the loss counts what the assistant says, and packed ones equal separate ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from qwen3next_jax.config import DataConfig, TrainConfig
from qwen3next_jax.data import chat_template
from qwen3next_jax.data.chat_template import ChatTemplate
from qwen3next_jax.data.conversations import LARGEST_WEIGHT, LEAST_WEIGHT, conversation_fault
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.tokens import extends_tokenizer, load_tokenizer
from qwen3next_jax.runs.dry_run import _read_first_documents
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from tests.corpora import write_jsonl
from tests.models import SMALLEST, drawn_model
from tests.refusals import refused

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
START, END = 257, 258


@pytest.fixture(scope="module", params=[MARKED, UNMARKED], ids=["marks", "turns"])
def folder(request, tmp_path_factory):
    """Bytes, the two tokens of a chat format, and its template."""
    return make_folder(tmp_path_factory.mktemp("tokenizer"), request.param)


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"), MARKED)


def make_folder(folder, template, markers=(), eos="<|im_end|>"):
    load_tokenizer("bytes").save(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "chat_template": template})
    )
    return folder


def says(*contents, **last):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
    return messages[:-1] + [messages[-1] | last]


CONVERSATIONS = [
    says(f"question {i}", f"ändert {i}", "and?" * (i % 4 + 1), "no" * i + "!") for i in range(30)
]


def config(tmp_path, folder, records=None, **changes):
    path = tmp_path / "chat.jsonl"
    records = [{"messages": c} for c in CONVERSATIONS] if records is None else records
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = dict(
        path=str(path),
        messages_field="messages",
        tokenizer=str(folder),
        prepared_dir=str(tmp_path / "prepared"),
        heldout_fraction=0.2,
    )
    return DataConfig(**settings | changes)


def pieces(data):
    """Returns (tokens, weights) of each conversation in an epoch and in the held-out rows."""
    rows = [data.row(i) for i in range(data.rows)]
    rows += [data.heldout_row(i) for i in range(data.heldout_rows)]
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            yield row["tokens"][inside], row["loss_weights"][inside]


def test_the_assistants_tokens_alone_count_and_none_is_lost(tmp_path, folder):
    data = open_data(config(tmp_path, folder), 256, 2)
    wanted = {
        (
            "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in c),
            "".join(m["content"] + "<|im_end|>" for m in c if m["role"] == "assistant"),
        )
        for c in CONVERSATIONS
    }
    found = set()
    for tokens, weights in pieces(data):
        assert set(weights.tolist()) <= {0.0, 1.0}
        assert tokens[-1] == END
        assert not weights[-1]
        counted = data.tokenizer.decode(tokens[weights > 0])
        # By turns, the line break after a turn belongs to it.
        found.add(
            (data.tokenizer.decode(tokens[:-1]), counted.replace("<|im_end|>\n", "<|im_end|>"))
        )
    assert found == wanted
    counts = data.describe()
    assert counts["tokens"] == sum(len(t) for t, _ in pieces(data))
    assert not counts["dropped_tokens"]
    assert counts["ignored_tokens"] == sum((w == 0).sum() for _, w in pieces(data))


def test_a_prompt_of_generation_is_what_training_saw(tmp_path, folder):
    """So the first token that counts is the first that generation makes."""
    data = open_data(config(tmp_path, folder), 256, 2)
    prompts = {
        tuple(
            data.tokenizer.encode(ChatTemplate.of_folder(folder, "").render_prompt(c[:1])).tolist()
        )
        for c in CONVERSATIONS[:4]
    }
    seen = {tuple(t[: w.argmax()].tolist()) for t, w in pieces(data)}
    assert prompts <= seen


def test_a_long_conversation_keeps_its_beginning(tmp_path, marked):
    whole = {tuple(t.tolist()): w for t, w in pieces(open_data(config(tmp_path, marked), 256, 2))}
    data = open_data(config(tmp_path, marked), 96, 2)
    cut = list(pieces(data))
    assert {tuple(t.tolist()) for t, _ in cut} == {t[:96] for t in whole}
    dropped = sum(max(len(t) - 96, 0) for t in whole)
    assert data.describe()["dropped_tokens"] == dropped > 0
    assert data.describe()["cut_documents"] == sum(len(t) > 96 for t in whole)


@pytest.fixture
def with_long(tmp_path, marked):
    """(records of which nine have no target in a row of 96, their configuration)."""
    long = says("question " * 20, "an answer that does not fit")
    records = [{"messages": c} for c in CONVERSATIONS * 2] + [{"messages": long}] * 9
    return records, config(tmp_path, marked, records)


def test_prepare_counts_what_rows_hold(with_long):
    records, settings = with_long
    data = open_data(settings, 96, 2)
    found, counts = list(pieces(data)), data.describe()
    assert len(found) == counts["documents"] == len(records) - counts["left_out_documents"]
    assert counts["tokens"] == sum(len(tokens) for tokens, _ in found)
    in_loss = sum(int((weights > 0).sum()) for _, weights in found)
    assert counts["tokens"] - counts["ignored_tokens"] == in_loss
    text_bytes = sum(data.tokenizer.token_byte_counts[t[w > 0]].sum() for t, w in found)
    assert counts["bytes"] == text_bytes


def test_conversations_without_a_target_are_left_out(with_long):
    data = open_data(with_long[1], 96, 2)
    assert all(weights[1:].any() for _, weights in pieces(data))  # each trains something
    assert data.describe()["left_out_documents"] == 9


def test_dropped_tokens_are_counted(with_long):
    cut, whole = (open_data(with_long[1], length, 2).describe() for length in (96, 512))
    assert whole["dropped_tokens"] == 0 < cut["dropped_tokens"]
    assert cut["tokens"] + cut["dropped_tokens"] == whole["tokens"]


def test_a_title_names_what_is_lost(with_long):
    records, settings = with_long
    counts = open_data(settings, 96, 2).describe()
    for number in (counts["cut_documents"], len(records), 96, f"{counts['dropped_tokens']:,}"):
        assert str(number) in counts["title"]
    assert counts["title"].partition("; ")[2] in _read_first_documents(settings, 259, [96]).text


def test_rows_too_short_for_conversations_are_refused(with_long):
    with refused("24", "69", "sequence_length"):
        open_data(with_long[1], 24, 2)


MODEL = dataclasses.replace(
    SMALLEST, vocab_size=259, mtp_depth=1, initializer_range=0.2, max_position_embeddings=256
)


def test_packed_conversations_have_separate_ones_losses(tmp_path, marked):
    records = [
        {"messages": says("a", "first answer", weight=0.5)},
        {"messages": says("what?", "no", "so?", "a longer answer", weight=2)},
        {"messages": says("c", "third")},
    ] * 3
    data = open_data(config(tmp_path, marked, records, heldout_fraction=0.1), 160, 1)
    rows = [data.row(i) for i in range(data.rows)]
    packed = next(row for row in rows if len(set(row["segment_ids"].tolist()) - {0}) >= 2)
    model = drawn_model(MODEL)
    loss = jax.jit(
        lambda batch: total_loss(model, batch, TrainConfig(), count_tokens_and_targets(batch, 1))[1]
    )
    counts = jax.jit(lambda batch: count_tokens_and_targets(batch, 1))

    def measured(row):
        batch = {name: values[None] for name, values in row.items()}
        found, of = loss(batch), counts(batch)
        return (
            np.array([found["loss"], found["mtp_loss/0"]]),
            np.array([of.target_weight_sum, of.mtp_target_weight_sums[0]]),
        )

    total, weight = measured(packed)
    # By hand: token t + 1 is predicted at t, with its own weight.
    tokens, segments = packed["tokens"][None], packed["segment_ids"][None]
    logits = jax.jit(lambda *batch: model(*batch).logits)(tokens, segments)
    log_p = jax.nn.log_softmax(logits[0, :-1].astype(np.float32))
    own = packed["loss_weights"][1:] * (segments[0, 1:] == segments[0, :-1])
    nll = -log_p[np.arange(159), packed["tokens"][1:]]
    np.testing.assert_allclose(total[0], (own * nll).sum() / own.sum(), rtol=1e-5)
    sums, weights = 0, 0
    for segment in range(1, packed["segment_ids"].max() + 1):
        n = (inside := packed["segment_ids"] == segment).sum()
        own = {k: np.pad(v[inside], (0, 160 - n)) for k, v in packed.items()}
        own["segment_ids"] = (np.arange(160) < n).astype(np.int32)
        own["loss_weights"] = own["loss_weights"].astype(np.float32)
        own_loss, own_weight = measured(own)
        sums, weights = sums + own_loss * own_weight, weights + own_weight
    np.testing.assert_allclose(weight, weights, rtol=1e-6)
    np.testing.assert_allclose(total, sums / weights, rtol=1e-5)  # float32, sums of 100 terms
    ones = packed | {"loss_weights": (packed["segment_ids"] > 0).astype(np.float32)}
    without = {name: packed[name] for name in ("tokens", "segment_ids")}
    for one, other in zip(measured(ones), measured(without)):
        np.testing.assert_array_equal(one, other)  # the weight 1 changes no bit
    assert not np.allclose(measured(without)[0], total)


def test_texts_beside_conversations_count_in_full(tmp_path, marked):
    texts = tmp_path / "texts.jsonl"
    write_jsonl(texts, [f"text {i} " * 9 for i in range(40)])
    one = config(tmp_path, marked)
    both = config(
        tmp_path, marked, path=f"{one.path},{texts}", messages_field="messages,", weights="1,1"
    )
    data = open_data(both, 128, 2)
    names = [data.document_names_of_row(i)[0].partition(":")[0] for i in range(8)]
    assert set(names) == {"chat.jsonl", "texts.jsonl"}
    for i, name in enumerate(names):
        row = data.row(i)
        filled = row["segment_ids"] > 0
        assert (name == "texts.jsonl") == np.array_equal(row["loss_weights"], filled)
    batches = iter(data.batches(0))
    undisturbed = [next(batches) for _ in range(4)]
    resumed = iter(open_data(both, 128, 2).batches(2))  # opened from the index
    for batch in undisturbed[2:]:
        again = next(resumed)
        assert batch["loss_weights"].dtype == np.float32
        for name, values in batch.items():
            np.testing.assert_array_equal(again[name], values)


def test_texts_alone_need_no_weights(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one text"])
    settings = dict(path=str(tmp_path / "a.jsonl"), prepared_dir=str(tmp_path / "prepared"))
    data = open_data(DataConfig(**settings), 16, 1)
    assert set(data.row(0)) == set(data.array_dtypes) == {"tokens", "segment_ids"}
    assert not list(tmp_path.glob("prepared/tokens/*/*.weights"))
    # Rows of texts have no loss weights, so their name does not depend on them.
    assert [p.name for p in tmp_path.glob("prepared/rows/*")] == ["7da1a47fd38fb91c7454"]
    assert data.fingerprint == "9a7c3c44ed7c1ab7198f"


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END_INSIDE, END_AFTER = "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
NO_END = MARKED.replace("<|im_end|>", "<|stop|>")


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        (GLM, "<|user|>", 2),  # the next role's marker, and the end of the conversation
        (GLM, "<|im_end|>", 1),
        (MARKED, "<|im_end|>", 2),
        (MARKED.replace(END_INSIDE, END_AFTER), "<|im_end|>", 2),
        (NO_END, "<|im_end|>", 0),
    ],
)
def test_the_end_of_a_turn_counts(tmp_path, capfd, template, eos, ends):
    folder = make_folder(tmp_path, template, ["<|user|>", "<|assistant|>"], eos)
    records = [{"messages": says("q", f"answer {i}", "q", "last")} for i in range(40)]
    data = open_data(config(tmp_path, folder, records), 128, 1)
    for tokens, weights in pieces(data):
        assert (tokens[weights > 0] == data.tokenizer.eos_id).sum() == ends
        assert weights[tokens == data.tokenizer.eos_id].sum() == ends
    assert ("end token" in capfd.readouterr().err) == (ends == 0)


@pytest.mark.parametrize("loses", [False, True])
def test_lossy_tokenizers_have_no_bits_per_byte(tmp_path, capfd, loses):
    folder = make_folder(tmp_path, MARKED)
    if loses:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.normalizer = tokenizers.normalizers.Replace("n", "")
        tokenizer.save(str(folder / "tokenizer.json"))
    data = open_data(config(tmp_path, folder), 256, 1)
    assert (data.describe()["bits_per_nat"] is None) == loses
    assert ("bits per byte" in capfd.readouterr().err) == loses


def test_a_divided_conversation_does_not_lack_its_end(tmp_path, capfd):
    """In so small a file the end of one conversation is held out."""
    folder = make_folder(tmp_path, MARKED, ["<|user|>", "<|assistant|>"], "<|im_end|>")
    records = [{"messages": says("q", f"answer {i}")} for i in range(2)]
    open_data(config(tmp_path, folder, records), 128, 1)
    assert "end token" not in capfd.readouterr().err


def test_a_template_writes_the_date_of_the_settings(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}" + MARKED
    folder = str(make_folder(tmp_path, template))
    with refused("data.template_date"):
        open_data(config(tmp_path, folder), 256, 2)
    data = open_data(config(tmp_path, folder, template_date="2026-01-31"), 256, 2)
    assert data.tokenizer.decode(next(pieces(data))[0]).startswith("31 Jan 2026<|im_start|>")
    other = open_data(config(tmp_path, folder, template_date="2026-02-01"), 256, 2)
    assert other.fingerprint != data.fingerprint
    for wrong in ("today", "2026-1-3", "20260131", "2026-02-30"):
        with refused("data.template_date", "YYYY-MM-DD"):
            DataConfig(path="x", messages_field="messages", template_date=wrong)


def test_templates_get_what_transformers_gives_them(tmp_path):
    template = (
        "{{ messages[0] | tojson }}|{{ {'b': 'ä<', 'a': [1]} | tojson(ensure_ascii=True, indent=1, "
        "separators=(',', ':'), sort_keys=True) }}|{{ messages[1].thinking }}"
        "{{ messages[1].reasoning_content }}{{ 'thinking' in messages[2] }}"
    )
    rendering = ChatTemplate.of_folder(make_folder(tmp_path, template), "")
    reasons = [{"role": "a", name: "why"} for name in ("thinking", "reasoning_content")]
    for reason in reasons:
        first, dumped, rest = rendering.render_prompt(
            [{"role": "ä"}, reason, {"thinking": None}]
        ).split("|")
        assert first == '{"role": "ä"}'
        assert rest == "whywhyFalse"
        assert dumped == json.dumps(
            {"b": "ä<", "a": [1]}, indent=1, separators=(",", ":"), sort_keys=True
        )


def test_weights_outside_the_range_that_float32_sums_are_refused():
    for weight in (0, 1, 1e-9, 1e9, 2.5, 10**9):
        assert not conversation_fault(says("a", "b", weight=weight))
    wrong = (3e38, 1e308, 10**308, 1e-50, 1.01e9, 9e-10, -1, np.inf, np.nan, None, "1", [], True)
    for weight in wrong:
        fault = conversation_fault(says("a", "b", weight=weight))
        assert "weight" in fault
        assert len(fault) < 200
    many = jnp.full(1 << 20, LARGEST_WEIGHT, jnp.float32).at[::2].set(LEAST_WEIGHT)
    shares = many / many.sum()
    assert shares.min() > 0
    assert float(shares.sum()) == pytest.approx(1, rel=2**-20)
    assert shares.min() > 2**11 * float(np.finfo(np.float32).tiny) * 2**24


BAD = [
    ({"text": "x"}, ("'messages'",)),
    ({"messages": "hello"}, ()),
    ({"messages": []}, ()),
    ({"messages": says("a", "")}, ("2",)),
    ({"messages": says("a", "b")[:1]}, ("'user'", "'assistant'")),
    ({"messages": says("a", "b")[::-1]}, ("1", "'assistant'")),
    ({"messages": says("a", "b")[:1] * 2}, ("2", "'user'")),
    ({"messages": says("a", "b", weight=-1)}, ("-1",)),
    ({"messages": says("a", "b", weight=0)}, ()),
    ({"messages": says("<|im_end|>", "b")}, ("1", "'<|im_end|>'", "data.parse_tokens")),
    ({"messages": says("\0", "b")}, ("1", "NUL")),
    ({"messages": [{"role": ["user"], "content": "a"}]}, ("1", "'user'")),
    ({"messages": says("a", "b", role={})}, ("2",)),
    (
        {"messages": says("a", "b", weight=10**308)},
        ("2",),
    ),
    ({"messages": says("a", "b", weight=3e38)}, ("3e+38", "0")),
    ({"messages": says("a", "b", thinking=[1])}, ("2", "1")),
    ({"messages": says("a", "b", thinking="c", reasoning_content="d")}, ()),
    ({"messages": says("a", "b"), "tools": [{"name": "f"}]}, ("'tools'",)),
]


def test_bad_conversations_end_the_preparation_or_are_skipped(tmp_path, marked):
    good = [{"messages": c} for c in CONVERSATIONS[:5]]
    for record, names in BAD:
        with refused("chat.jsonl:2", *names):
            open_data(config(tmp_path, marked, [good[0], record]), 256, 2)
    records = [*(record for record, _ in BAD), *good]
    skip = config(tmp_path, marked, records, bad_records="skip", bad_records_limit=0.9)
    counts = open_data(skip, 256, 2).describe()
    assert counts["documents"] == 5
    assert sum(counts["sources"][0]["bad_records"].values()) == len(BAD)


@pytest.mark.parametrize(
    ("template", "changes", "names"),
    [
        (None, {}, ()),
        (MARKED, {"tokenizer": "bytes"}, ("'bytes'",)),
        # It writes the history of a conversation otherwise than the newest turn.
        (
            UNMARKED.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}"),
            {},
            (),
        ),
        (MARKED.replace("assistant'", "nobody'"), {}, ()),
    ],
    ids=["none", "bytes", "history", "no turns"],
)
def test_a_template_without_turns_is_refused(tmp_path, template, changes, names):
    settings = {"tokenizer": str(make_folder(tmp_path, template))} | changes
    with refused(*names):
        open_data(config(tmp_path, "", **settings), 256, 2)


def test_a_copy_of_the_tokenizer_has_the_template(tmp_path, marked):
    """A run and an export keep such a copy, and chat with it."""
    load_tokenizer(str(marked)).save(tmp_path)
    asked = says("a")[:1]
    prompts = [ChatTemplate.of_folder(f, "").render_prompt(asked) for f in (marked, tmp_path)]
    assert prompts[0] == prompts[1] != ""


@pytest.mark.slow
def test_the_limit_of_time_is_one_of_each_conversation(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_CPU_SECONDS", 2)
    template = ChatTemplate.of_folder(make_folder(tmp_path, UNMARKED), "")
    long = says(*["x" * 50] * 300)  # by turns, the time grows with the square of their number
    assert not any(one.fault for one in template.render_conversations([long] * 14))


def test_further_added_tokens_alone_extend_a_tokenizer(tmp_path, marked):
    longer, plain = load_tokenizer(str(marked)), load_tokenizer("bytes")
    assert extends_tokenizer(longer, plain)
    assert extends_tokenizer(longer, longer)
    assert not extends_tokenizer(plain, longer)
    content = json.loads((marked / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]  # two bytes swap their ids
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert not extends_tokenizer(load_tokenizer(str(tmp_path)), plain)


def test_a_flipped_bit_of_the_weights_is_noticed(tmp_path, marked):
    open_data(config(tmp_path, marked), 256, 2)
    (path,) = tmp_path.glob("prepared/tokens/*/*.weights")
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with refused(tmp_path):
        open_data(config(tmp_path, marked), 128, 2)  # other rows from the same part


def test_messages_may_be_inside_an_object(tmp_path, marked):
    flat = open_data(config(tmp_path, marked, [{"messages": c} for c in CONVERSATIONS]), 256, 2)
    (tmp_path / "nested").mkdir()
    nested = config(
        tmp_path / "nested",
        marked,
        [{"chat": {"messages": c}} for c in CONVERSATIONS],
        messages_field="chat.messages",
    )
    np.testing.assert_array_equal(open_data(nested, 256, 2).row(0)["tokens"], flat.row(0)["tokens"])


def test_tools_beside_nested_messages_are_refused(tmp_path, marked):
    record = {"chat": {"messages": CONVERSATIONS[0], "tools": [{"name": "f"}]}}
    data = config(tmp_path, marked, [record], messages_field="chat.messages")
    with refused("chat.jsonl:1", "'tools'"):
        open_data(data, 256, 2)
