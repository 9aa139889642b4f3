"""The tools a caller passed: their schemas for the prompt, and calls checked and run. Nothing else is ever run."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar, overload

import msgspec

from agentkv.errors import BadRequest
from agentkv.tools.schema import arguments_type, checked_name, schema_of, type_of
from agentkv.types import Frozen, ToolCall

__all__ = ["Outcome", "Tool", "Toolbox", "schema_of", "tool"]

F = TypeVar("F", bound=Callable[..., Any])
Execute = Callable[[ToolCall], Any]
_MARK = "__agentkv_tool__"


class Outcome(Frozen, frozen=True, kw_only=True):
    """What a call gave: the text for the model. error: the call failed, and content says how."""

    content: str
    error: bool = False


class Tool(Frozen, frozen=True, kw_only=True):
    """One tool. schema: OpenAI form. arguments: the type a call's arguments must have. function: None where only the schema
    is known."""

    name: str
    schema: dict[str, Any]
    arguments: Any
    function: Callable[..., Any] | None = None


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[F], F]: ...
def tool(function: F | None = None, /, *, name: str | None = None, description: str | None = None) -> F | Callable[[F], F]:
    """Mark a function as a tool, under another name or description if given; it stays an ordinary function.

    Functions need no mark to be passed as tools; this checks the signature where it is written.
    """

    def mark(target: F) -> F:
        setattr(target, _MARK, schema_of(target, name=name, description=description))
        return target

    return mark if function is None else mark(function)


class Toolbox:
    """Typed functions and OpenAI schemas, by name. `schemas` go into the prompt, `invoke` runs a call."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
            raise BadRequest(f"tools={tools!r}: a list of functions or OpenAI schemas", param="tools")
        for given in tools:
            made = given if isinstance(given, Tool) else _tool_of(given)
            if made.name in self._tools:
                raise BadRequest(f"two tools are called {made.name!r}", param="tools")
            self._tools[made.name] = made

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order given."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The OpenAI schemas, in the order given."""
        return [made.schema for made in self._tools.values()]

    @property
    def without_function(self) -> tuple[str, ...]:
        """Names of the tools that only an `execute=` can run."""
        return tuple(name for name, made in self._tools.items() if made.function is None)

    def with_functions(self, given: Toolbox) -> Toolbox:
        """The same tools, each with the function that `given` has for its name; schemas stay as they are here."""
        functions = {name: made for name, made in given._tools.items() if made.function is not None}
        return Toolbox(
            functions[name].replace(schema=made.schema) if name in functions else made for name, made in self._tools.items()
        )

    def call(self, call: ToolCall) -> str:
        """The text a call gives, error texts included."""
        return self.invoke(call).content

    def invoke(self, call: ToolCall, execute: Execute | None = None) -> Outcome:
        """Check the arguments and run the call. Whatever goes wrong inside becomes an error result, never an exception.

        execute: runs the tools that came as a schema only.
        """
        made = self._tools.get(call.name)
        if made is None:
            known = ", ".join(self._tools) or "none"
            return Outcome(content=f"UnknownTool: there is no tool {call.name!r}. Tools: {known}", error=True)
        try:
            checked = msgspec.convert(call.arguments, made.arguments)
        except msgspec.ValidationError as error:
            return Outcome(content=f"InvalidArguments: {call.name}: {error}", error=True)
        try:
            if made.function is not None:
                result = made.function(**_given(checked))
            elif execute is not None:
                result = execute(call)
            else:
                return Outcome(content=f"UnknownTool: nothing runs {call.name!r} here", error=True)
            if inspect.iscoroutine(result):
                result = _finish(result)
            return Outcome(content=as_text(result))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool is foreign code: a failure is for the model to read
            return Outcome(content=clean(f"{type(error).__name__}: {error}"), error=True)


def _tool_of(given: Any) -> Tool:
    if isinstance(given, Mapping):
        schema = _normal_schema(given)
        function = schema["function"]
        return Tool(name=function["name"], schema=schema, arguments=type_of(function.get("parameters")))
    if inspect.ismodule(given):  # `agentkv.tools.bash` names the module and its function alike
        given = getattr(given, given.__name__.rpartition(".")[2], given)
    if not callable(given):
        raise BadRequest(f"tools: {given!r} is neither a function nor an OpenAI schema", param="tools")
    marked: dict[str, Any] | None = getattr(given, _MARK, None)
    schema = schema_of(given) if marked is None else marked
    name = schema["function"]["name"]
    return Tool(name=name, schema=schema, arguments=arguments_type(given, name), function=given)


def _normal_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in the form {"type": "function", "function": {...}}; also takes the inner object alone."""
    try:
        schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given))
    except (TypeError, msgspec.MsgspecError) as error:
        raise BadRequest(f"tools: a schema is not JSON: {error}", param="tools") from None
    kind = schema.get("type", "function")
    if "function" not in schema and "name" in schema:
        schema = {"type": "function", "function": {key: value for key, value in schema.items() if key != "type"}}
    function = schema.get("function")
    if kind != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("tools: a schema needs type 'function' and a function with a name", param="tools")
    if not isinstance(function.get("parameters", {}), dict):
        raise BadRequest(f"tools: the parameters of {function['name']!r} are not an object", param="tools")
    checked_name(function["name"])
    return schema


def _given(checked: Any) -> dict[str, Any]:
    values = ((name, getattr(checked, name)) for name in checked.__struct_fields__)
    return {name: value for name, value in values if value is not msgspec.UNSET}


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run an async tool to its end, on a loop of its own; off this thread where a loop already runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    box: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            box.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return box[0]


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return clean(result)
    if isinstance(result, bytes | bytearray):
        return result.decode("utf-8", "replace")
    return msgspec.json.encode(result, enc_hook=str).decode()


def clean(text: str) -> str:
    """The text without lone surrogates (file names can hold them), which no encoding accepts."""
    return text.encode("utf-8", "replace").decode()
