"""`agentkv bench`: measurements that anyone can repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")]


@app.callback()
def bench_root() -> None:
    """Benchmarks: each prints a table, or one JSON object with --json."""


@app.command("world")
def world(
    seeds: Annotated[str, typer.Option(help="Seeds: '7,8,9' or '0-199'.")] = "0-9",
    model: Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    families: Annotated[str | None, typer.Option(help="Comma-separated families. Default: all.")] = None,
    max_bytes: Annotated[int, typer.Option(help="Longest task, in bytes of conversation.")] = 8192,
    prune_after: Annotated[int | None, typer.Option(help="Lag. Default: no pruning.")] = None,
    mode: Annotated[str, typer.Option(help="in_place or rebuild")] = "in_place",
    concurrency: Annotated[int, typer.Option(help="Tasks played at once.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let the model act in the agent world; success is the world's verdict on real files."""
    from agentkv.bench.world import run_world

    result: dict[str, Any] = run_world(
        seeds=parse_seeds(seeds),
        model=model,
        families=families.split(",") if families else None,
        max_bytes=max_bytes,
        prune_after=prune_after,
        mode=mode,
        concurrency=concurrency,
        device=device,
        tell=None if as_json else typer.echo,
    )
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        low, high = result["interval"]
        typer.echo(f"success {result['success']:.3f} ({low:.3f} to {high:.3f}), n = {result['n']}")
        for name, row in result["by_family"].items():
            typer.echo(f"  {name:8} {row['success']:.3f}, n = {row['n']}")


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
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rates into this file (.png, .svg, .pdf).")] = None,
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
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
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
