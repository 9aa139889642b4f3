"""Making what a method needs of a model beforehand: its module's `prepare`, over the loaded model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from agentkv import methods
from agentkv.engine.loader import load_model
from agentkv.engine.preparation import Preparation
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import BadRequest, UnknownOption
from agentkv.runtime_engine import model_path

TEXT_TOKENS = 2048
"""Tokens of a text that calibrates at once."""


def prepare(name: str, model: str, out: Path, text: Path | None, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """Write a method's file for a model; what it says of it.

    text: a file whose tokens calibrate, TEXT_TOKENS at a time. BadRequest where the method needs no preparation, options are
    unknown or out of range, `out` cannot be written, the text is empty, or the model is not one it serves; UnknownModel,
    BadModel as `load_model`.
    """
    found: Callable[..., dict[str, Any]] | None = getattr(sys.modules[methods.resolve(name).__module__], "prepare", None)
    if found is None:
        raise BadRequest(f"method {name!r} needs no preparation", hint="Use it as it is", param="method")
    options = {option: _option(found, name, option, value) for option, value in options.items()}
    _check_out(out)
    words = None if text is None else _read(text)
    loaded = load_model(model_path(model), device=device)
    texts: list[list[int]] = []
    if words is not None:
        ids = Tokenizer.load(loaded.path).encode(words)
        texts = [ids[start : start + TEXT_TOKENS] for start in range(0, len(ids), TEXT_TOKENS)]
    try:
        return found(Preparation(loaded), texts, out, **options)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"method {name!r}: {error}", param="options") from None


def _option(found: Callable[..., Any], name: str, option: str, value: Any) -> Any:
    """The value, if the preparation has such an option of its type."""
    known = sorted(each.name for each in signature(found).parameters.values() if each.kind is Parameter.KEYWORD_ONLY)
    if option not in known:
        hint = f"Known: {', '.join(known)}" if known else "It has none"
        raise UnknownOption(f"the preparation of {name!r} has no option {option!r}", hint=hint, param="option")
    return methods.typed(found, name, option, value)


def _check_out(out: Path) -> None:
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        why = "it is a folder" if out.is_dir() else "there is no such folder, or it is not yours to write to"
        raise BadRequest(f"out {out} cannot be written: {why}", hint="Give a file in a folder that exists", param="out")


def _read(text: Path) -> str:
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"text {text}: {error}", hint="Give a file of UTF-8 text", param="text") from None
    if not words.strip():
        raise BadRequest(f"text {text}: it is empty", hint="Leave it out to go without", param="text")
    return words
