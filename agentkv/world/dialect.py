"""How an agent and the world talk: system prompt, tool schemas, forms of calls and tool-result bodies.

A dialect is one frozen object: `native` is the world's own, the others speak as two agent frameworks do under the
configuration files in `integrations/` (`minisweagent/micro.yaml`, `openhands/micro.json`; a test holds them equal).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where commands run, as some agents show it in each result."""

    directory: str
    python: str


HERE = Place("/work", "/usr/bin/python3")


def _schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _function(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


BASH_TOOL = _schema("bash", "Run one command in the directory.", {"command": {"type": "string"}}, ["command"])
SYSTEM = "You work in a directory. One bash command a turn. Finish with: echo VALUE > answer.txt"


@dataclass(frozen=True, eq=False)  # one is another only if it is the same object
class Dialect:
    """System prompt, tools and forms of one way of speaking. `wrap` holds the first user message around `{task}`."""

    name: str
    system: str
    tools: tuple[dict[str, Any], ...]
    wrap: str = "{task}"

    def prompt(self, task: str) -> str:
        """The first user message."""
        return self.wrap.replace("{task}", task)

    def body(self, output: str, code: int, place: Place = HERE) -> str:
        """Tool-result body for a command's output and exit status."""
        if code == 0:
            return output.removesuffix("\n")
        if output and not output.endswith("\n"):
            output += "\n"
        return f"{output}[exit {code}]"

    def call(self, command: str) -> dict[str, Any]:
        """The tool call (OpenAI form, arguments as a dictionary) that runs `command`."""
        return _function("bash", {"command": command})

    def finish(self) -> tuple[dict[str, Any], str] | None:
        """The call that hands the work in, and the body of its result; None where the last command is the end."""
        return None


@dataclass(frozen=True, eq=False)
class MiniSweAgent(Dialect):
    """mini-SWE-agent 2.4: native tool calls, a tagged observation, a command that submits."""

    def body(self, output: str, code: int, place: Place = HERE) -> str:
        """The observation template of the shipped configuration."""
        return f"<returncode>{code}</returncode>\n<output>\n{output}</output>"

    def finish(self) -> tuple[dict[str, Any], str] | None:
        """Submit; the framework ends there and shows no result, other loops show what echo prints."""
        return self.call(f"echo {SUBMIT}"), self.body(f"{SUBMIT}\n", 0)


@dataclass(frozen=True, eq=False)
class OpenHands(Dialect):
    """OpenHands SDK 1.58: the tool `terminal`, three lines of metadata behind each output, the tool `finish`."""

    def body(self, output: str, code: int, place: Place = HERE) -> str:
        """What a terminal observation shows to the model."""
        lines = [output.removesuffix("\n"), f"[Current working directory: {place.directory}]"]
        if place.python:
            lines.append(f"[Python interpreter: {place.python}]")
        return "\n".join([*lines, f"[Command finished with exit code {code}]"])

    def call(self, command: str) -> dict[str, Any]:
        """The summary is the command's first word, so that nothing is copied before it is needed."""
        summary = command.partition(" ")[0]
        return _function("terminal", {"command": command, "summary": summary, "security_risk": "LOW"})

    def finish(self) -> tuple[dict[str, Any], str] | None:
        """The finish call; its result is its message."""
        return _function("finish", {"message": "done", "summary": "finish"}), "done"


SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
NATIVE = Dialect("native", SYSTEM, (BASH_TOOL,))
MINI = MiniSweAgent(
    "mini-swe-agent",
    "You act in a directory through bash calls.",
    (
        _schema(
            "bash",
            "Execute a bash command",
            {"command": {"type": "string", "description": "The bash command to execute"}},
            ["command"],
        ),
    ),
    f"{{task}}\n\nOne bash command a turn. Write the answer: echo VALUE > answer.txt. Then submit: echo {SUBMIT}",
)
_RISK = {"type": "string", "enum": ["UNKNOWN", "LOW", "MEDIUM", "HIGH"]}
_TEXT = {"type": "string"}
OPENHANDS = OpenHands(
    "openhands",
    "You act in a directory by the terminal. One command a turn. Write the answer: echo VALUE > answer.txt. Then finish.",
    (
        _schema(
            "terminal",
            "Run one command in the directory.",
            {"command": _TEXT, "summary": _TEXT, "security_risk": _RISK},
            ["command", "security_risk"],
        ),
        _schema("finish", "Hand in the work.", {"message": _TEXT, "summary": _TEXT}, ["message"]),
    ),
)
DIALECTS: dict[str, Dialect] = {one.name: one for one in (NATIVE, MINI, OPENHANDS)}


def dialect(name: str) -> Dialect:
    """The dialect called `name`."""
    if name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}; known: {', '.join(DIALECTS)}")
    return DIALECTS[name]
