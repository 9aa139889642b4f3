"""`agentkv demo`: one task of the agent world, live, with pruning; then the session is resumed in a second process.

Nothing outside a temporary directory is touched: the model's commands go through the world's small grammar (see
`agentkv.world.shell`). The session lives in the user's store while the demo runs and is deleted at its end.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from agentkv.runtime import Runtime, Session
from agentkv.tools.run import ToolFinished
from agentkv.types import ToolCallReady, Turn, TurnDone
from agentkv.world.dialect import NATIVE
from agentkv.world.env import World
from agentkv.world.task import Followup, Task, make_task

MAX_TURNS = 24
ANSWER_TOKENS = 32
RESUME_SECONDS = 240

Show = Callable[[str], None]


def printer(stream: TextIO) -> Show:
    """A `show` that writes marked-up lines to a stream, in colour where it is a terminal."""
    from rich.console import Console

    console = Console(file=stream, highlight=False, soft_wrap=True)
    return console.print


def play_demo(*, seed: int, prune_after: int | None, show: Show, lookup: int = 8) -> dict[str, Any]:
    """Play the task of `seed` with pruning, the same without, and resume the first in a second process.

    prune_after: lag of every result; None takes the shortest with which the task can be solved (later results may need it).
    lookup: see `Runtime`.
    Returns `solved, turns, prompt_tokens, prefilled_tokens, cached_tokens, pruned_tokens, kv_bytes_peak, kv_bytes_unpruned,
    resumed` and a few more (docs/api.md).
    """
    started = time.monotonic()
    show("loading micro, the bundled model ...")
    task = make_task(seed)
    lag = task.metadata.get("lag", 0) + 1 if prune_after is None else prune_after
    session_id = f"demo-{seed}-{secrets.token_hex(6)}"
    with Runtime("micro", lookup=lookup) as runtime:
        show(f"\n[bold]task {seed}[/bold] ({task.family}): {_plain(task.prompt)}")
        show(f"each tool result is pruned from the KV cache {lag} results later")
        with World(task) as world:
            session = runtime.session(id=session_id, system=NATIVE.system, tools=[world.bash])
            played = _play(session, world, task, lag, show)
        pruned_peak = runtime.stats()["peak_bytes"]
        session.close()
    show("\nthe same task without pruning, for comparison ...")
    unpruned_peak = _unpruned_peak(task, lookup)
    show("the session is closed; a second process resumes it from the store, by its id alone ...")
    followup = _resume_elsewhere(session_id)
    if followup["question"]:
        mark = "right" if followup["right"] else "wrong"
        show(
            f"  asked [bold]{_plain(followup['question'])}[/bold]  answered [bold]{_plain(followup['answer'])}[/bold]  ({mark})"
        )
    with Runtime("micro") as runtime:
        runtime.delete(session_id)
    result = {
        **played,
        "kv_bytes_peak": pruned_peak,
        "kv_bytes_unpruned": unpruned_peak,
        "resumed": bool(followup["right"]),
        "seconds": round(time.monotonic() - started, 1),
    }
    _table(result, show)
    return result


def _play(session: Session, world: World, task: Task, prune_after: int, show: Show) -> dict[str, Any]:
    """Let the model act until it stops; count what its turns cost."""
    turns: list[Turn] = []
    due: set[str] = set()
    commands: dict[str | None, str] = {}

    def on_event(event: Any) -> None:
        if isinstance(event, ToolCallReady):
            commands[event.call.id] = _plain(str(event.call.arguments.get("command", "")))
            show(f"[cyan]turn {len(turns) + 1:2}[/cyan]  $ {commands[event.call.id]}")
        elif isinstance(event, ToolFinished):
            show(f"         {_plain(_excerpt(event.content))}")
        elif isinstance(event, TurnDone):
            turns.append(event.turn)
            for gone in event.turn.pruned_now:
                show(f"         [yellow]pruned[/yellow] {gone.tokens} tokens: the result of {commands[gone.call_id]}")
            for span in session.spans():
                if span.state == "due" and span.id not in due:
                    due.add(span.id)
                    show(f"         [magenta]due[/magenta]    {span.tokens} tokens: the result of {commands[span.call_id]}")

    session.add_user(task.prompt)
    session.run(max_turns=MAX_TURNS, prune_after=prune_after, on_event=on_event)
    solved = world.verdict()
    show(f"         [bold]{'solved' if solved else 'not solved'}[/bold], says the world")
    return {"solved": solved, "turns": len(turns), **_sum(turns)}


def _sum(turns: list[Turn]) -> dict[str, int]:
    usages = [turn.usage for turn in turns]
    names = ("prompt_tokens", "prefilled_tokens", "cached_tokens")
    totals = {name: sum(getattr(usage, name) for usage in usages) for name in names}
    return {**totals, "pruned_tokens": usages[-1].pruned_tokens if usages else 0}


def _unpruned_peak(task: Task, lookup: int) -> int:
    """Peak KV bytes of the same task played without pruning, read from a fresh arena."""
    with Runtime("micro", db=None, lookup=lookup) as runtime, World(task) as world:
        session = runtime.session(system=NATIVE.system, tools=[world.bash])
        session.add_user(task.prompt)
        session.run(max_turns=MAX_TURNS)
        peak: int = runtime.stats()["peak_bytes"]
    return peak


def _resume_elsewhere(session_id: str) -> dict[str, Any]:
    """Run `answer_followup` in a second process that is given the session's id and nothing else."""
    command = [sys.executable, "-m", "agentkv.world.demo", session_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RESUME_SECONDS, check=False)
    if done.returncode != 0:
        return {"question": "", "answer": done.stderr.strip()[-500:], "right": False}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def answer_followup(session_id: str) -> dict[str, Any]:
    """Resume the session and ask about something that stands in its earlier, unpruned conversation."""
    task = make_task(int(session_id.split("-")[1]))
    with Runtime("micro") as runtime, runtime.resume(session_id) as session:
        asked = choose_followup(task, session)
        session.add_user(asked.question)
        turn = session.generate(max_tokens=ANSWER_TOKENS)
    with World(task) as world:
        right = world.check_followup(asked.question, turn.text)
    return {"question": asked.question, "answer": turn.text, "right": right}


def choose_followup(task: Task, session: Session) -> Followup:
    """The earliest question whose answer stands in a result that stays; else one on the model's own words.

    Results that are due are pruned when the next turn starts, before the question can be answered.
    """
    results = [span for span in session.spans() if span.kind == "tool_result"]
    kept = {index for index, span in enumerate(results) if span.state in ("live", "pinned")}
    known = [item for item in task.followups if item.result_index in kept]
    return known[0] if known else next(item for item in task.followups if item.result_index is None)


def _table(result: dict[str, Any], show: Show) -> None:
    late = f"{result['kv_bytes_unpruned']:,}  (pruned too late in this task to lower the peak)"
    saved = 1 - result["kv_bytes_peak"] / max(1, result["kv_bytes_unpruned"])
    rows = [
        ("turns", f"{result['turns']}"),
        ("prompt tokens", f"{result['prompt_tokens']:,}"),
        ("  prefilled", f"{result['prefilled_tokens']:,}"),
        ("  cached", f"{result['cached_tokens']:,}"),
        ("pruned tokens", f"{result['pruned_tokens']:,}"),
        ("KV bytes, peak", f"{result['kv_bytes_peak']:,}"),
        ("  without pruning", f"{result['kv_bytes_unpruned']:,}  ({saved:.0%} saved)" if saved > 0 else late),
        ("solved", "yes" if result["solved"] else "no"),
        ("resumed elsewhere", "yes" if result["resumed"] else "no"),
    ]
    show("")
    for name, value in rows:
        show(f"  {name:20} {value}")


def _excerpt(text: str, width: int = 90) -> str:
    first, _, rest = text.partition("\n")
    more = f"  (+{rest.count(chr(10)) + 1} lines)" if rest else ""
    return (first[:width] or "(no output)") + more


def _plain(text: str) -> str:
    """Text of the model or the world, so that it is never read as markup."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    print(json.dumps(answer_followup(sys.argv[1])))
