"""The command line: `agentkv demo | chat | run | serve | sessions | methods | bench | warmup | doctor`.

With `--json` every command prints one object as its last line on stdout; what a person reads goes to stderr then.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agentkv.cli_bench import app as bench_app
from agentkv.cli_doctor import doctor
from agentkv.cli_methods import app as methods_app
from agentkv.cli_sessions import app as sessions_app
from agentkv.cli_warmup import warmup
from agentkv.errors import AgentkvError, BadRequest
from agentkv.types import Policy, options_of

app = typer.Typer(name="agentkv", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(sessions_app, name="sessions")
app.add_typer(methods_app, name="methods")
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(warmup)

Model = Annotated[str, typer.Option(help="'micro', a Hugging Face directory or a .gguf file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, the last line on stdout.")]
Db = Annotated[str | None, typer.Option(help="Database: a path or an SQLAlchemy URL. Default: the user's data folder.")]
Lookup = Annotated[
    int, typer.Option(min=0, max=8, help="Tokens of a session that a step may check: the next one and guesses. 0: no guesses.")
]
Lag = Annotated[int | None, typer.Option(help="Prune each tool result this many results later. Default: never.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Coding agents that stay resident on your own GPU."""
    if version:
        import agentkv

        typer.echo(agentkv.__version__)
        raise typer.Exit


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, max=999_999, help="Which task.")] = 24,
    prune_after: Annotated[
        int | None,
        typer.Option(min=0, help="Prune each tool result this many results later. Default: the least the task allows."),
    ] = None,
    lookup: Lookup = 8,
    as_json: AsJson = False,
) -> None:
    """Watch the bundled model work through one task, with pruning, then resume it in a second process."""
    from agentkv.world.demo import play_demo, printer

    show = printer(sys.stderr if as_json else sys.stdout)
    result = play_demo(seed=seed, prune_after=prune_after, show=show, lookup=lookup)
    if as_json:
        typer.echo(json.dumps(result))
    if not (result["solved"] and result["resumed"]):
        raise typer.Exit(1)


@app.command()
def chat(
    model: Model = "micro",
    resume: Annotated[str | None, typer.Option(help="Id of a session to go on with.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new session.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    db: Db = None,
) -> None:
    """Talk to a model; the session stays and can be resumed. End with Ctrl-D."""
    from agentkv.runtime import DEFAULT, Runtime
    from agentkv.types import TextDelta

    with Runtime(model, db=db or DEFAULT) as runtime:
        with runtime.resume(resume) if resume else runtime.session(system=system) as session:
            typer.echo(f"session {session.id}", err=True)
            while True:
                try:
                    line = input("> ")
                except (EOFError, KeyboardInterrupt):
                    break
                session.add_user(line)
                with session.stream(max_tokens=max_tokens) as stream:
                    for event in stream:
                        if isinstance(event, TextDelta):
                            typer.echo(event.text, nl=False)
                usage = stream.turn.usage
                typer.echo(f"\n[{usage.prompt_tokens} prompt, {usage.cached_tokens} cached]", err=True)
            typer.echo(f"\nresume with: agentkv chat --model {model} --resume {session.id}", err=True)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What the agent should do.")],
    model: Model = "micro",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    bash: Annotated[bool, typer.Option("--bash", help="Give the model an UNRESTRICTED shell on this machine.")] = False,
    max_turns: Annotated[int, typer.Option(help="Most turns.")] = 50,
    prune_after: Lag = None,
    resume: Annotated[str | None, typer.Option(help="Id of a session to go on with.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Run the tool loop on one prompt. Without --bash the model has no tools."""
    from agentkv.runtime import DEFAULT, Runtime
    from agentkv.tools.bash import bash as unrestricted

    tools = [unrestricted] if bash else []
    with Runtime(model, db=db or DEFAULT) as runtime:
        with runtime.resume(resume, tools=tools) if resume else runtime.session(system=system, tools=tools) as session:
            session.add_user(prompt)
            turn = session.run(max_turns=max_turns, prune_after=prune_after, on_event=None if as_json else _tell)
            if as_json:
                typer.echo(json.dumps({"session_id": session.id, "turn": _plain(turn)}))
            else:
                typer.echo(f"\nsession {session.id}", err=True)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="'micro', a Hugging Face directory or a .gguf file.")] = "micro",
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8000,
    method: Annotated[str, typer.Option(help="Attention method, or 'name:option=value,option=value'.")] = "dense",
    also: Annotated[list[str] | None, typer.Option(help="Another that sessions may name; repeatable.")] = None,
    memory: Annotated[str | None, typer.Option(help="KV arena: bytes, like 2GiB, or auto.")] = None,
    warm_memory: Annotated[
        str | None, typer.Option(help="Host memory for the KV of idle sessions, like 2GiB; 0: none. Default: none on CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    window: Annotated[int | None, typer.Option(help="Most logical tokens of a session. Default: the model's.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Slots of a KV page. Default: 128 on CPU, 16 on a GPU.")] = None,
    step_timeout: Annotated[float | None, typer.Option(help="Seconds until a step is taken for lost. Default: 300.")] = None,
    lookup: Lookup = 8,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. Default: torch's number.")] = None,
    graphs: Annotated[bool, typer.Option(help="On a GPU, replay decode steps from CUDA graphs.")] = True,
    attention: Annotated[str, typer.Option(help="Decode attention: auto, triton or flashinfer.")] = "auto",
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="AGENTKV_API_KEY", help="Accepted bearer key; repeatable.")
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="JSON file with the default pruning policy.")] = None,
    warmup: Annotated[bool, typer.Option("--warmup", help="Compile and capture before serving, as `agentkv warmup`.")] = False,
    db: Db = None,
) -> None:
    """Serve the OpenAI API and /v1/sessions."""
    import uvicorn

    from agentkv.runtime import DEFAULT, Runtime
    from agentkv.server.app import create_app, paste_lines

    default_policy = _policy_file(policy) if policy else None
    _check_free(host, port)
    sizes: dict[str, Any] = {"memory": memory, "window": window, "page_size": page_size, "warm_memory": warm_memory}
    sizes |= {"step_timeout": step_timeout, "lookup": lookup, "threads": threads, "graphs": graphs, "attention": attention}
    sizes["methods"] = also or ()
    with Runtime(model, method=method, device=device, dtype=dtype, db=db or DEFAULT, **sizes) as runtime:
        if warmup:
            rounds = runtime.warm_up()
            typer.echo(f"warm after {sum(each['seconds'] for each in rounds):.1f} s", err=True)
        lines = paste_lines(f"http://{host}:{port}", runtime.model_name, runtime.window)
        typer.echo(lines.replace('"none"', '"YOUR_KEY"') if api_key else lines, err=True)
        served = create_app(runtime, api_keys=tuple(api_key or ()), policy=default_policy)
        uvicorn.run(served, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


def _tell(event: Any) -> None:
    """Print one event of a running tool loop for a person."""
    from agentkv.types import TextDelta, ToolCallReady

    if isinstance(event, TextDelta):
        typer.echo(event.text, nl=False)
    elif isinstance(event, ToolCallReady):
        typer.echo(f"\n[{event.call.name} {json.dumps(event.call.arguments)}]", err=True)


def _check_free(host: str, port: int) -> None:
    """Refuse a port that is taken before a model is loaded for it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadRequest(f"cannot listen on {host}:{port}: {error}", hint="Choose another --port or --host") from None


def _policy_file(path: Path) -> Policy:
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRequest(f"policy file {path}: {error}", hint='A JSON object like {"prune_after": 4}') from None
    policy: Policy = options_of(Policy, given, f"policy file {path}")
    return policy


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def guarded(command: Callable[[], Any]) -> int:
    """Run the command line; an AgentkvError becomes a message on stderr and exit code 2 (bad request) or 1."""
    try:
        command()
    except AgentkvError as error:
        typer.echo(f"agentkv: {error.code}: {error}", err=True)
        if "--json" in sys.argv:
            typer.echo(json.dumps({"error": _plain(error.to_wire())}))
        return 2 if isinstance(error, BadRequest) else 1
    return 0


def main() -> None:
    """Entry point of the `agentkv` command."""
    sys.exit(guarded(app))


if __name__ == "__main__":
    main()
