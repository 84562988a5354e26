"""A chat template of our own that knows tools in the Hermes format, and a model entry that has it."""

from __future__ import annotations

import copy
from dataclasses import replace

from deployments.openai.contracts import ModelEntry

TEMPLATE = """{%- if tools %}<|startoftext|>tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one as <tool_call>
{"name": ..., "arguments": {...}}
</tool_call><|role_end|>
{%- endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|role_end|>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def with_tools(entry: ModelEntry) -> ModelEntry:
    """The entry with a template that knows tools."""
    tokenizer = copy.deepcopy(entry.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(entry, tokenizer=tokenizer)


def tool(name: str, **properties: dict) -> dict:
    """A tool whose arguments are exactly these."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}!", "parameters": parameters},
    }
