"""New messages rendered by the model's chat template, with the exact tokens of each body; history is never re-rendered.

Each new content is wrapped in random marks, the template is applied, and its output is split at the marks: what lies between
two marks is a body and is encoded as plain text, so that a tool result which spells a special token cannot forge a frame;
everything else is a frame of the template. The messages already committed are replaced by short stand-ins that put the
template into the right state, and are cut off again.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from agentkv.dialogue import Message, Piece, Rendered
from agentkv.errors import BadRequest
from agentkv.types import Frozen, SpanKind, ToolCall

_SPECIAL_LOOKING = re.compile(r"[<\[|]")
_BODY_KINDS: dict[str, SpanKind] = {"tool": "tool_result", "assistant": "text", "system": "system", "developer": "system"}
_TRIMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.lstrip,
    str.rstrip,
    str.strip,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.strip("\n"),
)
# Not variables of a template: what agentkv sets itself, and options of the renderer (another template would be code to run).
_FIXED_ARGUMENTS = (
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "self", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "add_special_tokens", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "processor_kwargs",
)  # fmt: skip


class TemplateTokenizer(Protocol):
    """A model's tokenizer with its chat template."""

    @property
    def end_of_turn_id(self) -> int | None:
        """The token with which the template ends an assistant's message, None where it has none."""
        ...

    def apply_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **args: Any,
    ) -> str:
        """The template's text, special tokens spelled out."""
        ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text, nothing added. special: spelled special tokens become those tokens, else they stay text."""
        ...


class _Mark(Frozen, frozen=True, kw_only=True):
    """What one pair of marks encloses."""

    kind: SpanKind | None  # None: a string to be kept plain that is no piece of its own
    index: int | None = None
    call: ToolCall | None = None
    text: str = ""
    optional: bool = False
    standin: bool = False


class _Segment(Frozen, frozen=True, kw_only=True):
    """A stretch of rendered text: a body where `mark` is set, else a frame."""

    text: str
    mark: _Mark | None = None


class _CannotSplit(Exception):
    """The template did not give the marks back; the message says how."""


class _Marks:
    """Random marks around contents. Letters and digits only, so that JSON escaping leaves them alone."""

    def __init__(self) -> None:
        self._nonce = "Mk" + secrets.token_hex(10)
        self._made: list[_Mark] = []
        self._pattern = re.compile(self._nonce + r"x(\d+)([ab])z")

    def wrap(self, text: str, mark: _Mark) -> str:
        """The text between two new marks."""
        self._made.append(mark)
        number = len(self._made) - 1
        return f"{self._nonce}x{number}az{text}{self._nonce}x{number}bz"

    def guard(self, value: Any) -> Any:
        """A JSON value in which every string that could spell a special token is marked to stay plain."""
        if isinstance(value, str):
            return self.wrap(value, _Mark(kind=None, optional=True)) if _SPECIAL_LOOKING.search(value) else value
        if isinstance(value, Mapping):
            return {key: self.guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item) for item in value]
        return value

    def strip(self, value: Any) -> Any:
        """The value as it was before it was marked."""
        if isinstance(value, str):
            return self._pattern.sub("", value)
        if isinstance(value, dict):
            return {key: self.strip(item) for key, item in value.items()}
        return [self.strip(item) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> list[_Segment]:
        """Frames and bodies in order; raises _CannotSplit unless each mark came back once, paired and in order."""
        segments: list[_Segment] = []
        seen: list[int] = []
        at = 0
        opened: int | None = None
        for found in self._pattern.finditer(text):
            number, side = int(found[1]), found[2]
            if (side == "a") != (opened is None) or (side == "b" and number != opened):
                raise _CannotSplit("it mixes one content into another")
            mark = None if opened is None else self._made[opened]
            segments.append(_Segment(text=text[at : found.start()], mark=mark))
            opened = number if side == "a" else None
            if side == "a":
                seen.append(number)
            at = found.end()
        if opened is not None or self._nonce in text[at:]:
            raise _CannotSplit("it cuts into a content")
        segments.append(_Segment(text=text[at:]))
        required = [number for number, mark in enumerate(self._made) if not mark.optional]
        if [number for number in seen if not self._made[number].optional] != required or len(set(seen)) != len(seen):
            raise _CannotSplit("it drops, repeats or reorders contents")
        return segments


class _Variant(Frozen, frozen=True, kw_only=True):
    """One way to put the messages to a template; templates differ in what they accept.

    merge_system: the system text goes in front of the first user message. standin: how the last committed assistant message
    is played. split_think: a think block inside an assistant's content is passed as its reasoning.
    """

    merge_system: bool = False
    standin: Literal["plain", "calls", "one_call"] = "plain"
    split_think: bool = False


class Renderer:
    """Renders for one tokenizer. call_tags: what encloses a call in the template, so that its piece includes them."""

    def __init__(self, tokenizer: TemplateTokenizer, *, call_tags: tuple[str, str] = ("<tool_call>", "</tool_call>")) -> None:
        self._tokenizer = tokenizer
        self._call_tags = call_tags

    def render(
        self,
        messages: Sequence[Message],
        *,
        first: bool,
        closed: bool,
        system: str | None,
        tools: Sequence[dict[str, Any]],
        template_args: dict[str, Any],
    ) -> Rendered:
        """Ids of the new messages and the generation prompt, as `KVBackend.render` describes them."""
        clash = sorted(set(template_args) & set(_FIXED_ARGUMENTS))
        if clash:
            raise BadRequest(f"{clash[0]!r} is not a variable of the chat template: agentkv sets it", param=clash[0])
        reason = ""
        for variant in _variants(messages, first, system):
            job = _Job(self._tokenizer, messages, system, tools, template_args, variant)
            try:
                layout = job.head() if first else job.suffix(closed)
            except _CannotSplit as error:
                reason = reason or str(error)
            else:
                return layout.rendered(self._call_tags)
        raise BadRequest(
            f"the model's chat template cannot render these messages: {reason}",
            hint="Change the messages (their roles and order), or use a model whose template supports them",
        )


def _variants(messages: Sequence[Message], first: bool, system: str | None) -> Iterator[_Variant]:
    standins: tuple[Literal["plain", "calls", "one_call"], ...] = ("plain",)
    if not first and messages and messages[0].role == "tool":
        standins = ("calls", "one_call", "plain")
    thinks = any(message.role == "assistant" and "</think>" in message.content for message in messages)
    for split_think in (False, True) if thinks else (False,):
        for merge_system in (False, True) if system is not None else (False,):
            for standin in standins:
                yield _Variant(merge_system=merge_system, standin=standin, split_think=split_think)


class _Job:
    """One rendering in one variant."""

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        messages: Sequence[Message],
        system: str | None,
        tools: Sequence[dict[str, Any]],
        template_args: dict[str, Any],
        variant: _Variant,
    ) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._system = system
        self._tools = list(tools)
        self._args = template_args
        self._variant = variant
        self._marks = _Marks()

    def head(self) -> _Layout:
        """The whole prompt, when nothing precedes it."""
        system = None
        if self._system is not None:
            system = self._marks.wrap(self._system, _Mark(kind="system", text=self._system))
        rows = [self._row(index, message) for index, message in enumerate(self._messages)]
        if system is not None:
            if not self._variant.merge_system:
                rows.insert(0, {"role": "system", "content": system})
            elif rows and rows[0]["role"] == "user":
                gap = "\n\n" if self._system and self._system.strip() else ""
                rows[0]["content"] = f"{system}{gap}{rows[0]['content']}"
            else:
                raise _CannotSplit("it has no place for a system text")
        guarded = self._marks.guard(self._tools)
        segments = self._segments(rows, guarded)
        layout = _Layout(self._tokenizer, segments)
        if self._tools:
            layout.tools = _difference(layout.text, self._marks.strip(self._apply(rows, None)))
            if layout.tools[0] == layout.tools[1]:
                raise _CannotSplit("it ignores tools")
        return layout

    def suffix(self, closed: bool) -> _Layout:
        """What follows the last committed assistant message."""
        rows: list[dict[str, Any]] = [{"role": "user", "content": "x"}, self._standin()]
        if self._system is not None and not self._variant.merge_system:
            rows.insert(0, {"role": "system", "content": "x"})
        rows += [self._row(index, message) for index, message in enumerate(self._messages)]
        segments = self._segments(rows, self._marks.guard(self._tools))
        last = max((at for at, segment in enumerate(segments) if segment.mark and segment.mark.standin), default=None)
        if last is None:
            raise _CannotSplit("it drops an assistant message")
        frame = segments[last + 1].text
        end = self._tokenizer.end_of_turn_id

        def closes(length: int) -> bool:
            return end in self._tokenizer.encode(frame[:length], special=True)

        if end is None or not closes(len(frame)):
            raise _CannotSplit("it does not end an assistant message with the end-of-turn token")
        after = bisect_left(range(len(frame) + 1), True, key=closes)
        kept = [_Segment(text=frame[after:]), *segments[last + 2 :]]
        return _Layout(self._tokenizer, kept, [] if closed else [end])

    def _standin(self) -> dict[str, Any]:
        mark = _Mark(kind=None, optional=True, standin=True)
        row: dict[str, Any] = {"role": "assistant", "content": self._marks.wrap("x", mark)}
        if self._variant.standin == "plain":
            return row
        leading: list[Message] = []
        for message in self._messages:
            if message.role != "tool" or (leading and self._variant.standin == "one_call"):
                break
            leading.append(message)
        row["tool_calls"] = [
            _call_row(message.call_id or "", message.name or "tool", {"x": self._marks.wrap("x", mark)}) for message in leading
        ]
        return row

    def _row(self, index: int, message: Message) -> dict[str, Any]:
        """One new message as the template takes it, its contents marked."""
        wrap = self._marks.wrap
        kind = _BODY_KINDS.get(message.role, "user")
        if message.role != "assistant":
            row = {"role": message.role, "content": wrap(message.content, _Mark(kind=kind, index=index, text=message.content))}
            if message.role == "tool":
                row |= {"tool_call_id": message.call_id or "", "name": message.name or "tool"}
            return row
        reasoning, content = message.reasoning, message.content
        if self._variant.split_think and not reasoning:
            before, _, content = content.rpartition("</think>")
            reasoning, content = before.strip().removeprefix("<think>").strip("\n"), content.lstrip("\n")
        row = {"role": "assistant", "content": ""}
        if reasoning:
            row["reasoning_content"] = wrap(reasoning, _Mark(kind="reasoning", index=index, text=reasoning, optional=True))
        if content:
            optional = bool(message.tool_calls)  # several templates drop the text beside calls
            row["content"] = wrap(content, _Mark(kind=kind, index=index, text=content, optional=optional))
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                name = wrap(call.name, _Mark(kind="tool_call", index=index, call=call, text=call.raw))
                calls.append(_call_row(call.id, name, self._marks.guard(call.arguments)))
            return row | {"tool_calls": calls}
        return row

    def _apply(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            return self._tokenizer.apply_template(rows, tools=tools or None, add_generation_prompt=True, **self._args)
        except Exception as error:  # a template is foreign code and may raise anything
            raise _CannotSplit(f"{type(error).__name__}: {error}") from error

    def _segments(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[_Segment]:
        segments = self._marks.split(self._apply(rows, tools))
        if any(segment.mark and segment.text != segment.text.strip() for segment in segments):
            plain = self._apply(self._marks.strip(rows), self._marks.strip(tools))
            return _trimmed(segments, plain) or segments
        return segments


def _call_row(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _trimmed(segments: list[_Segment], plain: str) -> list[_Segment] | None:
    """The segments with each body trimmed as the template does without marks (marks keep it from seeing the blanks)."""
    out: list[_Segment] = []
    at = 0
    for number, segment in enumerate(segments):
        options = [segment.text] if segment.mark is None else sorted((trim(segment.text) for trim in _TRIMS), key=len)[::-1]
        follow = segments[number + 1].text if number + 1 < len(segments) and segments[number + 1].mark is None else ""
        for text in options:
            if plain.startswith(text + follow, at):
                break
        else:
            return None
        out.append(segment.replace(text=text))
        at += len(text)
    return out if at == len(plain) else None


def _difference(text: str, without: str) -> tuple[int, int]:
    """The stretch of `text` that is not in `without`: between their common beginning and their common end."""
    short = min(len(text), len(without))
    start = bisect_left(range(1, short + 1), True, key=lambda size: text[:size] != without[:size])
    end = bisect_left(range(1, short - start + 1), True, key=lambda size: text[-size:] != without[-size:])
    return start, len(text) - end


class _Layout:
    """Segments, the tokens they become, and where the pieces lie in them."""

    def __init__(self, tokenizer: TemplateTokenizer, segments: list[_Segment], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._segments = segments
        self.text = "".join(segment.text for segment in segments)
        self.tools: tuple[int, int] | None = None
        self._ids = list(before)
        self._starts: list[tuple[int, int]] = []  # of each segment: (character, token)
        at = 0
        for segment in segments:
            self._starts.append((at, len(self._ids)))
            self._ids.extend(tokenizer.encode(segment.text, special=segment.mark is None))
            at += len(segment.text)

    def rendered(self, call_tags: tuple[str, str]) -> Rendered:
        """The ids with their pieces in order."""
        pieces: list[Piece] = []
        for number, (segment, (_, token)) in enumerate(zip(self._segments, self._starts, strict=True)):
            mark = segment.mark
            if mark is None or mark.kind is None:
                continue
            start, end = token, self._starts[number + 1][1]  # a frame, at least an empty one, follows every body
            if mark.kind == "tool_call":
                start, end = self._call(number, call_tags)
            pieces.append(Piece(kind=mark.kind, start=start, end=end, index=mark.index, call=mark.call, text=mark.text))
        if self.tools is not None:
            pieces.append(Piece(kind="tools", start=self._token(self.tools[0]), end=self._token(self.tools[1])))
        return Rendered(ids=self._ids, pieces=tuple(sorted(pieces, key=lambda piece: (piece.start, piece.end))))

    def _call(self, number: int, call_tags: tuple[str, str]) -> tuple[int, int]:
        """The tokens of the call whose name is that segment: from its opening to its closing tag, where there are any."""
        opened = self._segments[number - 1].text.rfind(call_tags[0])
        start = self._starts[number][0] if opened < 0 else self._starts[number - 1][0] + opened
        end = self._starts[number + 1][0]
        for at in range(number + 1, len(self._segments)):
            segment = self._segments[at]
            if segment.mark is not None and segment.mark.kind is not None:
                break
            closed = segment.text.find(call_tags[1]) if segment.mark is None else -1
            if closed >= 0:
                end = self._starts[at][0] + closed + len(call_tags[1])
                break
            if segment.mark is not None:
                end = self._starts[at + 1][0]
        return self._token(start), self._token(end)

    def _token(self, char: int) -> int:
        """The token that begins at this character of the text."""
        number = bisect_left(self._starts, char + 1, key=lambda start: start[0]) - 1
        segment, (begin, token) = self._segments[number], self._starts[number]
        return token + len(self._tokenizer.encode(segment.text[: char - begin], special=segment.mark is None))
