"""`agentkv methods`: which attention methods there are, and whether one keeps the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from agentkv.cli_prepare import prepare
from agentkv.errors import BadRequest

app = typer.Typer(help="Attention methods: ls, check, prepare.", invoke_without_command=True)
app.command()(prepare)

MARK, MARK_END = "<!-- methods -->", "<!-- /methods -->"
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")]


@app.callback()
def methods_root(context: typer.Context, as_json: AsJson = False) -> None:
    """Attention methods: name, family, paper, exactness, reuse, options, bytes a token."""
    if context.invoked_subcommand is None:
        methods_ls(as_json)


@app.command("ls")
def methods_ls(
    as_json: AsJson = False,
    doc: Annotated[Path | None, typer.Option(help="Write the table into this page, between its two marks.")] = None,
) -> None:
    """List the methods."""
    from agentkv.runtime import list_methods

    rows = list_methods()
    if doc is not None:
        _write(doc, rows)
    if as_json:
        typer.echo(json.dumps({"methods": rows}))
        return
    heads = {"name": "method", "family": "family", "exactness": "KV", "reuse": "reuse", "size": "bytes/tok", "summary": ""}
    for row in (heads, *rows):
        size = row.get("size") or ("" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:,}")
        typer.echo(f"{row['name']:12} {row['family']:12} {row['exactness']:8} {row['reuse']:6} {size:>9} {row['summary']}")


@app.command("check")
def methods_check(
    target: Annotated[str, typer.Argument(help="A method's name, or a Python file with subclasses of SparseMethod.")],
    model: Annotated[
        str, typer.Option(help="tiny (two random models), micro, a Hugging Face directory or a .gguf file.")
    ] = "tiny",
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, like budget=64; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Does a method keep the contract? A table of checks; exit code 1 where one fails."""
    from agentkv.check.kit import run
    from agentkv.check.outcome import table
    from agentkv.check.subject import parse_options

    rows, passed = [], True
    for report in run(target, model, parse_options(option or []), device):
        passed = passed and report.passed
        rows.append(asdict(report) | {"passed": report.passed})
        if not as_json:
            typer.echo(f"{report.method} on {report.model}\n{table(report.checks)}\n")
    if as_json:
        typer.echo(json.dumps({"passed": passed, "reports": rows}))
    if not passed:
        raise typer.Exit(1)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/methods.md."""
    from agentkv.runtime_crossover import told

    columns = (
        "method", "family", "paper", "exactness", "reuse", "options", "bytes a token", "faster than dense", "not served",
        "what it does",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        options = ", ".join(f"{name}={value or '(given)'}" for name, value in row["options"].items())
        refused = ", ".join(name for name, why in row["models"].items() if why)
        size = row["preparation"] or "-" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:,}"
        said = (
            row["family"],
            row["paper"] or "-",
            row["exactness"],
            row["reuse"],
            options or "-",
            size,
            told(row["crossover"]),
            refused or "-",
            row["summary"],
        )
        lines.append(f"| `{row['name']}` | {' | '.join(said)} |")
    return "\n".join(lines)


def _write(doc: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace what stands between the marks."""
    try:
        before, _, rest = doc.read_text().partition(f"{MARK}\n")
    except OSError as error:
        raise BadRequest(f"{doc}: {error}", param="doc") from None
    _, end, after = rest.partition(MARK_END)
    if not end:
        raise BadRequest(f"{doc} has no {MARK} and {MARK_END}", param="doc")
    doc.write_text(f"{before}{MARK}\n{markdown(rows)}\n{end}{after}")
