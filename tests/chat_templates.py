"""Chat templates in the ways of the well-known families, each with something that only it does."""

from __future__ import annotations

TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
        "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # Llama 2's: the system prompt inside the first turn, roles that have to alternate
    "inst": """{%- if messages[0].role == 'system' -%}
    {%- set begin = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set begin = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (begin if loop.first else '') + turn['content'] | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + turn['content'] | trim + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}""",
    # Llama 3's: a year, headers, and blocks whose line ends the environment takes away
    "headers": """{{ bos_token }}
{% if year is not defined %}
    {% set year = strftime_now('%Y') %}
{% endif %}
{% for message in messages %}
<|start_header_id|>{{ message.role }}<|end_header_id|>

    {% if loop.first %}
Year: {{ year }}

    {% endif %}
{{ message.content | trim }}<|eot_id|>
{% endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    # Qwen 3's: tools as JSON, reasoning kept for the last answer alone, a search from the end
    "think": """{%- if tools %}
    {{- 'tools:' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
{%- endif %}
{%- set found = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and found.last < 0 %}
        {%- set found.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.content is string %}
        {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > found.last and message.reasoning_content is defined %}
            {%- set answer = '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' ~ answer %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + answer + '<|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ call.function | tojson(indent=2) ~ '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    # marks for the loss, loop controls, a macro
    "marked": """{%- macro close() %}{{ '<|im_end|>\\n' }}{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + close() }}{%- endgeneration %}
    {%- else %}{{- message.content + close() }}{%- endif %}
{%- endfor %}""",
}
CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
)  # fmt: skip
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""What a tokenizer adds and does not call special."""
