"""`agentkv doctor`: the report for people, or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

OF = {"triton": "this package", "flashinfer": "FlashInfer"}
"""Attention -> whose kernel decodes."""


def doctor(
    model: Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    memory: Annotated[str | None, typer.Option(help="KV arena to plan with: bytes, like 2GiB, or auto.")] = None,
    warm_memory: Annotated[str | None, typer.Option(help="Host memory for the KV of idle sessions.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    window: Annotated[int | None, typer.Option(help="Most logical tokens of a session. Default: the model's.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Slots of a KV page. Default: 128 on CPU, 16 on a GPU.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Attention method to plan for; repeatable. Default: dense.")] = None,
    attention: Annotated[str, typer.Option(help="Decode attention: auto, triton or flashinfer.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")] = False,
) -> None:
    """What this machine has, what the model would take by method, what will not work and why. Exit code 1 for a problem."""
    from agentkv.runtime_doctor import examine

    sizes: dict[str, Any] = {"memory": memory, "warm_memory": warm_memory, "window": window, "page_size": page_size}
    report = examine(model, device=device, dtype=dtype, methods=method or ("dense",), attention=attention, **sizes)
    typer.echo(json.dumps(report) if as_json else "\n".join(lines(report)))
    if report["problems"]:
        raise typer.Exit(1)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    from agentkv.runtime_backends import told

    yield f"machine    Python {report['python']}, {report['platform']}"
    yield f"cpu        {_cpu(report['cpu'])}"
    yield f"           one core for each thread of the engine: {report['cpu']['pinning']}"
    yield f"           compiled kernels: {report['cpu']['kernels']}; bfloat16 {report['cpu']['bfloat16']}"
    for gpu in report["gpus"]:
        memory = f"{size(gpu['free_bytes'])} of {size(gpu['bytes'])} free"
        yield f"gpu        {gpu['device']}: {gpu['name']}, {memory}, compute capability {gpu['capability']}"
        yield from (f"           {line}" for line in told(gpu["attention"]))
    if not report["gpus"]:
        yield "gpu        none that this torch can use"
    here = (f"{name} {row['version']}" for name, row in report["libraries"].items() if row["version"])
    yield f"libraries  {', '.join(here)}"
    for name, row in report["libraries"].items():
        if not row["version"]:
            yield f"           {name} is missing: {row['for'] or 'nothing works without it'}"
    store = report["store"]
    if "sessions" in store:
        yield f"store      {store['path']}: {store['sessions']} sessions, {size(store['bytes'])}"
    yield from _model(report["model"])
    for kind, rows in (("advice", report["advice"]), ("problem", report["problems"])):
        for row in rows:
            yield f"{kind:10} {row['part']}: {row['text']}." + (f" {row['hint']}." if row["hint"] else "")
    count = len(report["problems"])
    yield f"{count} problem{'s' * (count > 1)}" if count else "all good"


def _cpu(cpu: dict[str, Any]) -> str:
    limits = f", {cpu['allowed_cores']} allowed" + ("" if cpu["quota"] is None else f", quota of {cpu['quota']:g}")
    told = "".join(f", {name}={value}" for name, value in cpu["environment"].items())
    return f"{cpu['cores']} cores{limits}, {cpu['threads']} threads, load {cpu['load']}, {size(cpu['free_bytes'])} free{told}"


def _model(model: dict[str, Any]) -> Iterator[str]:
    """The memory plan, and where a method pays."""
    from agentkv.runtime_crossover import told

    if "weight_bytes" not in model:
        yield f"model      {model['name']}: no plan"
        return
    what = f"{model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters, {model['dtype']} on {model['device']}"
    yield f"model      {model['name']}: {what}"
    yield f"           weights {size(model['weight_bytes'])} of {size(model['usable_bytes'])} that this process can have"
    if "attention" in model:
        yield f"           decode attention by {OF[model['attention']['backend']]}: {model['attention']['why']}"
    if "methods" not in model:
        return
    yield f"           window {model['window']:,}, pages of {model['page_size']} slots, warm memory {size(model['warm_bytes'])}"
    for row in model["methods"]:
        tried = "not tried" if row["step_bytes"] is None else size(row["step_bytes"])
        yield f"method     {row['method']} ({row['exactness']}): a step {tried}, KV {size(row['kv_bytes_per_token'])} a token"
        if row["crossover"] is not None:
            where = "{device}, shape of {model}, measured with {method}".format(**row["crossover"])
            yield f"           decode faster than dense with so many sessions ({where}): {told(row['crossover'])}"
        for group in row["groups"]:
            yield f"           {_group(group)}"
        if "arena_bytes" in row:
            held = f"{row['tokens_that_fit']:,} tokens, or {row['whole_windows']:,} whole windows"
            longest = f"the longest session {row['longest_session']:,}"
            yield f"           arena {size(row['arena_bytes'])}: {held} of {size(row['session_bytes'])}; {longest}"


def _group(group: dict[str, Any]) -> str:
    each = f"{size(group['token_bytes'])} a token, pages of {size(group['page_bytes'])}"
    if "state" in group:
        return f"state {group['state']!r}: {each}"
    seen = "every token" if group["window"] is None else f"{group['window']:,} tokens back"
    return f"{group['layers']} layers that see {seen}, {group['kv_heads']} KV heads of {group['head_dim']}: {each}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:,.1f} {unit}"
