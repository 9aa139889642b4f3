"""`agentkv sessions`: look at and edit the stored sessions of this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from agentkv.errors import BadRequest
from agentkv.runtime import DEFAULT, Runtime, open_store, transcript

app = typer.Typer(help="Stored sessions: ls, show, spans, plan, prune, fork, rm.", no_args_is_help=True)

Db = Annotated[str | None, typer.Option(help="Database: a path or an SQLAlchemy URL. Default: the user's data folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")]
Id = Annotated[str, typer.Argument(help="Session id.")]
Model = Annotated[str | None, typer.Option(help="Model to load. Default: the one the session was made with.")]


def _store(db: str | None) -> Any:
    """The store to look at; looking at a path where none is does not make one."""
    if db is not None and "://" not in db and not Path(db).expanduser().exists():
        raise BadRequest(f"no database at {db!r}", hint="Leave --db out for the one in your data folder")
    return open_store(db or DEFAULT)


def _out(as_json: bool, value: Any, lines: list[str]) -> None:
    typer.echo(json.dumps(msgspec.to_builtins(value)) if as_json else "\n".join(lines))


@app.command("ls")
def ls(
    everything: Annotated[bool, typer.Option("--all", help="Also those the server made for plain chat requests.")] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, the latest first. State 'stored': no KV here, the next turn prefills."""
    with _store(db) as store:
        rows = [row for row in store.list() if everything or not row.id.startswith("chat-")]
    lines = [
        f"{row.id}  {row.state:6} {row.turns:4} turns {row.tokens:8,} tokens  {row.model}  "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(row.updated))}"
        for row in rows
    ]
    _out(as_json, {"sessions": rows}, lines or ["no sessions"])


@app.command("show")
def show(session_id: Id, db: Db = None, as_json: AsJson = False) -> None:
    """Print a session's transcript."""
    with _store(db) as store:
        messages = transcript(store, session_id)
    lines = []
    for message in messages:
        calls = "".join(
            f" [{call['function']['name']} {call['function']['arguments']}]" for call in message.get("tool_calls", [])
        )
        lines.append(f"{message['role']}: {message.get('content') or ''}{calls}")
    _out(as_json, {"id": session_id, "messages": messages}, lines)


@app.command("spans")
def spans(session_id: Id, db: Db = None, as_json: AsJson = False) -> None:
    """Print a session's spans: interval, state, tokens."""
    with _store(db) as store:
        rows = store.spans(session_id)
    lines = [
        f"{row.id}  turn {row.turn:3}  {row.kind:11} {row.state:8} {row.tokens:6} tokens  {row.tool_name or ''}" for row in rows
    ]
    _out(as_json, {"id": session_id, "spans": rows}, lines)


@app.command("plan")
def plan(
    session_id: Id,
    span: Annotated[list[str] | None, typer.Option(help="Span to prune; repeatable. Default: what is due.")] = None,
    mode: Annotated[str, typer.Option(help="in_place or rebuild")] = "in_place",
    model: Model = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Price a prune before making it."""
    with _opened(session_id, model, db) as (session, _):
        priced = session.plan({"spans": span, "mode": mode} if span else None)
    _out(
        as_json,
        priced,
        [f"frees {priced.frees_tokens} tokens ({priced.frees_now:,} bytes now), prefills {priced.prefill_tokens}"],
    )


@app.command("prune")
def prune(
    session_id: Id,
    span: Annotated[list[str], typer.Option(help="Span to prune; repeatable.")],
    keep: Annotated[str, typer.Option(help="drop or edges:N")] = "drop",
    mode: Annotated[str, typer.Option(help="in_place or rebuild")] = "in_place",
    model: Model = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Prune spans of a session."""
    with _opened(session_id, model, db) as (session, _):
        pruned = session.prune(span, keep=keep, mode=mode)
    _out(as_json, {"pruned": pruned}, [f"{row.span_id}  {row.tokens} tokens" for row in pruned])


@app.command("fork")
def fork(
    session_id: Id,
    at: Annotated[int | None, typer.Option(help="Turn to fork at. Default: now.")] = None,
    model: Model = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Fork a session; the parent is left alone."""
    with _opened(session_id, model, db) as (session, _):
        child = session.fork(at=at)
        child.suspend()
    _out(as_json, {"id": child.id, "parent": session_id}, [child.id])


@app.command("rm")
def rm(session_id: Id, db: Db = None, as_json: AsJson = False) -> None:
    """Delete a session and its text."""
    with _store(db) as store:
        store.delete(session_id)
    _out(as_json, {"deleted": session_id}, [f"deleted {session_id}"])


class _opened:
    """A session with its model loaded, for the length of a `with`."""

    def __init__(self, session_id: str, model: str | None, db: str | None) -> None:
        if model is None:
            with _store(db) as store:
                model = store.info(session_id).model
        self._runtime = Runtime(model, db=db or DEFAULT)
        self._id = session_id

    def __enter__(self) -> tuple[Any, Runtime]:
        try:
            return self._runtime.resume(self._id), self._runtime
        except BaseException:
            self._runtime.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._runtime.close()
