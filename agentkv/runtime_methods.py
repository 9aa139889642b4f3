"""What `agentkv methods ls` says: every method's facts, and what a token of a long session takes under each."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, replace
from typing import Any

from agentkv import methods
from agentkv.engine import models
from agentkv.engine.footprint import PAGE, SHAPE, bytes_per_token, example_model
from agentkv.engine.forms import model_shape
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadRequest
from agentkv.runtime_crossover import crossover

_WINDOWED = ("Gemma3ForCausalLM",)
"""Architectures that always have layers which see a window only."""


def list_methods() -> list[dict[str, Any]]:
    """Every method: name, family, paper, exactness, reuse, evicts, options with defaults, bytes per token of SHAPE, models
    that it serves, how it is prepared, from which context on it is faster than dense, summary. bytes_per_token is None where
    it must be prepared for a model first."""
    loaded = example_model()
    return [_row(name, methods.resolve(name), loaded) for name in methods.NAMES]


def _row(name: str, kind: type[SparseMethod], loaded: LoadedModel) -> dict[str, Any]:
    method = _configured(name)
    said = kind if method is None else method  # what it is may depend on options
    return {
        "name": name,
        "family": kind.family,
        "paper": kind.paper,
        "exactness": said.exactness,
        "reuse": said.reuse,
        "evicts": said.evicts,
        "options": {option.name: _default(option) for option in fields(kind)},
        "bytes_per_token": None if method is None else bytes_per_token(method, loaded),
        "shape": SHAPE,
        "models": _models(method, loaded),
        "preparation": said.preparation,
        "crossover": crossover(name),
        "summary": _summary(kind.__doc__ or ""),
    }


def _summary(doc: str) -> str:
    """The first sentence, and those behind it while that is short."""
    words = " ".join(doc.split())
    end = words.find(". ", 40)
    return words if end < 0 else words[: end + 1]


def _configured(name: str) -> SparseMethod | None:
    """With its defaults; None where an option must be given."""
    try:
        return methods.get(name)
    except BadRequest:
        return None


def _default(option: Field[Any]) -> str | None:
    """As Python writes it; None where it must be given."""
    if option.default is not MISSING:
        return repr(option.default)
    return repr(option.default_factory()) if option.default_factory is not MISSING else None


def _models(method: SparseMethod | None, loaded: LoadedModel) -> dict[str, str | None]:
    """By architecture, None where it is served, once it is prepared, else why not."""
    if method is None:
        return dict.fromkeys(models.ARCHITECTURES)
    kind, shape = SparseMethod if method.preparation else type(method), model_shape(loaded, PAGE)
    return {name: kind.unserved(method, replace(shape, windowed=name in _WINDOWED)) for name in models.ARCHITECTURES}
