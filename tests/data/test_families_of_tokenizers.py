"""What works of the tokenizers and chat templates of the families in `families_of_tokenizers`. The
page has the results; `python tests/data/test_families_of_tokenizers.py` writes them.
"""

import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import tokenizers
from families_of_tokenizers import FAMILIES, Family

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data import conversations, cuts, render_template
from qwen3next_jax.data.chat_template import ChatTemplate, TemplateFile
from qwen3next_jax.data.tokens import byte_characters, load_tokenizer, miscounted_bytes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "tokenizers.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
TEXT = "def größe(x):\n    return '∀ 😀' + x  # naïve 12345\n\n<think>one  two</think>\t中文\r\n"
LINES, WORDS = "one line\nand another\n" * 40, "two words " * 80


# ---- tokenizers


def make_tokenizer(family: Family, folder: pathlib.Path):
    """Returns (our tokenizer, that of the library)."""
    if family.sentencepiece:
        letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(33, 127)), "▁"]
        merged = [("i", "n"), ("▁", "r")]
        if "▁▁" in family.added:  # they are of the model's vocabulary, too
            letters += family.added
        cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
        splitter = cut | {"invert": False}
        steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
        steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
        decoder = {"type": "Sequence", "decoders": steps}
        letters.append("e▁t")  # a piece of two words
    else:
        letters = [c for byte, c in enumerate(byte_characters()) if byte not in family.lacks]
        merged = [("i", "n"), ("Ġ", "r"), ("Ã", "¶")]
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        decoder |= {"use_regex": True}
        pieces = decoder | {"add_prefix_space": False, "use_regex": not family.patterns}
        behavior, invert = family.split
        steps = [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": behavior, "invert": invert}
            for p in family.patterns
        ]
        splitter = {"type": "Sequence", "pretokenizers": [*steps, pieces]} if steps else pieces
    vocabulary = list(dict.fromkeys([*letters, *map("".join, merged)]))
    ids = {token: i for i, token in enumerate(vocabulary)}
    added = []
    for token in (*family.special, family.eos, *family.added):
        special = token not in family.added
        ids_ = ids.get(token, len(ids) + sum(t["content"] not in ids for t in added))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        flags |= {"normalized": family.normalized and not special, "special": special}
        added.append({"id": ids_, "content": token} | flags)
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": family.normalizer,
        "pre_tokenizer": splitter,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": ids, "merges": merged} | family.model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.eos}))
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder)), library


def describe_tokenizer(family: Family, ours, library) -> list[str]:
    def documents(text):
        """The ids by both ways in which documents are encoded, which have to be equal."""
        (one,), *others = (t.encode_documents([text]) for t in (ours, ours.slower_tokenizer) if t)
        assert all(np.array_equal(one, other) for (other,) in others)
        assert one[-1] == ours.eos_id
        return one[:-1]

    def miscounted(text):
        return miscounted_bytes(
            int(ours.token_byte_counts[documents(text)].sum()), len(text.encode())
        )

    given = library.encode(TEXT, add_special_tokens=False).ids
    same = documents(TEXT).tolist() == ours.encode(TEXT).tolist() == given
    quoted = "a ".join((*family.special, family.eos))
    special = {library.token_to_id(token) for token in (*family.special, family.eos)}
    is_text = special.isdisjoint(documents(quoted).tolist()) and set(given).isdisjoint(special)
    bits = "no"
    if not miscounted(TEXT) and not miscounted(quoted):
        bits = "no, of text that is not NFC" if miscounted("e\u0301") else "yes"
        bits = bits.replace("no, of", "yes, but for")
    with mock.patch.multiple(cuts, LONGEST=64, _AROUND=32):
        places = [
            name
            for name, text in (("lines", LINES), ("words", WORDS))
            if len(list(ours._cutter.cut([text]))) > 1
        ]
    fast = "tiktoken" if ours._tiktoken_table_if_installed() else "tokenizers"
    names = ["SentencePiece's BPE" if family.sentencepiece else "bytes' BPE"]
    names += ["yes" if same else "no", "yes" if is_text else "no", bits]
    return [*names, ", ".join(places) or "no", fast]


# ---- chat templates


class InThisProcess(ChatTemplate):
    """Renders without a process of its own, which takes a tenth of a second."""

    def _run_renderer(self, request):
        more = {
            "template": self._file.text,
            "special": self._file.special_tokens,
            "date": self._date,
        }
        request |= more | {"characters": 1 << 20, "seconds": 10}
        with mock.patch.object(render_template, "_limit_cpu_time"):  # it would end the tests
            return render_template.render_request(request)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


QUESTIONS = [
    said("user", "q1"),
    said("assistant", "a1"),
    said("user", "q2"),
    said("assistant", "a2"),
]
REASONED = [
    said("user", "q1"),
    said("assistant", "a1", thinking="why1"),
    said("user", "q2"),
    said("assistant", "a2", thinking="why2"),
]
WITH = {
    "system": [said("system", "WRITTEN"), *QUESTIONS[:2]],
    "developer": [said("developer", "WRITTEN"), *QUESTIONS[:2]],
    "tool": [*QUESTIONS[:2], said("tool", "WRITTEN"), said("assistant", "a2")],
    **{  # some templates want an object, some its text
        name: [
            QUESTIONS[0],
            said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}]),
        ]
        for name, arguments in (("calls", {"x": "WRITTEN"}), ("calls as text", "WRITTEN"))
    },
}


def describe_template(family: Family, tokenizer) -> list[str]:
    def template(marked, date="2026-01-31"):
        marks = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
        text = family.template.replace("«", marks[0]).replace("»", marks[1])
        special = {"bos_token": family.special[0], "eos_token": family.eos}
        return InThisProcess(TemplateFile(PAGE, text, special), date)

    def needs(marked, messages):
        (rendered,) = template(marked).render_conversations([messages])
        assert not rendered.fault or "{% generation %}" in rendered.fault
        return bool(rendered.fault)

    try:
        template(True, "").render_conversations([QUESTIONS])
        dated = "no"
    except UserError as error:
        assert "data.template_date" in str(error)
        dated = "yes"
    plain, reasoned = needs(False, QUESTIONS), needs(False, REASONED)
    assert not needs(True, QUESTIONS)
    assert not needs(True, REASONED)
    blocks = "yes" if plain else "with reasoning" if reasoned else "no"
    (encoded,) = conversations.encode_conversations([QUESTIONS], tokenizer, template(True))
    assert not encoded.fault
    ends = int((encoded.loss_weights[encoded.tokens == tokenizer.eos_id] > 0).sum())
    counted = tokenizer.decode(encoded.tokens[encoded.loss_weights > 0])
    assert "a1" in counted
    assert "a2" in counted
    assert "q" not in counted
    (text,) = (r.text for r in template(True).render_conversations([REASONED]))
    reasoning = [name for name, why in (("earlier", "why1"), ("last", "why2")) if why in text]
    written = []
    for name, messages in WITH.items():
        (rendered,) = template(True).render_conversations([messages])
        if "WRITTEN" in rendered.text:
            written.append(name)
    if "calls" in written and "calls as text" in written:
        written.remove("calls as text")
    of_turns = {2: "each turn", 1: "last turn", 0: "no turn"}[ends]
    eos = "`" + family.eos.replace("|", "\\|") + "`"
    return [dated, blocks, eos, of_turns, ", ".join(reasoning) or "none", ", ".join(written)]


# ---- the page


def page() -> str:
    """The page with the tables as they are now."""
    first = "family|kind|documents = prompts = library|special tokens stay text|bits per byte"
    first = [[*first.split("|"), "long documents are cut between", "encoded by"]]
    second = "family|needs `data.template_date`|needs `{% generation %}`|`eos_token`|it counts in"
    second = [[*second.split("|"), "reasoning that is written", "also written", "real files"]]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            ours, library = make_tokenizer(family, pathlib.Path(folder))
            first.append([family.name, *describe_tokenizer(family, ours, library)])
            second.append([family.name, *describe_template(family, ours), family.files])
    tables = []
    for rows in (first, second):
        rows.insert(1, ["---"] * len(rows[0]))
        tables.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(tables) + "\n" + END + rest.partition(END)[2]


def test_the_page_says_what_works_of_each_family():
    command = "python tests/data/test_families_of_tokenizers.py writes the tables"
    assert page() == PAGE.read_text(), command


if __name__ == "__main__":
    PAGE.write_text(page())
