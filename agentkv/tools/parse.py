"""A model's output text read as reasoning, visible text and tool calls, the same for any split of it into deltas.

Every rule looks at the text only where the answer can no longer change, so a stream and its whole give one result.
What a reading yields are slices of the text, so each piece has exact offsets.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol

import msgspec

from agentkv.dialogue import Delta, Parsed, Piece
from agentkv.errors import UnknownOption
from agentkv.types import FinishReason, Frozen, ToolCall

THINK, END_THINK = "<think>", "</think>"
BLANK = " \t\r\n"
_TEXT = re.compile(r"[^ \t\r\n]")
_TELLING = 6
"""A truncated answer ending in this many characters of a call's opening tag was beginning a call."""


def new_call_id() -> str:
    """An id nobody can guess (128 random bits): it also proves which chain a result belongs to."""
    return "call_" + secrets.token_hex(16)


class CallFormat(Protocol):
    """How a model family writes a call: two tags, and the body between them.

    A closing tag inside a JSON string of the body does not close the call.
    """

    open: str
    close: str
    between: str
    """Text between two calls."""

    def frame(self, name: str) -> tuple[str, str]:
        """The text of a call of that function before and after its arguments, as the templates write it."""
        ...

    def read(self, body: str) -> tuple[str, dict[str, Any], str] | None:
        """(name, arguments, the arguments as written), or None when the body is not a call."""
        ...


class _HermesBody(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Hermes:
    """`<tool_call>` + `{"name": ..., "arguments": {...}}` + `</tool_call>`: Qwen, Hermes, micro."""

    open = "<tool_call>"
    close = "</tool_call>"
    between = "\n"

    def frame(self, name: str) -> tuple[str, str]:
        """Tags and JSON on lines of their own."""
        head = msgspec.json.encode(name).decode()
        return f'{self.open}\n{{"name": {head}, "arguments": ', f"}}\n{self.close}"

    def read(self, body: str) -> tuple[str, dict[str, Any], str] | None:
        """The one JSON object of the body; strict JSON, nothing after it."""
        try:
            call = msgspec.json.decode(body, type=_HermesBody)
            raw = bytes(call.arguments).decode()
            if raw.startswith('"'):  # some models encode the object twice
                raw = msgspec.json.decode(raw, type=str)
            arguments = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return (call.name, arguments, raw) if call.name else None


FORMATS: dict[str, Callable[[], CallFormat]] = {"hermes": Hermes}


def call_format(name: str) -> CallFormat:
    """The call format of that name."""
    if name not in FORMATS:
        raise UnknownOption(f"unknown tool call format {name!r}", hint=f"Known: {', '.join(sorted(FORMATS))}", param="format")
    return FORMATS[name]()


def opens_thinking(prompt_tail: str) -> bool:
    """Does a generation prompt end inside a think block, so that the output starts with reasoning?"""
    return prompt_tail.rstrip().endswith(THINK)


class Reading(Frozen, frozen=True, kw_only=True):
    """What a text was read as. Pieces count characters; keep: characters that stay (a half call at the end goes)."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    pieces: tuple[Piece, ...]
    keep: int


class StreamParser:
    """Reads an output as it arrives: `push` each delta, `flush` at the end, then `reading` or `parsed`.

    tools: False leaves calls as plain text. thinking: the prompt already opened the think block.
    """

    def __init__(
        self,
        *,
        tools: bool = True,
        thinking: bool = False,
        format: str = "hermes",
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = call_format(format)
        self._tools = tools
        self._call_id = call_id
        self._marks = re.compile("|".join(map(re.escape, ('"', "\\", self._format.open, self._format.close))))
        self._text = ""
        self._at = 0  # everything before is decided
        self._mode: Literal["content", "think", "call"] = "think" if thinking else "content"
        self._last: Literal["nothing", "text", "think", "call"] = "nothing"
        self._pieces: list[Piece] = []
        self._reasoning = ""
        self._think_start = 0
        self._keep: int | None = None
        self._out: list[Delta] = []
        self._flushed = False
        # of the open call
        self._call_start = 0
        self._scan = 0
        self._in_string = False
        self._quoted_close: int | None = None

    def push(self, text: str) -> list[Delta]:
        """Take more output; returns what can no longer change."""
        if self._flushed or not text:
            return []
        self._text += text
        return self._drain(final=False, cut=False)

    def flush(self, finish_reason: FinishReason, *, cut: bool | None = None) -> list[Delta]:
        """The output has ended; returns what was held back.

        cut: the text was cut off (by length, a stop string or cancelling; default: any reason but 'stop'). Then a call that
        is not closed is rolled back. Otherwise the model ended the turn itself: a complete call without its closing tag
        counts, and a broken one stays as text.
        """
        if self._flushed:
            return []
        self._flushed = True
        return self._drain(final=True, cut=finish_reason not in ("stop", "tool_calls") if cut is None else cut)

    def _drain(self, *, final: bool, cut: bool) -> list[Delta]:
        step = {"content": self._content, "think": self._think, "call": self._call}
        while self._keep is None and self._at < len(self._text) and step[self._mode](final, cut):
            pass
        if final and self._mode == "think":
            self._close_think(len(self._text))
        out, self._out = self._out, []
        return out

    # Each step decides one stretch of text and returns True, or returns False when it must see more (or all is decided).

    def _content(self, final: bool, cut: bool) -> bool:
        text, start = self._text, self._at
        found = _TEXT.search(text, start)
        if found is None:
            if final:
                self._end_content(start, len(text))
            return False
        first = found.start()
        may_think = self._last == "nothing"
        if self._tools and text.startswith(self._format.open, first):
            self._enter_call(first)
            return True
        if may_think and text.startswith(THINK, first):
            self._mode, self._think_start, self._at = "think", first, first + len(THINK)
            return True
        rest = text[first : first + max(len(THINK), len(self._format.open))]
        opening = self._tools and self._format.open.startswith(rest)
        if not final and (opening or (may_think and THINK.startswith(rest))):
            return False
        if final and cut and opening and len(rest) >= _TELLING:
            self._end_content(start, first)
            self._keep = first
            return False
        bracket = text.find("<", first + 1)
        stretch = text[first : bracket if bracket >= 0 else len(text)]
        self._emit_text(start, first + max(1, len(stretch.rstrip(BLANK))))
        return True

    def _end_content(self, start: int, end: int) -> None:
        """Blanks at the end belong to text; after a call or a think block they are only separators."""
        if self._last in ("text", "nothing") and end > start:
            self._emit_text(start, end)
        self._at = end

    def _think(self, final: bool, cut: bool) -> bool:
        close = self._text.find(END_THINK, self._at)
        limit = close if close >= 0 else len(self._text)
        if close < 0 and not final:
            limit -= _overlap(self._text, END_THINK, self._at)
        start = self._at
        if not self._reasoning:
            start += len(self._text[start:limit]) - len(self._text[start:limit].lstrip("\n"))
        end = start + len(self._text[start:limit].rstrip("\n"))
        if end > start:
            self._reasoning += self._text[start:end]
            self._out.append(Delta(reasoning=self._text[start:end]))
        self._at = max(start, end)
        if close < 0:
            return False
        self._close_think(close + len(END_THINK))
        return True

    def _close_think(self, end: int) -> None:
        if end > self._think_start:
            self._pieces.append(Piece(kind="reasoning", start=self._think_start, end=end, text=self._reasoning))
        self._mode, self._last, self._at = "content", "think", end

    def _enter_call(self, start: int) -> None:
        self._mode, self._call_start = "call", start
        self._scan = start + len(self._format.open)
        self._in_string, self._quoted_close = False, None

    def _call(self, final: bool, cut: bool) -> bool:
        body = self._call_start + len(self._format.open)
        end = self._scan_call()
        if end is not None:  # closed, or the next call opens
            tag = len(self._format.close) if self._text.startswith(self._format.close, end) else 0
            return self._finish_call(body, end, end + tag)
        if not final:
            return False
        if cut:
            self._end_content(self._at, self._call_start)
            self._keep = self._call_start
            return False
        if self._quoted_close is not None:  # a lost quote hid the closing tag
            return self._finish_call(body, self._quoted_close, self._quoted_close + len(self._format.close))
        return self._finish_call(body, len(self._text), len(self._text))

    def _scan_call(self) -> int | None:
        """Where the body ends: the first tag outside of a JSON string; None while it is not in sight."""
        text = self._text
        while (mark := self._marks.search(text, self._scan)) is not None:
            found = mark.group()
            if found == '"':
                self._in_string = not self._in_string
            elif found == "\\":
                if self._in_string:
                    if mark.end() == len(text):
                        return None
                    self._scan = mark.end() + 1
                    continue
            elif not self._in_string:
                return mark.start()
            elif found == self._format.close and self._quoted_close is None:
                self._quoted_close = mark.start()
            self._scan = mark.end()
        longest = max(len(self._format.open), len(self._format.close))
        self._scan = max(self._scan, len(text) - longest + 1)
        return None

    def _finish_call(self, body: int, body_end: int, end: int) -> bool:
        read = self._format.read(self._text[body:body_end])
        self._mode = "content"
        if read is None:
            self._emit_text(self._at, end)
            return True
        end = max(self._call_start + len(self._text[self._call_start : end].rstrip(BLANK)), body)
        call = ToolCall(id=self._call_id(), name=read[0], arguments=read[1], raw=read[2])
        self._pieces.append(
            Piece(kind="tool_call", start=self._call_start, end=end, call=call, text=self._text[self._call_start : end])
        )
        self._out.append(Delta(call=call))
        self._last, self._at = "call", end
        return True

    def _emit_text(self, start: int, end: int) -> None:
        """Make [start, end) visible; blanks right after a think block are its separator."""
        if self._last == "think":
            start += len(self._text[start:end]) - len(self._text[start:end].lstrip(BLANK))
        if end > start:
            added = self._text[start:end]
            self._out.append(Delta(text=added))
            if self._last == "text":
                self._pieces[-1] = self._pieces[-1].replace(end=end, text=self._pieces[-1].text + added)
            else:
                self._pieces.append(Piece(kind="text", start=start, end=end, text=added))
            self._last = "text"
        self._at = end

    @property
    def decided(self) -> int:
        """Characters of the text whose meaning can no longer change."""
        return self._at

    @property
    def reading(self) -> Reading:
        """What was read so far; complete after `flush`."""
        return Reading(
            text="".join(piece.text for piece in self._pieces if piece.kind == "text"),
            reasoning=self._reasoning,
            tool_calls=tuple(piece.call for piece in self._pieces if piece.call is not None),
            pieces=tuple(self._pieces),
            keep=len(self._text) if self._keep is None else self._keep,
        )

    def parsed(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        finish_reason: FinishReason,
        *,
        cut: bool | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> Parsed:
        """The reading in tokens. texts: what each id added to the text (a byte of an unfinished character adds nothing).

        encode: used where a half call begins inside a token, to keep the part before it.
        """
        self.flush(finish_reason, cut=cut)
        reading = self.reading
        tokens = _Tokens(texts)
        pieces: list[Piece] = []
        done = 0
        for piece in reading.pieces:
            start = max(done, tokens.first(piece.start))
            done = max(start, tokens.after(piece.end))
            pieces.append(piece.replace(start=start, end=done))
        kept = list(ids)
        if self._keep is not None:
            count, left = tokens.before(self._keep)
            kept = kept[:count]
            if left and encode is not None:
                kept += encode(self._text[self._keep - left : self._keep])
        if reading.tool_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        return Parsed(
            text=reading.text,
            reasoning=reading.reasoning,
            tool_calls=reading.tool_calls,
            pieces=tuple(piece.replace(start=min(piece.start, len(kept)), end=min(piece.end, len(kept))) for piece in pieces),
            ids=kept,
            finish_reason=finish_reason,
        )


class _Tokens:
    """Where characters lie in tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._ends = list(accumulate(map(len, texts)))

    def first(self, char: int) -> int:
        """The first token that holds a part of that character (its first bytes may be tokens of their own)."""
        token = bisect_right(self._ends, char)
        while token > 0 and not self._texts[token - 1]:
            token -= 1
        return token

    def after(self, char: int) -> int:
        """The token after the one that completes the text before `char`."""
        return min(bisect_left(self._ends, char) + 1, len(self._ends))

    def before(self, char: int) -> tuple[int, int]:
        """How many tokens end at or before `char`, and how many characters lie between their end and `char`."""
        token = self.first(char)
        return token, char - (self._ends[token - 1] if token else 0)


def _overlap(text: str, tag: str, start: int) -> int:
    """Length of the longest end of text[start:] that begins `tag`."""
    for length in range(min(len(tag) - 1, len(text) - start), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def read_text(text: str, *, finish_reason: FinishReason = "stop", **options: Any) -> Reading:
    """Read a whole output at once; options are StreamParser's."""
    parser = StreamParser(**options)
    parser.push(text)
    parser.flush(finish_reason)
    return parser.reading
