"""A task in a real temporary directory, with the tool that acts in it and the verdict.

with World(make_task(7)) as world:
    session = runtime.session(system=SYSTEM, tools=[world.bash])
    ...
    print(world.verdict())
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from agentkv.types import ToolCall
from agentkv.world.dialect import NATIVE, Dialect, Place
from agentkv.world.expert import Past, answer
from agentkv.world.shell import Shell
from agentkv.world.task import Task


class World:
    """Files of a task on disk.  Leaving the context removes them."""

    def __init__(self, task: Task, dialect: Dialect = NATIVE) -> None:
        self.task = task
        self.dialect = dialect
        self.root = Path(tempfile.mkdtemp(prefix="agentkv-world-"))
        self.history: list[Past] = []
        for path, text in task.files.items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
        self.place = Place(str(self.root), "/usr/bin/python3")
        self.finished = False
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
        return self.dialect.body(output, code, self.place)

    def execute(self, call: ToolCall) -> str:
        """Run a tool call of the dialect: a command, or the call that hands the work in."""
        finish = self.dialect.finish()
        if finish is not None and call.name == finish[0]["function"]["name"] != self.dialect.call("")["function"]["name"]:
            self.finished = True
            return str(call.arguments.get("message", finish[1]))
        return self.bash(str(call.arguments.get("command", "")))

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
