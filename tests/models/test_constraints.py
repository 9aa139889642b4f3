"""The grammar of a whole output: reasoning, then a text of the form or calls in the model's dialect, as the parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv.constraint import Constraint, read_constraint
from agentkv.engine.grammar import GrammarCompiler
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import BadRequest
from agentkv.runtime_constraint import Constraints
from agentkv.runtime_engine import model_path
from agentkv.tools.parse import StreamParser, call_format

NUMBER = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 10, "maximum": 20}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "go", "parameters": {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}}},
    },
    {"type": "function", "function": {"name": 'odd "name"'}},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("micro"))


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def accepts(tokenizer: Tokenizer, constraint: Constraint | None, text: str, *, thinks: bool, thinking: bool) -> bool:
    """May the model say exactly this, and then end?"""
    assert constraint is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    mask = Constraints(compiler, call_format("hermes"), thinks=thinks).mask(constraint, thinking=thinking)
    ids = [*tokenizer.encode(text, special=True), next(iter(tokenizer.eos_ids))]
    return all(mask(ids[:at])[token // 32] >> token % 32 & 1 for at, token in enumerate(ids))


@pytest.mark.parametrize(
    ("choice", "form", "text", "fits"),
    [
        ("none", NUMBER, "12", True),
        ("none", NUMBER, "9", False),
        ("none", NUMBER, call("go", to="a"), False),
        ("auto", NUMBER, "12", True),
        ("auto", NUMBER, call("go", to="a"), True),
        ("required", None, "12", False),
        ("required", None, call("go", to="a"), True),
        ("required", None, call("go", to="c"), False),
        ("required", None, call("stop"), False),
        ("required", None, call("go", to="a") + "\n" + call('odd "name"', x=[1, {}]), True),
        ({"type": "required", "parallel": False}, None, call("go", to="a") + "\n" + call("go", to="b"), False),
        ({"type": "function", "function": {"name": "go"}}, None, call("go"), True),
        ({"type": "function", "function": {"name": "go"}}, None, call('odd "name"'), False),
        ({"type": "function", "function": {"name": "go"}}, None, call("go") + "\n" + call("go"), False),
    ],
)
def test_what_may_be_said(tokenizer: Tokenizer, choice: Any, form: Any, text: str, fits: bool) -> None:
    constraint = read_constraint(choice, form, TOOLS)
    for thinks, thinking, before, may in (
        (False, False, "", True),
        (False, False, "<think>\nhm</think>\n\n", False),
        (True, False, "", True),
        (True, False, "<think>\nhm, a < b </thin\n</think>\n\n", True),
        (True, True, "so {it} is\n</think>\n\n", True),
        (True, True, "", False),
    ):
        said = accepts(tokenizer, constraint, before + text, thinks=thinks, thinking=thinking)
        assert said == (fits and may), (thinks, thinking, before)
        if said and "tool_call" in text:
            parser = StreamParser(thinking=thinking)
            parser.push(before + text)
            parser.flush("stop")
            assert len(parser.reading.tool_calls) == text.count("</tool_call>")
            assert not parser.reading.text


@pytest.mark.parametrize("form", [{"type": "regex", "pattern": "\ud800"}, {"type": "grammar", "grammar": 'start: "\ud800"'}])
def test_half_a_character_is_no_form(form: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        read_constraint("auto", form, [])


def test_nothing_is_constrained_where_nothing_is_asked() -> None:
    for choice in (None, "auto", "none"):
        for form in (None, "text", {"type": "text"}):
            assert read_constraint(choice, form, TOOLS) is None
