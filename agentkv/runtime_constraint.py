"""From what an answer must be to the grammar of the model's output: reasoning, then text of a form or calls in its dialect."""

from __future__ import annotations

import json

from agentkv.constraint import Constraint
from agentkv.engine.core import Mask
from agentkv.engine.grammar import Grammar, GrammarCompiler
from agentkv.errors import BadRequest
from agentkv.tools.parse import END_THINK, THINK, CallFormat


class Constraints:
    """Masks for one model. thinks: its template knows think blocks, so an answer may begin with one."""

    def __init__(self, compiler: GrammarCompiler, dialect: CallFormat, *, thinks: bool) -> None:
        self._compiler = compiler
        self._dialect = dialect
        self._thinks = thinks

    def mask(self, constraint: Constraint, *, thinking: bool) -> Mask:
        """A fresh mask for one turn. thinking: the prompt has opened a think block. BadRequest for what cannot be served."""
        try:
            return self._compiler.compile(self._grammar(constraint, thinking), _param(constraint))
        except BadRequest:
            if constraint.form is not None and constraint.calls is not None:
                self._compiler.compile(self._grammar(constraint.replace(form=None), thinking), "tools")
            raise

    def _grammar(self, constraint: Constraint, thinking: bool) -> Grammar:
        rules, answers, parts = [], [], []
        if constraint.form is not None:
            answers.append("@form")
            parts.append(("form", constraint.form))
        if constraint.calls is not None:
            answers.append("calls")
            names = [f"call_{index}" for index in range(len(constraint.calls.tools))]
            again = f" ({_quoted(self._dialect.between)} call)*" if constraint.calls.many else ""
            rules += [f"calls: call{again}", f"call: {' | '.join(names)}"]
            for rule, (name, form) in zip(names, constraint.calls.tools, strict=True):
                before, after = self._dialect.frame(name)
                rules.append(f"{rule}: {_quoted(before)} @{rule}_arguments {_quoted(after)}")
                parts.append((f"{rule}_arguments", form))
        thought = ""
        if thinking:
            thought = "thought "
        elif self._thinks:
            thought = f"({_quoted(THINK)} thought)? "
        if thought:
            end = END_THINK.replace("/", "\\/")
            rules += ['thought: reasoning ("\\n" "\\n"?)?', f"reasoning[lazy]: /(.|\\n)*{end}/"]
        start = f"start: {thought}({' | '.join(answers)})"
        return Grammar("\n".join([start, *rules]) + "\n", tuple(parts))


def _param(constraint: Constraint) -> str:
    return "response_format" if constraint.form is not None else "tools"


def _quoted(text: str) -> str:
    """A Lark literal."""
    return json.dumps(text, ensure_ascii=False)
