"""`agentkv methods prepare`: what a method needs of a model before it can serve it."""

from __future__ import annotations

import json
from ast import literal_eval
from pathlib import Path
from typing import Annotated, Any

import typer

from agentkv.errors import BadRequest


def prepare(
    method: Annotated[str, typer.Argument(help="Name of the method.")],
    model: Annotated[str, typer.Argument(help="'micro', a Hugging Face directory or a .gguf file.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
    text: Annotated[Path | None, typer.Option(help="A text whose tokens calibrate. Default: by the weights alone.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the preparation, like group_size=2; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")] = False,
) -> None:
    """Make the file that a method needs of a model."""
    from agentkv.runtime_prepare import prepare as made

    options = dict(_option(each) for each in option or [])
    result = made(method, model, out, text, device, **options)
    typer.echo(
        json.dumps(result) if as_json else f"wrote {out}: {', '.join(f'{k} {v}' for k, v in result.items() if k != 'out')}"
    )


def _option(text: str) -> tuple[str, Any]:
    """'name=value' with a Python literal; words need no quotes."""
    name, found, value = text.partition("=")
    if not found:
        raise BadRequest(f"--option {text!r} is no name=value", param="option")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
