"""A task in a real temporary directory, with the tool that acts in it and the verdict.

with World(make_task(7)) as world:
    session = runtime.session(system=SYSTEM, tools=[world.bash])
    ...
    print(world.verdict())
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from agentkv.tools.registry import Tool
from agentkv.tools.schema import arguments_type
from agentkv.world.dialect import NATIVE, Dialect, Place
from agentkv.world.expert import Past, answer
from agentkv.world.shell import Shell
from agentkv.world.task import Task


def secrets(task: Task) -> tuple[str, ...]:
    """The words of the answer that stand in results only; in most families the name before them is in the last file."""
    words = task.answer.split()
    return tuple(words[1:] or words)


class World:
    """Files of a task on disk.  Leaving the context removes them.

    With `blank`, what the answer has to copy is struck out of every result: a control, nobody can solve it but by luck.
    """

    def __init__(self, task: Task, dialect: Dialect = NATIVE, blank: bool = False) -> None:
        self.task = task
        self.dialect = dialect
        self.blanks = secrets(task) if blank else ()
        self.root = Path(tempfile.mkdtemp(prefix="agentkv-world-"))
        self.history: list[Past] = []
        for path, text in task.files.items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
        self.place = Place(str(self.root), "/usr/bin/python3")
        self.shell = Shell(self.root, {path: program.source() for path, program in task.programs.items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory; safe to call twice."""
        shutil.rmtree(self.root, ignore_errors=True)

    def bash(self, command: str) -> str:
        """Run one command in the directory."""
        output, code = self.shell.run(command)
        self.history.append(Past(command, code))
        for word in self.blanks:
            output = output.replace(f" {word}", " " + "-" * len(word))
        return self.dialect.body(output, code, self.place)

    @property
    def prompt(self) -> str:
        """The first user message."""
        return self.dialect.prompt(self.task.prompt)

    @property
    def tools(self) -> list[Tool]:
        """The dialect's tools: what runs commands here, and what hands the work in."""
        runs = self.dialect.call("")["function"]["name"]
        made = []
        for schema in self.dialect.tools:
            function = schema["function"]
            run = self._command if function["name"] == runs else self._finish
            made.append(
                Tool(name=function["name"], schema=schema, arguments=arguments_type(run, function["name"]), function=run)
            )
        return made

    def _command(self, command: str, summary: str = "", security_risk: str = "") -> str:
        return self.bash(command)

    def _finish(self, message: str, summary: str = "") -> str:
        return message

    def rereads(self) -> int:
        """Commands that gave their output again though the plan has them once."""
        planned = Counter(step.command for step in self.task.rounds[0].steps)
        ran = Counter(past.command for past in self.history if past.code == 0 and past.command.startswith(("cat ", "sh ")))
        return sum(max(0, times - planned[command]) for command, times in ran.items() if planned[command])

    def verdict(self) -> bool:
        """Whether the task is solved, judged from the real files and real exit statuses."""
        if self._answer() != self.task.answer:
            return False
        tests = [path for path in self.task.programs if path.endswith(".py")]
        return all(self.shell.run(f"python3 {path}")[1] == 0 for path in tests)

    def check_followup(self, question: str, text: str) -> bool:
        """Whether `text` answers a follow-up question of the task."""
        return text.strip() == answer(self.task, question)

    def _answer(self) -> str | None:
        file = self.root / "answer.txt"
        if file.is_symlink() or not file.is_file():
            return None
        return file.read_text(encoding="utf-8", errors="replace").strip()
