"""`agentkv bench`: measurements that anyone can repeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


def _file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before hours of work are done for it."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"no file can be written at {path}")
    return path


Out = Annotated[Path | None, typer.Option(callback=_file, help="Also write the JSON to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")]
Memory = Annotated[str | None, typer.Option(help="KV memory of each worker, like 8GiB; the default suits one.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that play cells side by side on the device.")]


@app.callback()
def bench_root() -> None:
    """Benchmarks: each prints a table, or one JSON object with --json."""


@app.command("world")
def world(
    seeds: Annotated[str, typer.Option(help="Seeds: '7,8,9' or '0-199'.")] = "0-9",
    model: Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    families: Annotated[
        str, typer.Option(help="Comma-separated, or all: each seed in each of them; seed: the one it gives.")
    ] = "all",
    dialect: Annotated[str, typer.Option(help="native, mini-swe-agent or openhands")] = "native",
    length: Annotated[str, typer.Option(help="Bytes of conversation: 2K, 4K, 8K, 16K, 32K, or like 2048-8192.")] = "2048-8192",
    lags: Annotated[
        str, typer.Option(help="prune_after of every result: 'none' (never), '2', or several: 'none,0,2'.")
    ] = "none",
    keep: Annotated[str, typer.Option(help="drop or edges:N")] = "drop",
    mode: Annotated[str, typer.Option(help="in_place or rebuild")] = "in_place",
    blank: Annotated[bool, typer.Option("--blank", help="Control: strike the wanted facts out of every result.")] = False,
    window: Annotated[int | None, typer.Option(help="Control: attention to so many tokens and the task only.")] = None,
    concurrency: Annotated[int, typer.Option(help="Tasks played at once.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(callback=_file, help="Write success by lag as SVG to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let the model act in the agent world; success is the world's verdict on real files.

    With several lags the JSON is {"runs": [one result a lag]}.
    """
    from agentkv.bench.world import Condition, all_lags, lags_of, plot_of, sizes_of
    from agentkv.world.task import FAMILIES

    low, high = sizes_of(length)
    named = {"all": tuple(FAMILIES), "seed": None}.get(families, tuple(families.split(",")))
    given = Condition(tuple(parse_seeds(seeds)), named, dialect, low, high, None, keep, mode, blank, window)
    runs = all_lags(model, device, given, lags_of(lags), concurrency, None if as_json else typer.echo)
    result: dict[str, Any] = runs[0] if len(runs) == 1 else {"runs": runs}
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n")
    if plot is not None:
        plot.write_text(plot_of(runs))
    if as_json:
        typer.echo(text)
        return
    for run in runs:
        bottom, top = run["interval"]
        lag = "" if len(runs) == 1 else f"lag {run['prune_after']}: "
        typer.echo(f"{lag}success {run['success']:.3f} ({bottom:.3f} to {top:.3f}), n = {run['n']}")
        for name, row in run["by_family"].items():
            typer.echo(f"  {name:8} {row['success']:.3f}, n = {row['n']}")


@app.command("grid")
def grid(
    out: Annotated[Path, typer.Option(help="Folder of the cells' files; a cell whose file is there is not run again.")],
    parts: Annotated[
        str, typer.Option(help="dense, long, pruning, once, blank, window.")
    ] = "dense,long,pruning,once,blank,window",
    model: Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of a dense condition; the other parts have fewer.")] = 200,
    chunk: Annotated[int, typer.Option(min=1, help="Most tasks of one cell.")] = 200,
    concurrency: Annotated[int, typer.Option(help="Tasks played at once.")] = 100,
    seconds: Annotated[float, typer.Option(help="Start no further cell after that; run the command again to go on.")] = 1e9,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    memory: Memory = None,
    workers: Workers = 1,
    doc: Annotated[
        Path | None, typer.Option(callback=_file, help="Write what was solved as a page here, its JSON beside it.")
    ] = None,
) -> None:
    """All grids of the model card and of docs/pruning.md, cell by cell; say the same command again to go on."""
    from agentkv.bench import acting
    from agentkv.bench.grid import Engine, run_grid

    engine = Engine(model, device, memory, workers)
    counts = run_grid(out, parts, engine, seeds, chunk, concurrency, seconds, typer.echo)
    if doc is not None:
        acting.write(out, doc)
    typer.echo(json.dumps(counts))


@app.command("pruning")
def pruning(
    out: Annotated[Path, typer.Option(help="Folder of the cells' files, as of `bench grid`.")],
    doc: Annotated[Path | None, typer.Option(callback=_file, help="Write the page here, its chart and JSON beside it.")] = None,
    model: Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    seeds: Annotated[int, typer.Option(min=1, help="As of `bench grid`: a sixth of them for each family and condition.")] = 200,
    concurrency: Annotated[int, typer.Option(help="Tasks played at once.")] = 100,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    memory: Memory = None,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """The lag study: what pruning after a lag costs and frees, by family and way of pruning."""
    from agentkv.bench import pruning as study
    from agentkv.bench.grid import Engine, cells, play_cells
    from agentkv.bench.pruning_page import markdown

    todo = [cell for part in ("pruning", "once") for cell in cells(part, seeds, 200)]
    engine = Engine(model, device, memory, workers)
    play_cells(todo, engine, out, concurrency, 1e9, lambda line: None if as_json else typer.echo(line))
    made = study.report(out) if doc is None else study.write(out, doc)
    typer.echo(json.dumps(made) if as_json else markdown(made, "pruning.svg"))


@app.command("constrained")
def constrained(
    batches: Annotated[str, typer.Option(help="Rows that decode at once: '1,8'.")] = "1,8",
    steps: Annotated[int, typer.Option(help="Tokens of each row.")] = 24,
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.")] = 8,
    as_json: AsJson = False,
) -> None:
    """What holding answers to a JSON schema costs a decode step: a 90M model of random weights on the CPU."""
    from agentkv.bench.constrained import run_constrained

    result = run_constrained(batches=parse_seeds(batches), steps=steps, rounds=rounds, tell=None if as_json else typer.echo)
    typer.echo(json.dumps(result) if as_json else f"the schema was compiled in {result['compile_ms']:.1f} ms, off the steps")


@app.command("engine")
def engine(
    peer: Annotated[str, typer.Option(help="transformers, vllm or the URL of a server with OpenAI's API.")] = "transformers",
    model: Annotated[
        str, typer.Option(help="'qwen3-90m' (random weights), 'micro', a directory or a .gguf file.")
    ] = "qwen3-90m",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of the single sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences of the batch.")] = 8,
    batch_prompt: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 2048,
    new: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each side, in turn.")] = 3,
    peer_sequences: Annotated[
        int | None, typer.Option(help="Sequences of the batch that a peer without batches does. Default: all.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of both sides. Default: torch's own number.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(callback=_file, help="Draw the rates into this file (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Rates of the engine against a peer: prefill, decode, end to end; one sequence and a batch."""
    from agentkv.bench.engine import run_engine
    from agentkv.bench.report import plot as draw
    from agentkv.bench.report import table

    result = run_engine(
        model=model,
        peer=peer,
        prompt=prompt,
        batch=batch,
        batch_prompt=batch_prompt,
        new=new,
        repeats=repeats,
        peer_sequences=peer_sequences,
        threads=threads,
        device=device,
        dtype=dtype,
        tell=lambda line: typer.echo(line, err=True),
    )
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        draw(result, plot)
    typer.echo(json.dumps(result) if as_json else table(result))


@app.command("kernels")
def kernels(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kernel.")] = 20,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Kernels on an NVIDIA GPU: microseconds, TB/s, share of the measured copy rate."""
    from agentkv.bench.kernels import run_kernels

    result = run_kernels(repeats=repeats, tell=None if as_json else typer.echo)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(result))


@app.command("gpu")
def gpu(
    out: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.png; rows that it has are kept, so a run goes on.")],
    minutes: Annotated[float, typer.Option(help="Begin no row after that.")] = 8.0,
    rows: Annotated[str, typer.Option(help="Parts of names, between semicolons: measure these again, and no others.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 20,
    peers: Annotated[
        bool, typer.Option(help="Also measure what else is installed: FlashInfer builds its kernels first.")
    ] = True,
    doc: Annotated[Path | None, typer.Option(help="A page; the table goes between its two marks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every line of speed on an NVIDIA GPU, as ratios to the rates of copies and products of the same run."""
    from agentkv.bench.gpu import run_gpu
    from agentkv.bench.gpu_report import plot as draw
    from agentkv.bench.gpu_report import write_page

    tell = None if as_json else typer.echo
    result = run_gpu(out=out, minutes=minutes, rows=rows, repeats=repeats, peers=peers, tell=tell)
    draw(result, out / "gpu.png")
    if doc is not None:
        write_page(result, doc)
    if as_json:
        typer.echo(json.dumps(result))


@app.command("quality")
def quality(
    out: Annotated[Path, typer.Option(help="Folder of the cells' files; what it has is not played again.")],
    methods: Annotated[str, typer.Option(help="Names, comma-separated. Default: all.")] = "",
    budgets: Annotated[str, typer.Option(help="Tokens, comma-separated, played in that order. Default: all.")] = "",
    model: Annotated[str, typer.Option(help="'micro', or one that reads what it was trained to read.")] = "micro",
    seeds: Annotated[int, typer.Option(min=1, help="Sessions of each condition.")] = 200,
    chunk: Annotated[int, typer.Option(min=1, help="Most sessions of one cell.")] = 50,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions of a process at once.")] = 60,
    seconds: Annotated[float, typer.Option(help="Begin no cell after that; run the command again to go on.")] = 1e9,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    memory: Memory = None,
    workers: Workers = 1,
    doc: Annotated[
        Path | None, typer.Option(callback=_file, help="Write the tables into this page, bench/quality.json beside it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Retrieval: whole answers at 8K bytes by method and budget, first and later questions."""
    from agentkv.bench import quality_page
    from agentkv.bench.grid import Engine
    from agentkv.bench.quality import run_quality

    counts = run_quality(
        out=out,
        engine=Engine(model, device, memory, workers),
        seeds=seeds,
        chunk=chunk,
        concurrency=concurrency,
        seconds=seconds,
        methods=methods,
        budgets=budgets,
        tell=lambda line: typer.echo(line, err=True),
    )
    made = quality_page.report(out)
    if doc is not None:
        quality_page.write(made, doc)
    typer.echo(json.dumps({**made, "cells": counts}) if as_json else "\n".join(quality_page.bound_lines(made)))


@app.command("lookup")
def lookup(
    seeds: Annotated[str, typer.Option(help="Seeds of the agent world: '7,8,9' or '0-5'.")] = "0-5",
    model: Annotated[str, typer.Option(help="Plays the agent world.")] = "micro",
    edit_model: Annotated[
        str | None, typer.Option(help="Also edits a file and tells a story: a chat model's directory or .gguf file.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=8, help="Most tokens of a session that a step may check.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, each with and without guesses.")] = 3,
    max_bytes: Annotated[int, typer.Option(help="Longest task, in bytes of conversation.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decode rates with and without prompt lookup, and whether every token is the same."""
    from agentkv.bench.lookup import run_lookup

    result: dict[str, Any] = run_lookup(
        seeds=parse_seeds(seeds),
        model=model,
        edit_model=edit_model,
        lookup=tokens,
        repeats=repeats,
        max_bytes=max_bytes,
        device=device,
        tell=lambda text: typer.echo(text, err=True),
    )
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    typer.echo(
        f"{'workload':14} {'tokens':>7} {'off tok/s':>10} {'on tok/s':>9} {'ratio':>6} {'a step':>6} {'right':>6}  tokens"
    )
    for row in result["workloads"]:
        right = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        rates = f"{row['off']:10.1f} {row['on']:9.1f} {row['ratio']:6.2f} {row['tokens_per_step']:6.2f} {right:>6}"
        typer.echo(f"{row['name']:14} {row['tokens']:7} {rates}  {'the same' if row['same'] else 'DIFFERENT'}")


@app.command("backends")
def backends(
    measured: Annotated[Path, typer.Argument(help="gpu.json of agentkv bench gpu.")],
    doc: Annotated[Path | None, typer.Option(callback=_file, help="Page whose tables are made anew: docs/gpu.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make what was measured on this GPU known to agentkv doctor, and to a page."""
    from agentkv.bench.backends import write

    made = write(measured, doc=doc)
    typer.echo(json.dumps(made) if as_json else f"agentkv doctor now knows the {made['device']}")


def parse_seeds(text: str) -> list[int]:
    """'7,8,9' or '0-199', or a mixture, to a list without repeats."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise typer.BadParameter(f"seeds {text!r}: like 7,8,9 or 0-199") from None
    return list(dict.fromkeys(seeds))
