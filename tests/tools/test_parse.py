"""Any split of an output into deltas gives the same events as the whole, and never half a tool call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentkv.errors import UnknownOption
from agentkv.tools.parse import FORMATS, Reading, StreamParser, new_call_id, read_text
from agentkv.types import ToolCall

GOOD = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TRICKY = '<tool_call>{"name": "w", "arguments": {"t": "a </tool_call> \\" <tool_call> \\\\"}}</tool_call>'
BROKEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>'
LOST_QUOTE = '<tool_call>\n{"name": "bash, "arguments": {"command": "ls}}\n</tool_call>'
FRAGMENTS = [
    GOOD, TRICKY, BROKEN, LOST_QUOTE, "<tool_call>", "</tool_call>", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "\n",
    " ", "<tool_", "<", "th", "text", "Let me look.", '{"name": "x"', '"', "\\", "}", "é🙂", "\n\n", "<tool_call", "call>",
]  # fmt: skip
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)
ends = st.sampled_from([("stop", None), ("length", None), ("stop", True), ("cancelled", None)])


def options(**more: Any) -> dict[str, Any]:
    count = iter(range(1000))
    return {"call_id": lambda: f"call_{next(count)}", **more}


def events(text: str, cuts: list[int], end: tuple[Any, Any], **more: Any) -> tuple[list[Any], Reading]:
    """Deltas with neighbours of one kind joined, and the reading."""
    parser = StreamParser(**options(**more))
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    deltas = [delta for a, b in pairwise(edges) for delta in parser.push(text[a:b])]
    deltas += parser.flush(end[0], cut=end[1])
    joined: list[Any] = []
    for delta in deltas:
        kind, value = (
            ("call", delta.call) if delta.call else ("text", delta.text) if delta.text else ("reasoning", delta.reasoning)
        )
        assert value
        if joined and joined[-1][0] == kind and kind != "call":
            joined[-1] = (kind, joined[-1][1] + value)
        else:
            joined.append((kind, value))
    return joined, parser.reading


@settings(max_examples=500, deadline=None)
@given(text=outputs, cuts=st.lists(st.integers(0, 500), max_size=30), end=ends, tools=st.booleans(), thinking=st.booleans())
@example(text=GOOD, cuts=list(range(200)), end=("stop", None), tools=True, thinking=False)
@example(text=TRICKY + GOOD, cuts=list(range(200)), end=("stop", None), tools=True, thinking=False)
def test_streamed_is_whole(text: str, cuts: list[int], end: Any, tools: bool, thinking: bool) -> None:
    streamed, reading = events(text, cuts, end, tools=tools, thinking=thinking)
    whole, whole_reading = events(text, [], end, tools=tools, thinking=thinking)
    single, single_reading = events(text, list(range(len(text))), end, tools=tools, thinking=thinking)
    assert streamed == whole == single
    assert reading == whole_reading == single_reading
    assert "".join(value for kind, value in whole if kind == "text") == reading.text
    assert "".join(value for kind, value in whole if kind == "reasoning") == reading.reasoning
    assert [value for kind, value in whole if kind == "call"] == list(reading.tool_calls)


@settings(max_examples=300, deadline=None)
@given(text=outputs, end=ends, tools=st.booleans(), thinking=st.booleans())
def test_nothing_but_separators_and_half_calls_is_dropped(text: str, end: Any, tools: bool, thinking: bool) -> None:
    _, reading = events(text, [], end, tools=tools, thinking=thinking)
    at = 0
    for piece in reading.pieces:
        assert at <= piece.start < piece.end <= reading.keep
        assert text[at : piece.start].strip() == ""
        if piece.kind != "reasoning":
            assert text[piece.start : piece.end] == piece.text
        at = piece.end
    assert text[at : reading.keep].strip() == ""
    if reading.keep < len(text):
        assert end != ("stop", None)
        assert text.startswith("<tool_", reading.keep)
    if not tools:
        assert reading.tool_calls == ()
        assert reading.keep == len(text)


def call(name: str = "bash", raw: str = '{"command": "ls"}', number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments or {"command": "ls"}, raw=raw)


def read(text: str, **more: Any) -> Reading:
    return read_text(text, **options(**more))


def test_a_call_alone_has_no_text() -> None:
    assert read("\n" + GOOD + "\n").text == ""
    assert read(GOOD).tool_calls == (call(),)


def test_text_reasoning_and_several_calls() -> None:
    reading = read("<think>\nhm\n</think>\n\nLet me look.\n" + GOOD + "\n" + GOOD)
    assert (reading.text, reading.reasoning) == ("Let me look.", "hm")
    assert reading.tool_calls == (call(), call(number=1))
    assert [piece.kind for piece in reading.pieces] == ["reasoning", "text", "tool_call", "tool_call"]
    assert reading.pieces[2].call == call()


def test_raw_arguments_are_kept_as_written() -> None:
    raw = '{"a":"x",  "b": 1.50, "c": [1,{"d":null}]}'
    reading = read('<tool_call>{"arguments": ' + raw + ', "name": "f"}</tool_call>')
    assert reading.tool_calls == (
        ToolCall(id="call_0", name="f", arguments={"a": "x", "b": 1.5, "c": [1, {"d": None}]}, raw=raw),
    )
    twice = read('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert (twice.tool_calls[0].arguments, twice.tool_calls[0].raw) == ({"a": 1}, '{"a": 1}')
    assert read('<tool_call>{"name": "f"}</tool_call>').tool_calls[0].arguments == {}


@pytest.mark.parametrize(
    "body",
    [
        "", "{}", "[]", "null", '{"name": "", "arguments": {}}', '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {}} {}', '{"name": "f", "arguments": {"a": "\\ud800 "}}', '{"name": "f" "arguments": {}}',
        '{"name": "f", "arguments": ' + "[" * 5000 + "}",
    ],
)  # fmt: skip
def test_a_closed_call_that_is_not_one_stays_as_text(body: str) -> None:
    text = f"a\n<tool_call>{body}</tool_call>"
    reading = read(text + "\n" + GOOD)
    assert reading.text == text
    assert reading.tool_calls == (call(),)


def test_a_lost_quote_does_not_hide_the_next_call() -> None:
    reading = read(LOST_QUOTE + "\n" + GOOD)
    assert reading.text == LOST_QUOTE
    assert reading.tool_calls == (call(),)


def test_a_lost_closing_tag() -> None:
    unclosed = GOOD.removesuffix("</tool_call>")
    assert read(unclosed).tool_calls == (call(),)  # the model ended its turn there
    assert read(unclosed + GOOD).tool_calls == (call(), call(number=1))
    half = GOOD[:30]
    assert read("a " + half).text == "a " + half


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_cut_call_is_rolled_back(reason: Any) -> None:
    for size in range(len("<tool_"), len(GOOD)):
        reading = read("Look.\n" + GOOD + "\n" + GOOD[:size], finish_reason=reason)
        assert reading.tool_calls == (call(),)
        assert reading.keep == len("Look.\n" + GOOD + "\n")
        assert reading.text == "Look."
    assert read("1 <", finish_reason=reason).text == "1 <"


def test_thinking() -> None:
    assert read("hm\n</think>\n\nyes", thinking=True).reasoning == "hm"
    assert read("hm\n</think>\n\nyes", thinking=True).text == "yes"
    unclosed = read("<think>\nhm\n" + GOOD, finish_reason="length")
    assert (unclosed.reasoning, unclosed.text, unclosed.tool_calls) == ("hm\n" + GOOD, "", ())
    assert unclosed.keep == len("<think>\nhm\n" + GOOD)
    assert read("Say <think> twice").text == "Say <think> twice"
    assert read("", thinking=True).pieces == ()
    assert read("<think>\n\n</think>\n\nyes").text == "yes"


def test_outer_whitespace_of_an_answer_stays() -> None:
    assert read("\n  hello \n").text == "\n  hello \n"
    assert read(" \n").text == " \n"


def test_without_tools_calls_are_text() -> None:
    reading = read(GOOD, tools=False)
    assert (reading.text, reading.tool_calls) == (GOOD, ())


def test_ids_are_unguessable_and_formats_named() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(bytes.fromhex(made.removeprefix("call_"))) * 8 >= 96 for made in ids)
    assert "hermes" in FORMATS
    with pytest.raises(UnknownOption, match="xml"):
        StreamParser(format="xml")


def parsed(tokens: list[str], reason: Any = "stop", **more: Any) -> Any:
    parser = StreamParser(**options())
    for token in tokens:
        parser.push(token)
    return parser.parsed(list(range(100, 100 + len(tokens))), tokens, reason, **more)


def test_pieces_in_tokens() -> None:
    tokens = [
        "Let ",
        "me.",
        "\n",
        "<tool_call>",
        '\n{"name": "bash", ',
        '"arguments": {"command": "ls"}}',
        "\n",
        "</tool_call>",
        "",
    ]
    result = parsed(tokens)
    assert [(piece.kind, piece.start, piece.end) for piece in result.pieces] == [("text", 0, 2), ("tool_call", 3, 8)]
    assert result.ids == list(range(100, 109))
    assert result.finish_reason == "tool_calls"
    cut = parsed(tokens[:6], "length")
    assert (cut.ids, cut.finish_reason, cut.text, cut.tool_calls) == ([100, 101, 102], "length", "Let me.\n", ())


def test_bytes_of_one_character_belong_to_its_piece() -> None:
    tokens = ["", "", "", "🙂", "", "é", "<tool_call>", "x", "</tool_call>"]
    result = parsed(tokens)
    assert [(piece.kind, piece.start, piece.end) for piece in result.pieces] == [("text", 0, 9)]
    tokens = ["<think>", "", "é", "</think>", "\n", "", "ß", ""]
    result = parsed(tokens)
    assert [(piece.kind, piece.start, piece.end) for piece in result.pieces] == [("reasoning", 0, 4), ("text", 5, 7)]


def test_a_half_call_inside_a_token() -> None:
    result = parsed(["a", "b <tool_c", "all>{"], "length", encode=lambda text: [ord(c) for c in text])
    assert result.ids == [100, ord("b"), ord(" ")]
    assert result.text == "ab "
    assert [(piece.start, piece.end) for piece in result.pieces] == [(0, 2)]


@settings(max_examples=300, deadline=None)
@given(text=outputs, cuts=st.lists(st.integers(0, 500), max_size=30), end=ends)
def test_token_pieces_are_disjoint_and_inside(text: str, cuts: list[int], end: Any) -> None:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    tokens = [text[a:b] for a, b in pairwise(edges)]
    result = parsed(tokens, end[0], cut=end[1], encode=lambda rest: [7] * len(rest))
    at = 0
    for piece in result.pieces:
        assert at <= piece.start <= piece.end <= len(result.ids)
        at = piece.end
