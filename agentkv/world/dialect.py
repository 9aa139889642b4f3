"""How an agent and the world talk: system prompt, tool schema, tool-result bodies.

A dialect is one frozen object.  `native` is the world's own; dialects of other agents are
further instances of the same class (or of a subclass that overrides `body`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run one command in the directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}

SYSTEM = "You work in a directory. One bash command a turn. Finish with: echo VALUE > answer.txt"


@dataclass(frozen=True)
class Dialect:
    """System prompt, tools and forms of one way of speaking."""

    name: str
    system: str
    tools: tuple[dict[str, Any], ...]

    def body(self, output: str, code: int) -> str:
        """Tool-result body for a command's output and exit status."""
        if code == 0:
            return output.removesuffix("\n")
        if output and not output.endswith("\n"):
            output += "\n"
        return f"{output}[exit {code}]"

    def call(self, command: str) -> dict[str, Any]:
        """The tool call (OpenAI form, arguments as a dictionary) that runs `command`."""
        return {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}


NATIVE = Dialect("native", SYSTEM, (BASH_TOOL,))
DIALECTS = {NATIVE.name: NATIVE}


def dialect(name: str) -> Dialect:
    """The dialect called `name`."""
    if name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}; known: {', '.join(DIALECTS)}")
    return DIALECTS[name]
