"""`agentkv warmup`: compile and capture before anybody waits for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer


def warmup(
    model: Annotated[str, typer.Argument(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    method: Annotated[str, typer.Option(help="Attention method, or 'name:option=value,option=value'.")] = "dense",
    also: Annotated[list[str] | None, typer.Option(help="Another that sessions may name; repeatable.")] = None,
    rows: Annotated[str, typer.Option(help="Sessions that decode at once, like 1,4,16.")] = "1,2,4,8,16",
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    memory: Annotated[str | None, typer.Option(help="KV arena: bytes, like 2GiB, or auto.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    window: Annotated[int | None, typer.Option(help="Most logical tokens of a session. Default: the model's.")] = None,
    flashinfer: Annotated[
        bool, typer.Option("--flashinfer", help="Compile FlashInfer's decode attention for the model, and warm up with it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")] = False,
) -> None:
    """Compile the kernels that a model and its methods need on this GPU; they stay on disk, so servers start without them."""
    from agentkv.errors import BadRequest
    from agentkv.runtime import Runtime

    try:
        counts = [int(each) for each in rows.split(",")]
    except ValueError:
        raise BadRequest(f"--rows {rows!r}: numbers, like 1,4,16", param="rows") from None
    sizes: dict[str, Any] = {"memory": memory, "window": window, "methods": also or ()}
    built = None
    if flashinfer:
        from agentkv.runtime_attention import build
        from agentkv.runtime_engine import model_path

        sizes["attention"], built = "flashinfer", build(model_path(model), device=device, dtype=dtype)
    cache, before = _compiled()
    with Runtime(model, method=method, device=device, dtype=dtype, db=None, **sizes) as runtime:
        took = runtime.warm_up(counts, tokens)
        report = {"model": runtime.model_name, "device": runtime.device, "rounds": took, "graphs": runtime.stats()["graphs"]}
    report |= {"cache": str(cache), "compiled": len(_compiled()[1] - before), "flashinfer": built}
    if as_json:
        typer.echo(json.dumps(report))
        return
    if built is not None:
        typer.echo(f"FlashInfer's decode attention compiled, or found, in {built:.1f} s")
    for each in took:
        typer.echo(f"{each['method']:24} {each['rows']:4} rows  {each['seconds']:8.2f} s")
    if report["graphs"] is not None:
        typer.echo(f"{report['graphs']['captured']} decode steps captured in {report['graphs']['seconds']:.1f} s")
        typer.echo(f"{report['compiled']} kernels compiled, kept in {cache}")


def _compiled() -> tuple[Path, set[str]]:
    """Where Triton keeps what it compiles, and the kernels that are there."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return cache, {path.parent.name for path in cache.glob("*/*.cubin")}
