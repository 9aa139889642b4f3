"""A method's reference is an oracle: it shares no function with the rest, and the kit sees what departs from it."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import fields
from typing import Any

import pytest

from agentkv import methods
from agentkv.check.kit import CHECKS
from agentkv.check.models import TINY, tiny
from agentkv.check.outcome import Failed
from agentkv.check.scene import Case
from agentkv.check.subject import ready, subjects

OF_ORACLES = {"agentkv.kernels.reference", "torch"}
"""Modules whose functions a reference may call."""


def uses(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Attributes of self, and names."""
    of_self = {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    return of_self, {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}


@pytest.mark.parametrize("name", methods.NAMES)
def test_a_reference_shares_no_function_with_its_method(name: str) -> None:
    kind = methods.resolve(name)
    (body,) = (each for each in ast.parse(inspect.getsource(kind)).body if isinstance(each, ast.ClassDef))
    parts = {each.name: uses(each) for each in body.body if isinstance(each, ast.FunctionDef)}
    options = {each.name for each in fields(kind)}
    mine, todo = {"reference"} & parts.keys(), ["reference"] if "reference" in parts else []
    while todo:
        new = (parts[todo.pop()][0] & parts.keys()) - mine
        mine |= new
        todo += new
    others = set().union(*(parts[each][0] for each in parts if each not in mine))
    assert (mine - {"reference"}) & others <= options
    for each in mine:
        for called in parts[each][1]:
            found = getattr(sys.modules[kind.__module__], called, None)
            home = found.__module__ if inspect.isfunction(found) else "torch"
            assert home in OF_ORACLES, f"{each} calls {called} of {home}"


def with_wait(self: Any, layer: int, observers: tuple[int, ...]) -> int | None:
    before = [each for each in observers if each <= layer]
    return before[-1] if before and layer - before[-1] > self.wait + 1 else None


WRONG: dict[str, tuple[str, str, Any]] = {
    "a group is quantised one token early": (
        "kivi", "_floor", lambda self, tokens: max(0, tokens - self.residual + 1) // self.group * self.group),
    "a group is quantised one token late": (
        "kivi", "_floor", lambda self, tokens: max(0, tokens - self.residual - 1) // self.group * self.group),
    "a share is one token short": ("adakv", "_share", property(lambda self: self.capacity - self.window - 1)),
    "a layer more reads everything": ("omnikv", "_behind", with_wait),
    "a share is rounded down": ("kvzip", "_share", lambda self, count: int(count * self.keep_ratio)),
    "a rank is one less": ("palu", "_ranks", property(lambda self: (int(self.ratio * self.prepared.group_dim) - 1,) * 2)),
    "nothing goes between seals": ("h2o", "on_step_end", lambda self, batch: None),
    "decoded tokens have no scores": ("h2o", "on_attention_end", lambda self, *args: None),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_kit_sees_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, instead = WRONG[what]
    (method,) = subjects(name, {})
    loaded = tiny(TINY[0])
    with ready(method, loaded) as mine:
        monkeypatch.setattr(type(mine), function, instead)
        with pytest.raises(Failed, match="attention is off by"):
            CHECKS["reference"](Case(mine, loaded))
