"""Constrained drawing under random logits: what comes out is judged by the jsonschema library, `re` and a parser."""

from __future__ import annotations

import ast
import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest
import torch
from random_schemas import SchemaMaker

from agentkv.constraint import Form
from agentkv.engine import grammar as grammars
from agentkv.engine.core import GRANULE, Batch, EngineConfig, KVGroup, Request, Sequence
from agentkv.engine.form import Form as KVForm
from agentkv.engine.grammar import Grammar, GrammarCompiler
from agentkv.engine.llm import LLM
from agentkv.engine.sampler import sample
from agentkv.engine.tokenizer import Tokenizer
from agentkv.engine.work import Slot
from agentkv.errors import BadRequest
from agentkv.runtime_engine import model_path
from agentkv.types import Sampling

ROWS = 32
WORDS = (
    *('{"', '"}', '":', '": "', '", "', '",', "[]", "[{", "}]", "true", "false", "null", "12", "0.5", " the", "name"),
    *("ä", "€", "日本", " \n", "\n\n   ", '"a"'),
)


class Merged:
    """The bundled byte vocabulary with words of several bytes, halves of characters among them, and ids without a text."""

    def __init__(self, inner: Tokenizer) -> None:
        self.eos_ids = inner.eos_ids
        self.inner = inner
        words = [word.encode() for word in WORDS] + ["é".encode()[:1] + b"", "日".encode()[:2], "日".encode()[2:] + b'"']
        self.words = dict(enumerate(words, start=inner.vocab_size))
        self.vocab_size = inner.vocab_size + len(words) + 7

    def token_bytes(self, token: int) -> bytes | None:
        if token in self.words:
            return self.words[token]
        return self.inner.token_bytes(token) if token < self.inner.vocab_size else None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.inner.encode(text, special=special)

    def text(self, ids: list[int]) -> str:
        parts = [self.token_bytes(token) for token in ids if token not in self.eos_ids]
        assert None not in parts
        return b"".join(part for part in parts if part).decode()


class RandomRunner:
    """Implements `runner_protocol.Runner`: random logits for every draw, and the real sampler."""

    groups = (KVGroup((0,), num_kv_heads=1, head_dim=128, itemsize=2, page_size=512),)
    forms = (KVForm((0,)),)
    num_granules = 4096 * (groups[0].stripe_bytes // GRANULE)
    ahead = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(7)

    def execute(self, batch: Batch) -> list[int | None]:
        asking = [work for work in batch.rows if work.sample]
        logits = torch.randn(len(asking), self.vocab_size, generator=self.generator) * 2
        drawn = iter(sample(logits, asking).tolist() if asking else [])
        return [next(drawn) if work.sample else None for work in batch.rows]

    def move_slots(self, source: list[Slot], target: list[Slot], group: int = 0) -> None:
        pass

    def move_units(self, unit_bytes: int, source: list[int], target: list[int]) -> None:
        pass

    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        raise NotImplementedError("no warm memory here")

    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        raise NotImplementedError("no warm memory here")


@pytest.fixture(scope="module")
def words() -> Merged:
    return Merged(Tokenizer.load(model_path("micro")))


@pytest.fixture(scope="module")
def compiler(words: Merged) -> GrammarCompiler:
    return GrammarCompiler(words, words.vocab_size)


def whole(form: Form) -> Grammar:
    return Grammar("start: @form\n", (("form", form),))


def schema_form(schema: Any) -> Grammar:
    return whole(Form(kind="json", text=json.dumps(schema)))


def drawn(words: Merged, compiler: GrammarCompiler, forms: list[Grammar], **options: Any) -> list[Sequence]:
    """A finished sequence for each grammar, many rows at once, at the temperature of the logits."""
    runner = RandomRunner(words.vocab_size)
    config = EngineConfig(memory=GRANULE, window=20_000, page_size=512, max_rows=ROWS, step_tokens=64)
    llm = LLM(config, runner)
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 6000} | options)
    seqs = [
        llm.add(Request([1, 2], sampling.replace(seed=index), stop_ids=words.eos_ids, mask=compiler.compile(form)))
        for index, form in enumerate(forms)
    ]
    while llm.has_work:
        for output in llm.step():
            if output.finished and output.seq.fault is None:
                llm.abort(output.seq)
    return seqs


def texts(words: Merged, seqs: list[Sequence]) -> list[str]:
    assert [seq.fault for seq in seqs] == [None] * len(seqs)
    assert {seq.finish_reason for seq in seqs} == {"stop"}
    return [words.text(seq.token_ids[2:]) for seq in seqs]


def documents_are_valid(words: Merged, compiler: GrammarCompiler, seeds: range, **options: Any) -> None:
    schemas = [SchemaMaker(seed).document() for seed in seeds]
    found = texts(words, drawn(words, compiler, [schema_form(schema) for schema in schemas], **options))
    for schema, text in zip(schemas, found, strict=True):
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_vocabularies_of_every_size(words: Merged) -> None:
    """Masks come in words of 32 tokens, whatever the number of tokens; ids that the tokenizer does not have are never drawn."""
    for size in range(words.vocab_size, words.vocab_size + 40):
        mask = GrammarCompiler(words, size).compile(whole(Form(kind="regex", text="[ab]")))
        assert len(mask([])) == -(-size // 32)
        assert allowed(mask, []) == {ord("a"), ord("b")}


def test_a_forced_tool_marker_is_the_models_own_token(words: Merged, compiler: GrammarCompiler) -> None:
    marker, end = words.inner.encode("<tool_call>", special=True)[0], words.inner.encode("<|im_end|>", special=True)[0]
    forced = compiler.compile(Grammar('start: "<tool_call>" @form\n', (("form", Form(kind="json", text='{"const": 1}')),)))
    assert allowed(forced, []) == {marker}
    assert allowed(forced, [marker]) == {ord("1")}
    spelled = compiler.compile(Grammar('start: "a<|im_end|>b"\n'))
    assert end not in allowed(spelled, [ord("a")])


def test_a_hundred_random_schemas(words: Merged, compiler: GrammarCompiler) -> None:
    documents_are_valid(words, compiler, range(100))


@pytest.mark.slow
def test_a_thousand_random_schemas(words: Merged, compiler: GrammarCompiler) -> None:
    documents_are_valid(words, compiler, range(1000, 2000))


def test_penalties_limits_and_biases_do_not_break_a_form(words: Merged, compiler: GrammarCompiler) -> None:
    extras = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "min_p": 0.05, "top_k": 40}
    extras |= {"logit_bias": {ord("z"): 2.0, ord("{"): -5.0}}
    documents_are_valid(words, compiler, range(300, 320), logprobs=True, **extras)


@pytest.mark.parametrize("pattern", [r"[ab]{3,9}c", r"(\d{1,3}\.){3}\d{1,3}", r"(yes|no|maybe)!?", r"[^\"a-z]{2,8}", "é{2}日?"])
def test_patterns_are_matched_whole(words: Merged, compiler: GrammarCompiler, pattern: str) -> None:
    for text in texts(words, drawn(words, compiler, [whole(Form(kind="regex", text=pattern))] * 12)):
        assert re.fullmatch(pattern, text), text


def test_a_grammar_gives_what_a_parser_reads(words: Merged, compiler: GrammarCompiler) -> None:
    """Sums of small numbers with brackets, which Python reads, too."""
    rules = 'start: term (" + " term){0,3}\nterm: NUMBER | "(" NUMBER " - " NUMBER ")"\nNUMBER: /[1-9][0-9]?/\n'
    found = texts(words, drawn(words, compiler, [whole(Form(kind="grammar", text=rules))] * 30))
    for text in found:
        assert isinstance(eval(compile(ast.parse(text, mode="eval"), "sum", "eval")), int)
        assert re.fullmatch(r"[-+()\d ]+", text)
    assert len(set(found)) > 10


def test_a_cut_document_is_the_beginning_of_one(words: Merged, compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "minItems": 200, "items": {"type": "integer"}}
    (seq,) = drawn(words, compiler, [schema_form(schema)], max_tokens=40)
    assert seq.finish_reason == "length"
    assert re.fullmatch(r"\s*\[[-\d,\s]*", words.text(seq.token_ids[2:]))


def allowed(mask: Any, made: list[int]) -> set[int]:
    view = mask(made)
    return {32 * place + bit for place, word in enumerate(view) for bit in range(32) if word >> bit & 1}


def test_a_mask_is_a_function_of_the_ids(words: Merged, compiler: GrammarCompiler) -> None:
    """Whatever was asked before: after a step back, another way, or from the start (a sequence that was preempted)."""
    form = schema_form(SchemaMaker(5).object(3))
    (seq,) = drawn(words, compiler, [form])
    ids = seq.token_ids[2:-1]
    asked, chance = compiler.compile(form), random.Random(3)
    for length in [*range(5), *(chance.randint(0, len(ids)) for _ in range(40)), len(ids)]:
        assert allowed(asked, ids[:length]) == allowed(compiler.compile(form), ids[:length])
    assert allowed(asked, ids) <= set(words.eos_ids) | {token for token in range(words.vocab_size) if blank(words, token)}
    with pytest.raises(ValueError, match=r"\S"):
        asked([*ids[:1], ord("}"), ord("{"), ord("]")])
    assert allowed(asked, []) == allowed(compiler.compile(form), [])


def blank(words: Merged, token: int) -> bool:
    text = words.token_bytes(token)
    return text is not None and not text.strip()


def test_no_token_without_a_text_is_ever_allowed(words: Merged, compiler: GrammarCompiler) -> None:
    mask = compiler.compile(whole(Form(kind="regex", text=r"(.|\n)*")))
    silent = {token for token in range(words.vocab_size) if words.token_bytes(token) is None}
    assert allowed(mask, []) & silent == set(words.eos_ids)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (schema_form({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_form({"not": {"type": "string"}}), "not"),
        (schema_form({"type": "no-such-type"}), "no-such-type"),
        (schema_form({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema_form({"enum": []}), "empty"),
        (schema_form({"$ref": "#/nowhere"}), "nowhere"),
        (schema_form({"$ref": "https://example.com/schema"}), "retriev"),
        (schema_form({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (schema_form({"uniqueItems": True, "type": "array", "x-guidance": {"lenient": True}}), "uniqueItems"),
        (whole(Form(kind="regex", text="(a")), "regex"),
        (whole(Form(kind="grammar", text="start: nothing")), "nothing"),
        (whole(Form(kind="grammar", text="first: /a/")), "start"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(compiler: GrammarCompiler, form: Grammar, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as raised:
        compiler.compile(form)
    assert raised.value.hint
    assert raised.value.param == "response_format"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(200),
        {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20_000)}},
        {"enum": [f"value {index}" for index in range(100_000)]},
        {"type": "string", "allOf": [{"pattern": f".*{letter}.{{{20 + at}}}$"} for at, letter in enumerate("abc")]},
    ],
    ids=["deep", "wide", "long", "intersection"],
)
def test_hostile_schemas_are_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(BadRequest):
        compiler.compile(schema_form(schema))


def test_a_compilation_that_takes_too_long_is_given_up(words: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = GrammarCompiler(words, words.vocab_size)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(slow, "_matcher", lambda form, param: time.sleep(0.5))
    with pytest.raises(BadRequest, match="more than 0.05 s"):
        slow.compile(schema_form({}))


def test_compiled_grammars_are_kept_and_let_go(words: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = GrammarCompiler(words, words.vocab_size), []
    real = kept._matcher
    monkeypatch.setattr(grammars, "KEPT", 2)
    monkeypatch.setattr(kept, "_matcher", lambda form, param: made.append(form) or real(form, param))
    a, b, c = (schema_form({"const": value}) for value in "abc")
    for form in (a, b, a, c, a, b):
        kept.compile(form)
    assert made == [a, b, c, b]


def test_a_grammar_that_gets_too_complex_ends_its_own_sequence(words: Merged, compiler: GrammarCompiler) -> None:
    hard = whole(Form(kind="regex", text="(.*a.{60}){3}"))
    bad, good = drawn(words, compiler, [hard, schema_form({"type": "boolean"})], max_tokens=400)
    assert good.fault is None
    assert bad.fault is None or "complex" in str(bad.fault) or "limit" in str(bad.fault)
