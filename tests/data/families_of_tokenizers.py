"""Families of models: their tokenizers as tiny ones of the same structure, and chat templates of
our own that do what theirs do. In a template, « and » stand for {% generation %} and
{% endgeneration %}.
"""

from typing import Any, NamedTuple

LIKE_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIKE_QWEN = LIKE_LLAMA.replace("{1,3}", "")
LIKE_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?\p{Lu}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN_APART = r"[\p{Han}]+|" + LIKE_LLAMA
THINK = ("<think>", "</think>")


class Family(NamedTuple):
    """A family of models.

    Attributes:
      name: its name.
      files: which of the real files this structure was compared with.
      template: the chat template.
      eos: the token that ends the assistant's turn, as `eos_token` has to name it.
      special: the other special tokens.
      added: added tokens that are text.
      patterns: the regular expressions of the pre-tokenizer, one after the other; () for GPT-2's.
      split: (behavior, invert) of a pattern.
      normalizer: the normalizer.
      model: further fields of the BPE.
      sentencepiece: whether the vocabulary is of SentencePiece, with ▁ for spaces and <0x00> for
        bytes; else it is of bytes.
      lacks: bytes that the vocabulary of bytes has not.
      normalized: whether `added` are looked for in the normalized text.
    """

    name: str
    files: str
    template: str
    eos: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    patterns: tuple[str, ...] = (LIKE_LLAMA,)
    split: tuple[str, bool] = ("Isolated", False)
    normalizer: dict[str, Any] | None = None
    model: dict[str, Any] = {}
    sentencepiece: bool = False
    lacks: tuple[int, ...] = ()
    normalized: bool = False


def _turns(
    head: str, user: str, assistant: str, prompt: str, tail: str = "", tool: str = ""
) -> str:
    """A template that writes `user` and `assistant` for messages of these roles, `tool` for those
    of tools, and a message of another role as `user`, all with the message m.
    """
    tools = "{% elif m.role == 'tool' %}" + tool if tool else ""
    return (
        f"{head}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}{tools}"
        f"{{% else %}}{user}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{tail}{{% endif %}}"
    )


# The index of the last question. The reasoning of turns before it is left out.
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
)
_IS_NEW = "loop.index0 > ns.last"
_CHATML = "<|im_start|>{{ m.role }}{{ '\\n' + m.content }}<|im_end|>{{ '\\n' }}"
_CALLS = "{% for call in m.tool_calls or [] %}{{ call | tojson(ensure_ascii=False) }}{% endfor %}"
_ALTERNATE = (
    "{% if messages[0].role in ('user', 'system') and messages | map(attribute='role') | "
    "select('in', ('tool', 'developer')) | list %}{{ raise_exception('roles') }}{% endif %}"
    "{% if messages[0].role == 'developer' %}{{ raise_exception('roles') }}{% endif %}"
)
_LLAMA = (
    "<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' + m.content | trim }}<|eot_id|>"
)
_NFC = {"type": "NFC"}

FAMILIES = (
    Family(
        "Qwen (Qwen3)",
        "tokenizer, template",
        _turns(
            _LAST,
            "{% if m.role != 'developer' %}" + _CHATML + "{% endif %}",
            "<|im_start|>assistant{{ '\\n' }}«{% if " + _IS_NEW + " and (loop.last or "
            "m.reasoning_content) %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ m.content or '' }}" + _CALLS + "<|im_end|>»{{ '\\n' }}",
            "<|im_start|>assistant{{ '\\n' }}",
            tool="<|im_start|>user<tool_response>{{ m.content }}</tool_response><|im_end|>",
        ),
        "<|im_end|>",
        ("<|endoftext|>", "<|im_start|>"),
        (*THINK, "<tool_call>", "<tool_response>", "</tool_response>"),
        (LIKE_QWEN,),
        normalizer=_NFC,
    ),
    Family(
        "Llama 3 (3.2)",
        "tokenizer (of 3.1), template",
        _turns(
            "{{ bos_token }}{{ strftime_now('%d %b %Y') }}",
            _LLAMA,
            "<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}«{{ m.content or '' }}"
            "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|eot_id|>»",
            "<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}",
        ),
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        model={"ignore_merges": True},
    ),
    Family(
        "Gemma (3)",
        "tokenizer, template",
        _turns(
            "{{ bos_token }}" + _ALTERNATE,
            "<start_of_turn>{{ m.role }}{{ '\\n' + m.content | trim }}<end_of_turn>{{ '\\n' }}",
            "<start_of_turn>model{{ '\\n' }}«{{ m.content | trim }}<end_of_turn>»{{ '\\n' }}",
            "<start_of_turn>model{{ '\\n' }}",
        ),
        "<end_of_turn>",
        ("<unk>", "<bos>", "<start_of_turn>"),
        ("▁▁", "▁▁▁", "\n\n"),
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        model={"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
        sentencepiece=True,
    ),
    Family(
        "Mistral (Small 3.1)",
        "pattern of tekken, template",
        _turns(
            "{{ bos_token }}{% set today = strftime_now('%Y-%m-%d') %}{% if messages[0].role != "
            "'system' %}[SYSTEM_PROMPT]{{ today }}[/SYSTEM_PROMPT]{% endif %}"
            "{% if messages[0].role == 'developer' %}{{ raise_exception('roles') }}{% endif %}",
            "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% else %}"
            "[INST]{{ m.content }}[/INST]{% endif %}",
            "«{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
            "{{ eos_token }}»",
            "",
            tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        ),
        "</s>",
        ("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_RESULTS]"),
        patterns=(LIKE_GPT_4O.replace("{1,3}", ""),),
        model={"ignore_merges": True},
    ),
    Family(
        "GLM (4.5)",
        "template",
        _turns(
            "[gMASK]<sop>" + _LAST,
            "{% if m.role != 'developer' %}<|{{ m.role }}|>{{ '\\n' + m.content }}{% endif %}",
            "<|assistant|>«{{ '\\n' }}{% if " + _IS_NEW + " and m.reasoning_content %}<think>"
            "{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}"
            "{{ '\\n' }}{{ m.content or '' }}" + _CALLS + "»",
            "<|assistant|>",
            tool="<|observation|>{{ m.content }}",
        ),
        "<|user|>",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
        THINK,
        model={"ignore_merges": True},
    ),
    Family(
        "DeepSeek (V3)",
        "tokenizer, template",
        _turns(
            "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}"
            "{% endfor %}",
            "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}",
            "<｜Assistant｜>«{{ (m.content or '').split('</think>')[-1] }}"
            "{% for call in m.tool_calls or [] %}{{ call.function.arguments + '' }}{% endfor %}"
            "<｜end▁of▁sentence｜>»",
            "<｜Assistant｜>",
            tool="<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>",
        ),
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>",),
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        (r"\p{N}{1,3}", "[一-龥]+", LIKE_QWEN),
        normalizer={"type": "Sequence", "normalizers": []},
        normalized=True,
    ),
    Family(
        "gpt-oss",
        "tokenizer, template",
        _turns(
            _LAST + "<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>",
            "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
            "{% if "
            + _IS_NEW
            + " and m.thinking %}<|start|>assistant«<|channel|>analysis<|message|>"
            "{{ m.thinking }}<|end|>»{% endif %}<|start|>assistant«<|channel|>final<|message|>"
            "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}"
            "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}»",
            "<|start|>assistant",
        ),
        "<|return|>",
        ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        patterns=(LIKE_GPT_4O,),
        model={"ignore_merges": True},
    ),
    Family(
        "Kimi (K2)",
        "template",
        _turns(
            "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>x<|im_end|>"
            "{% endif %}",
            "{% if m.role in ('system', 'user') %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
            "{% endif %}{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>«{{ m.content or '' }}<|im_end|>»",
            "<|im_assistant|>assistant<|im_middle|>",
            tool="<|im_system|>tool<|im_middle|>{{ m.content }}<|im_end|>",
        ),
        "<|im_end|>",
        ("[BOS]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        patterns=(HAN_APART,),
    ),
    Family(
        "OLMo (1)",
        "tokenizer",
        _turns(
            "{{ eos_token }}",
            "<|{{ m.role }}|>{{ '\\n' + m.content + '\\n' }}",
            "<|assistant|>{{ '\\n' }}«{{ m.content }}{{ eos_token }}»{{ '\\n' }}",
            "<|assistant|>{{ '\\n' }}",
        ),
        "<|endoftext|>",
        ("<|padding|>",),
        ("  ", "   ", "    ", "|||IP_ADDRESS|||"),
        (),
        normalizer=_NFC,
        lacks=(0xC0, 0xC1, *range(0xF5, 0x100)),
        normalized=True,
    ),
    Family(
        "OLMo (2)",
        "tokenizer",
        _turns(
            "{{ eos_token }}",
            "<|{{ m.role }}|>{{ '\\n' + m.content + '\\n' }}",
            "<|assistant|>{{ '\\n' }}«{{ m.content }}{{ eos_token }}»"
            "{% if not loop.last %}{{ '\\n' }}{% endif %}",
            "<|assistant|>{{ '\\n' }}",
        ),
        "<|endoftext|>",
        ("<|pad|>",),
        ("|||IP_ADDRESS|||",),
        split=("Removed", True),
    ),
    Family(
        "Phi (4 mini)",
        "template",
        _turns(
            "",
            "<|{{ m.role }}|>{{ m.content }}<|end|>",
            "<|assistant|>«{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
            "{{ call | tojson }}{% endfor %}<|end|>»",
            "<|assistant|>",
            "<|endoftext|>",
            "<|tool_response|>{{ m.content | tojson }}<|end|>",
        ),
        "<|end|>",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        patterns=(LIKE_GPT_4O,),
    ),
    Family(
        "Nemotron (3 Nano)",
        "template",
        _turns(
            _LAST,
            _CHATML,
            "<|im_start|>assistant{{ '\\n' }}«{% if " + _IS_NEW + " %}<think>"
            "{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}"
            "{{ m.content or '' }}"
            "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>»"
            "{{ '\\n' }}",
            "<|im_start|>assistant{{ '\\n' }}<think>{{ '\\n' }}",
            tool="<tool_response>{{ m.content }}</tool_response>",
        ),
        "<|im_end|>",
        ("<s>", "<|im_start|>"),
        THINK,
        (LIKE_GPT_4O.replace("{1,3}", ""),),
        model={"ignore_merges": True},
    ),
    Family(
        "MiniMax (M2)",
        "template",
        _turns(
            _LAST + "{% if messages[0].role == 'system' %}]~!b[{% endif %}",
            "]~b]{{ m.role }}{{ '\\n' + m.content }}[e~[{{ '\\n' }}",
            "]~b]ai{{ '\\n' }}«{% if m.reasoning_content and " + _IS_NEW + " %}<think>{{ '\\n' }}"
            "{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
            + _CALLS
            + "[e~[»{{ '\\n' }}",
            "]~b]ai{{ '\\n' }}<think>{{ '\\n' }}",
            tool="]~b]tool<response>{{ m.content }}</response>[e~[{{ '\\n' }}",
        ),
        "[e~[",
        ("]~!b[", "]~b]"),
        THINK,
    ),
)
