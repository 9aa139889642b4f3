"""A byte tokenizer with named tokens, and small chat templates in the shapes of several model families."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

MICRO = Path(__file__).resolve().parents[2] / "agentkv" / "data" / "micro" / "chat_template.jinja"

# Hermes shape: arguments always through tojson, tool results of one turn in one block, contents as they are.
HERMES = """
{%- if messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content }}
{%- if tools %}

# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{% elif tools -%}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif -%}
{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %}{{ '\\n' }}{% else %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role != 'system' -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Qwen3 shape: reasoning only after the last user question, an empty think block in the prompt when thinking is off.
QWEN3 = """
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{ '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\n\\nAnswer calls as <tool_call></tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') -%}
{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set content = message.content -%}
{%- set reasoning = message.reasoning_content or '' -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if reasoning and loop.index0 > ns.last %}{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{%- if content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else -%}
{{ call.function.arguments | tojson }}{% endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif message.role == 'user' or not loop.first -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

# Llama 3 shape: contents trimmed, tool results as JSON strings, one call a message, no text beside a call.
LLAMA3 = """
{{- '<|begin|>' -}}
{%- if messages[0].role == 'system' -%}
{{ '<|start|>system<|end|>\\n\\n' + messages[0].content | trim + '<|eot|>' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{%- set question = messages[0].content | trim -%}
{%- set messages = messages[1:] -%}
{{ '<|start|>user<|end|>\\n\\nUse these:\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor -%}
{{ question + '<|eot|>' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool calls') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
{%- elif message.role in ('tool', 'ipython') -%}
{{ '<|start|>ipython<|end|>\\n\\n' + (message.content | tojson) + '<|eot|>' }}
{%- else -%}
{{ '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif -%}
"""

# Gemma 2 shape: no system role, strict alternation, contents trimmed, no tools.
NO_SYSTEM = """
{{- '<|begin|>' -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif -%}
{{ '<|start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<|eot|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif -%}
"""

NAMED = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    "llama": ["<|begin|>", "<|eot|>", "<|start|>", "<|end|>"],
}


class ByteTokenizer:
    """One token a byte, then the named tokens; satisfies `TemplateTokenizer`."""

    def __init__(self, template: str, names: list[str], end_of_turn: str) -> None:
        self._names = {name: 256 + number for number, name in enumerate(names)}
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self.end_of_turn_id = self._names[end_of_turn]
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.policies["json.dumps_function"] = json.dumps
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = self._raise
        self._template = environment.from_string(template)

    @staticmethod
    def _raise(message: str) -> None:
        raise jinja2.TemplateError(message)

    def apply_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **args: Any,
    ) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **args)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        parts = self._split.split(text) if special else [text]
        ids: list[int] = []
        for part in parts:
            ids += [self._names[part]] if special and part in self._names else list(part.encode())
        return ids

    def decode(self, ids: list[int]) -> str:
        names = {number: name for name, number in self._names.items()}
        return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids).decode()


def chatml(template: str) -> ByteTokenizer:
    return ByteTokenizer(template, NAMED["chatml"], "<|im_end|>")


def llama(template: str) -> ByteTokenizer:
    return ByteTokenizer(template, NAMED["llama"], "<|eot|>")


def tokenizers() -> dict[str, ByteTokenizer]:
    return {
        "micro": chatml(MICRO.read_text()),
        "hermes": chatml(HERMES),
        "qwen3": chatml(QWEN3),
        "llama3": llama(LLAMA3),
        "no_system": llama(NO_SYSTEM),
    }


@pytest.fixture(scope="session")
def families() -> dict[str, ByteTokenizer]:
    """One tokenizer a template family."""
    return tokenizers()


@pytest.fixture(scope="session")
def with_template() -> Callable[[str], ByteTokenizer]:
    """A ChatML tokenizer around any template."""
    return chatml
