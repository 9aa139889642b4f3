"""Schemas from functions, and calls checked and run without ever crashing the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

import agentkv.tools.bash
from agentkv.errors import BadRequest
from agentkv.tools import Toolbox, schema_of, tool
from agentkv.tools.bash import bash, make_bash, run_shell
from agentkv.types import ToolCall


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="call_1", name=name, arguments=arguments)


def everything(
    path: str,
    count: int,
    ratio: float = 0.5,
    deep: bool = False,
    names: list[str] | None = None,
    sizes: dict[str, int] = {},  # noqa: B006
    mode: Literal["r", "w"] = "r",
    note: Annotated[Optional[str], "A note."] = None,  # noqa: UP045
    *,
    anything: Any = None,
) -> str:
    """Does everything.

    In two paragraphs.

    Args:
        path: Where it is,
            told in two lines.
        count (int): How many: at most 3.

    Returns:
        Something.
    """
    return f"{path} {count} {ratio} {deep} {names} {sizes} {mode} {note} {anything}"


def test_schema_of_a_function() -> None:
    function = schema_of(everything)["function"]
    assert function["name"] == "everything"
    assert function["description"] == "Does everything.\n\nIn two paragraphs."
    assert function["parameters"] == {
        "type": "object",
        "required": ["path", "count"],
        "additionalProperties": False,
        "properties": {
            "path": {"type": "string", "description": "Where it is, told in two lines."},
            "count": {"type": "integer", "description": "How many: at most 3."},
            "ratio": {"type": "number", "default": 0.5},
            "deep": {"type": "boolean", "default": False},
            "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "sizes": {"type": "object", "additionalProperties": {"type": "integer"}, "default": {}},
            "mode": {"type": "string", "enum": ["r", "w"], "default": "r"},
            "note": {"type": ["string", "null"], "description": "A note."},
            "anything": {},
        },
    }
    assert json.loads(json.dumps(function)) == function


def numpy_style(path: str, count: int = 1) -> None:
    """Reads.

    Parameters
    ----------
    path : str
        The path.
    count : int, optional
        The count:
        a number.

    Returns
    -------
    None
    """


def field_style(path: str, count: int = 1) -> None:
    """Reads.

    :param path: The path.
    :param int count: The count:
        a number.
    :returns: nothing
    """


@pytest.mark.parametrize("function", [numpy_style, field_style])
def test_docstring_styles(function: Any) -> None:
    schema = schema_of(function)["function"]
    assert schema["description"] == "Reads."
    properties = schema["parameters"]["properties"]
    assert [properties[name]["description"] for name in ("path", "count")] == ["The path.", "The count: a number."]


def untyped(x) -> None: ...  # type: ignore[no-untyped-def]
def variadic(*x: int) -> None: ...
def keyworded(**x: int) -> None: ...
def positional(x: int, /) -> None: ...
def strange(x: Path) -> None: ...
def nested(x: list[set[int]]) -> None: ...
def unknown(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def bad_default(x: Any = object) -> None: ...
def ambiguous(x: list[int] | list[str]) -> None: ...


@pytest.mark.parametrize(
    "given",
    [untyped, variadic, keyworded, positional, strange, nested, unknown, bad_default, ambiguous, lambda: None, 3, "bash", {}]
    + [{"type": "web_search"}, {"type": "function", "function": {}}, {"name": "no spaces"}, {"name": "x", "parameters": []}],
)
def test_what_cannot_be_a_tool_is_refused_at_construction(given: Any) -> None:
    with pytest.raises(BadRequest):
        Toolbox([given])


def test_two_tools_of_one_name() -> None:
    with pytest.raises(BadRequest, match="two tools"):
        Toolbox([bash, {"name": "bash"}])


def test_calls_are_checked() -> None:
    box = Toolbox([everything])
    assert box.call(call("everything", path="a", count=2, ratio=1, note="n")) == "a 2 1.0 False None {} r n None"
    for wrong in (
        {"path": "a"},
        {"path": "a", "count": "2"},
        {"path": "a", "count": True},
        {"path": 1, "count": 2},
        {"path": "a", "count": 2, "mode": "x"},
        {"path": "a", "count": 2, "names": [1]},
        {"path": "a", "count": 2, "unknown": 1},
    ):
        outcome = box.invoke(call("everything", **wrong))
        assert outcome.error
        assert outcome.content.startswith("InvalidArguments: everything: ")
    outcome = box.invoke(call("rm"))
    assert outcome.error
    assert outcome.content == "UnknownTool: there is no tool 'rm'. Tools: everything"


def test_failures_become_results() -> None:
    def fails() -> str:
        raise ValueError("no\ud800 way")

    def leaves() -> str:
        raise SystemExit(3)

    async def waits(n: int) -> int:
        return n + 1

    def interrupted() -> str:
        raise KeyboardInterrupt

    box = Toolbox([fails, leaves, waits, interrupted])
    assert box.invoke(call("fails")).content == "ValueError: no? way"
    assert box.invoke(call("fails")).error
    assert box.call(call("leaves")) == "SystemExit: 3"
    assert box.call(call("waits", n=1)) == "2"
    with pytest.raises(KeyboardInterrupt):
        box.call(call("interrupted"))


def test_results_become_text() -> None:
    values: list[Any] = ["a\ud800", b"\xff", None, 3, {"a": [1, 2.5]}, Path("/x"), {1, 2}]

    def value(at: int) -> Any:
        return values[at]

    box = Toolbox([value])
    assert [box.call(call("value", at=at)) for at in range(len(values))] == [
        "a?", "�", "null", "3", '{"a":[1,2.5]}', '"/x"', "[1,2]",
    ]  # fmt: skip


def test_schemas_run_through_execute() -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                    "how": {"enum": ["all", "some"]},
                    "odd": {"oneOf": [{"type": "string"}, {"type": "array"}]},
                    "maybe": {"type": ["string", "null"]},
                    "more": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                },
                "required": ["path"],
            },
        },
    }
    box = Toolbox([schema])
    assert box.without_function == ("read",)
    assert box.schemas == [schema]

    def run(made: ToolCall) -> str:
        return made.arguments["path"] + "!"

    good = {"path": "a", "lines": [1], "how": "all", "odd": [2], "maybe": None, "more": {"x": 1, "y": 2}, "extra": 1}
    assert box.invoke(call("read", **good), run).content == "a!"
    for name, wrong in [("lines", ["a"]), ("how", "none"), ("more", {}), ("more", {"x": "1"}), ("maybe", 3), ("path", None)]:
        assert box.invoke(call("read", **good | {name: wrong}), run).error, name
    assert box.invoke(call("read"), run).error
    assert box.invoke(call("read", path="a")).error  # nothing to run it with


def test_marked_functions_stay_functions() -> None:
    @tool(name="add-up", description="Adds.")
    def add(a: int, b: int) -> int:
        return a + b

    class Counter:
        def count(self, by: int = 1) -> int:
            """Counts."""
            return by

    assert add(1, 2) == 3
    box = Toolbox([add, Counter().count])
    assert box.names == ("add-up", "count")
    assert box.schemas[0]["function"]["description"] == "Adds."
    assert box.call(call("add-up", a=1, b=2)) == "3"
    assert box.call(call("count")) == "1"
    with pytest.raises(BadRequest):
        tool(untyped)


def test_the_shell_tool(tmp_path: Path) -> None:
    assert bash("echo hi; echo there >&2") == "hi\nthere\n"
    assert run_shell("printf x; exit 3") == "x\n[exit code 3]"
    assert run_shell("exit 2") == "[exit code 2]"
    assert run_shell("sleep 30 & sleep 30", timeout=0.2) == "[killed after 0.2 s]"
    long = run_shell("head -c 100000 /dev/zero | tr '\\0' x", cap=100)
    assert long == "x" * 50 + "\n[... 99900 bytes left out ...]\n" + "x" * 50
    box = Toolbox([make_bash(cwd=str(tmp_path))])
    assert box.call(call("bash", command="pwd")).strip() == str(tmp_path)
    assert box.schemas[0]["function"]["parameters"]["required"] == ["command"]
    assert run_shell("sleep 5 & echo done") == "done\n"
    assert Toolbox([agentkv.tools.bash]).call(call("bash", command="echo $((1+1))")) == "2\n"
