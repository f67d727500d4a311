"""Hold chat templates for models that come without one, with marks around what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ironfn.data.tokenizer import Vocabulary

_CHECK = (
    "{%- if tools %}{{ raise_exception('this template tells of no tools') }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}{{ raise_exception('this template writes no tool calls') }}{% endif %}"
)
"""What this template would leave out without a word."""

_CHATML = (
    _CHECK + "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{- bos_token | default('') }}"
    + _CHECK
    + "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_GEMMA = (
    "{{- bos_token | default('') }}{% set ns = namespace(system='') %}" + _CHECK + "{%- if message.role == 'system' %}"
    "{%- set ns.system = message.content | trim + '\\n\\n' %}"
    "{%- elif message.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}"
    "{%- generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else %}{{ '<start_of_turn>' + message.role + '\\n' + ns.system }}"
    "{{- message.content | trim + '<end_of_turn>\\n' }}"
    "{%- set ns.system = '' %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_ZEPHYR = (
    _CHECK + "{{- '<|' + message.role + '|>\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{%- else %}{{ message.content + eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_ALPACA = (
    _CHECK + "{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '### Response:\\n' }}"
    "{%- generation %}{{ message.content + eos_token | default('') }}{% endgeneration %}{{ '\\n\\n' }}"
    "{%- else %}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)

TEMPLATES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
        "llama3": (_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
        "gemma": (_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
        "zephyr": (_ZEPHYR, ()),
        "alpaca": (_ALPACA, ()),
    }
)
"""By name: the Jinja text, and the tokens that a tokenizer needs for it."""


def template_of(choice: str, vocabulary: Vocabulary) -> str:
    """Return the template of a name, or a file's. ValueError where there is neither, or its tokens are no tokens."""
    if choice not in TEMPLATES:
        try:
            return Path(choice).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(TEMPLATES)
            raise ValueError(f"template {choice!r} is neither one of {known} nor a file: {error}") from error
    text, needed = TEMPLATES[choice]
    added = {token.content for token in vocabulary.tokenizer.get_added_tokens_decoder().values()}
    if missing := [name for name in needed if name not in added]:
        raise ValueError(
            f"the template {choice} needs the tokens {', '.join(missing)}, which the tokenizer does not have; take "
            "alpaca or zephyr, which need none"
        )
    return text
