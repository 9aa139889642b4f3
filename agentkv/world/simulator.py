"""The world's commands in plain Python on a dictionary of files.

`Simulator.run` answers with the same bytes and exit status as the real commands in
`shell.py`; a test holds the two equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentkv.world.command import Cat, Command, Echo, Grep, Head, Ls, Refused, RunFile, Sed, parse
from agentkv.world.programs import Program

CAP = 65_536
Outcome = tuple[str, int]


class Simulator:
    """A directory in memory.  `files` maps paths to text; programs run only while unchanged."""

    def __init__(self, files: Mapping[str, str], programs: Mapping[str, Program]) -> None:
        self.files = dict(files)
        self.programs = dict(programs)

    def run(self, line: str) -> Outcome:
        """Output and exit status of one command line; never raises."""
        try:
            output, code = self._run(parse(line))
        except Refused as refusal:
            return f"{refusal}\n", refusal.code
        return cap(output), code

    def _run(self, command: Command) -> Outcome:
        match command:
            case Ls(path):
                return self._ls(path)
            case Cat(paths):
                return self._cat(paths)
            case Head(path, count):
                return self._head(path, count)
            case Grep(pattern, path):
                return self._grep(pattern, path)
            case Sed():
                return self._sed(command)
            case Echo(text, path):
                return self._echo(text, path)
            case RunFile():
                return self._program(command)

    def _problem(self, path: str) -> str | None:
        """Why `path` cannot be read, in the words of the C library."""
        if path in self.files:
            return None
        if self._is_dir(path):
            return "Is a directory"
        parts = path.split("/")
        if any("/".join(parts[:i]) in self.files for i in range(1, len(parts))):
            return "Not a directory"
        return "No such file or directory"

    def _is_dir(self, path: str) -> bool:
        return any(name.startswith(path + "/") for name in self.files)

    def _ls(self, path: str | None) -> Outcome:
        if path is not None and not self._is_dir(path):
            problem = self._problem(path)
            return (f"ls: cannot access '{path}': {problem}\n", 2) if problem else (f"{path}\n", 0)
        base = f"{path}/" if path else ""
        names = {name[len(base) :].split("/")[0] for name in self.files if name.startswith(base)}
        return "".join(f"{name}\n" for name in sorted(names)), 0

    def _cat(self, paths: tuple[str, ...]) -> Outcome:
        output, code = "", 0
        for path in paths:
            problem = self._problem(path)
            if problem:
                output, code = output + f"cat: {path}: {problem}\n", 1
            else:
                output += self.files[path]
        return output, code

    def _head(self, path: str, count: int) -> Outcome:
        problem = self._problem(path)
        if problem == "Is a directory":
            return f"head: error reading '{path}': {problem}\n", 1
        if problem:
            return f"head: cannot open '{path}' for reading: {problem}\n", 1
        return "".join(self.files[path].splitlines(keepends=True)[:count]), 0

    def _grep(self, pattern: str, path: str) -> Outcome:
        problem = self._problem(path)
        if problem:
            return f"grep: {path}: {problem}\n", 2
        body = pattern.removeprefix("^").removesuffix("$")
        source = ("^" if pattern.startswith("^") else "") + re.escape(body).replace(r"\.", ".")
        rule = re.compile(source + ("$" if pattern.endswith("$") else ""))
        lines = [line for line in self.files[path].splitlines() if rule.search(line)]
        return "".join(f"{line}\n" for line in lines), int(not lines)

    def _sed(self, command: Sed) -> Outcome:
        problem = self._problem(command.path)
        if problem == "Is a directory":
            return f"sed: couldn't edit {command.path}: not a regular file\n", 4
        if problem:
            return f"sed: can't read {command.path}: {problem}\n", 2
        lines = self.files[command.path].split("\n")
        last = len(lines) - 1
        # The piece after the final newline is no line.
        edited = [command.new if line == command.old and not (i == last and not line) else line for i, line in enumerate(lines)]
        self.files[command.path] = "\n".join(edited)
        return "", 0

    def _echo(self, text: str, path: str | None) -> Outcome:
        if path is None:
            return f"{text}\n", 0
        problem = self._problem(path)
        if problem and (problem != "No such file or directory" or "/" in path):
            return f"echo: cannot write {path}\n", 2
        self.files[path] = f"{text}\n"
        return "", 0

    def _program(self, command: RunFile) -> Outcome:
        program = self.programs.get(command.path)
        if program is None or self.files.get(command.path) != program.source() or not runs(command):
            return refuse_program(command)
        return program.run(command.path, self.files)


def runs(command: RunFile) -> bool:
    """Whether the interpreter goes with the file's name."""
    return command.path.endswith({"python3": ".py", "sh": ".sh"}[command.interpreter])


def refuse_program(command: RunFile) -> Outcome:
    """The answer for a program that is missing, changed or not the world's."""
    return f"{command.interpreter}: {command.path} is not a program of this directory\n", 2


def cap(output: str) -> str:
    """Cut long output."""
    return output if len(output) <= CAP else output[:CAP] + "\n[output cut]\n"
