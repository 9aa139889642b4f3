"""Making what a method needs of a model beforehand: its module's `prepare`, over the loaded model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentkv import methods
from agentkv.engine.loader import load_model
from agentkv.engine.preparation import Preparation
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import BadRequest
from agentkv.runtime_engine import model_path

TEXT_TOKENS = 2048
"""Tokens of a text that calibrates at once."""


def prepare(name: str, model: str, out: Path, text: Path | None, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """Write a method's file for a model; what it says of it.

    text: a file whose tokens calibrate, TEXT_TOKENS at a time. BadRequest where the method needs no preparation, options are
    unknown or out of range, or the model is not one it serves; UnknownModel, BadModel as `load_model`.
    """
    found: Callable[..., dict[str, Any]] | None = getattr(sys.modules[methods.resolve(name).__module__], "prepare", None)
    if found is None:
        raise BadRequest(f"method {name!r} needs no preparation", hint="Use it as it is", param="method")
    loaded = load_model(model_path(model), device=device)
    texts: list[list[int]] = []
    if text is not None:
        ids = Tokenizer.load(loaded.path).encode(_read(text))
        texts = [ids[start : start + TEXT_TOKENS] for start in range(0, len(ids), TEXT_TOKENS)]
    try:
        return found(Preparation(loaded), texts, out, **options)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"method {name!r}: {error}", param="options") from None


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"text {text}: {error}", hint="Give a file of UTF-8 text", param="text") from None
