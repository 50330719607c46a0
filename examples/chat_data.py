"""Writes the training data of configs/chat_tiny.py: conversations about capitals
(runs/chat_data/conversations.jsonl), and a tokenizer of bytes with two tokens of a chat format and
a chat template (runs/chat_data/tokenizer).

    python examples/chat_data.py
"""

import json
import pathlib
import random

import tokenizers

from qwen3next_jax.data.tokens import load_tokenizer

CAPITALS = dict(
    pair.split(":")
    for pair in "Austria:Vienna Belgium:Brussels Chile:Santiago Cuba:Havana Denmark:Copenhagen "
    "Egypt:Cairo Finland:Helsinki France:Paris Germany:Berlin Ghana:Accra Greece:Athens "
    "Hungary:Budapest India:Delhi Ireland:Dublin Italy:Rome Japan:Tokyo Kenya:Nairobi Peru:Lima "
    "Poland:Warsaw Spain:Madrid".split()
)
# The loss counts the tokens between {% generation %} and {% endgeneration %}.
TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}
{{ message.content }}<|im_end|>
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def conversation(choose: random.Random) -> list[dict[str, str]]:
    """Returns the messages of a conversation: one to three questions, and their answers."""
    messages = []
    for i, country in enumerate(choose.sample(sorted(CAPITALS), choose.randint(1, 3))):
        first = choose.choice(["What is the capital of {}?", "Capital of {}?"])
        question = "And of {}?" if i and choose.random() < 0.7 else first
        messages += [
            {"role": "user", "content": question.format(country)},
            {"role": "assistant", "content": f"The capital of {country} is {CAPITALS[country]}."},
        ]
    return messages


def main() -> None:
    folder = pathlib.Path("runs/chat_data")
    tokenizer_folder = folder / "tokenizer"
    tokenizer_folder.mkdir(parents=True, exist_ok=True)
    load_tokenizer("bytes").save(tokenizer_folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>"}  # generation stops where a turn ends
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config))
    (tokenizer_folder / "chat_template.jinja").write_text(TEMPLATE)

    choose = random.Random(0)
    records = [{"messages": conversation(choose)} for _ in range(2000)]
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{file}: {len(records)} conversations; {tokenizer_folder}: their tokenizer")


if __name__ == "__main__":
    main()
