"""The small command grammar of the world, shared by the real shell and the simulator.

`parse` turns a command line into one frozen command object or raises `Refused`.  Nothing
here touches a file.  Refused commands have the exit status of a shell's syntax error, 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 4096
_WORD = re.compile(r"'([^']*)'|([A-Za-z0-9_./,:=+@%^-]+)|(>)|( +)")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_PATTERN = re.compile(r"\^?[A-Za-z0-9_ =.,:-]*\$?")
_SCRIPT = re.compile(r"s/\^([A-Za-z0-9_ =,:-]*)\$/([A-Za-z0-9_ =.,:-]*)/")
_COUNT = re.compile(r"[1-9][0-9]{0,3}")


class Refused(ValueError):
    """The command line is not in the grammar; the text is what the tool answers."""

    code = 2


@dataclass(frozen=True)
class Ls:
    """List the directory, or name one file."""

    path: str | None


@dataclass(frozen=True)
class Cat:
    """Print files."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class Head:
    """Print the first lines of a file."""

    path: str
    count: int


@dataclass(frozen=True)
class Grep:
    """Print the lines of a file that match a simple pattern."""

    pattern: str
    path: str


@dataclass(frozen=True)
class Sed:
    """Replace lines that equal `old` by `new`, in place."""

    old: str
    new: str
    path: str

    @property
    def script(self) -> str:
        """The `sed` script."""
        return f"s/^{self.old}$/{self.new}/"


@dataclass(frozen=True)
class Echo:
    """Print words, or write them to a file."""

    text: str
    path: str | None


@dataclass(frozen=True)
class RunFile:
    """Run a program file with `python3` or `sh`."""

    interpreter: str
    path: str


Command = Ls | Cat | Head | Grep | Sed | Echo | RunFile


def _words(line: str) -> list[tuple[str, bool]]:
    """Words of a line, each with whether it is the bare operator `>`."""
    if len(line) > LONGEST:
        raise Refused(f"refused: a command has at most {LONGEST} characters")
    if any(not 32 <= ord(c) < 127 for c in line):
        raise Refused("refused: a command is one line of plain ASCII")
    words: list[tuple[str, bool]] = []
    glued = False
    at = 0
    while at < len(line):
        found = _WORD.match(line, at)
        if found is None:
            raise Refused(f"refused: the character {line[at]} is not in the grammar")
        at = found.end()
        quoted, bare, operator, _ = found.groups()
        if operator:
            words.append((">", True))
            glued = False
        elif quoted is None and bare is None:
            glued = False
        else:
            text = quoted if quoted is not None else bare
            if glued:
                words[-1] = (words[-1][0] + text, False)
            else:
                words.append((text, False))
            glued = True
    return words


def path_of(text: str) -> str:
    """A relative path without `.` and `..` parts; anything else is refused."""
    if not _PATH.fullmatch(text):
        raise Refused(f"refused: {text[:80] or 'an empty name'} is not a path inside the directory")
    return text


def parse(line: str) -> Command:
    """The command that a line stands for."""
    words = _words(line)
    if not words or words[0][1]:
        raise Refused("refused: no command")
    name = words[0][0]
    if name == "echo":
        return _echo(words[1:])
    if any(operator for _, operator in words):
        raise Refused("refused: only echo may use >")
    args = [text for text, _ in words[1:]]
    if name == "ls" and len(args) <= 1:
        return Ls(path_of(args[0]) if args and args[0] != "." else None)
    if name == "cat" and args:
        return Cat(tuple(path_of(a) for a in args))
    if name == "head":
        return _head(args)
    if name == "grep" and len(args) == 2:
        if not args[0] or args[0].startswith("-") or not _PATTERN.fullmatch(args[0]):
            raise Refused("refused: grep takes a pattern of letters, digits and = . ^ $")
        return Grep(args[0], path_of(args[1]))
    if name == "sed":
        return _sed(args)
    if name in ("python3", "sh") and len(args) == 1:
        return RunFile(name, path_of(args[0]))
    if name in ("ls", "cat", "grep", "python3", "sh"):
        raise Refused(f"refused: {name} is not used like this here")
    raise Refused(f"refused: {name[:80]} is not one of ls cat head grep sed echo python3 sh")


def _echo(words: list[tuple[str, bool]]) -> Echo:
    targets = [i for i, (_, operator) in enumerate(words) if operator]
    if not targets:
        texts, path = words, None
    elif len(targets) == 1 and targets[0] == len(words) - 2:
        texts, path = words[:-2], path_of(words[-1][0])
    else:
        raise Refused("refused: echo TEXT > FILE")
    if texts and texts[0][0].startswith("-"):
        raise Refused("refused: echo takes no options here")
    return Echo(" ".join(text for text, _ in texts), path)


def _head(args: list[str]) -> Head:
    if len(args) == 1:
        return Head(path_of(args[0]), 10)
    if len(args) == 3 and args[0] == "-n" and _COUNT.fullmatch(args[1]):
        return Head(path_of(args[2]), int(args[1]))
    raise Refused("refused: head -n COUNT FILE")


def _sed(args: list[str]) -> Sed:
    if len(args) == 3 and args[0] == "-i":
        found = _SCRIPT.fullmatch(args[1])
        if found:
            return Sed(found[1], found[2], path_of(args[2]))
    raise Refused("refused: sed -i 's/^OLD LINE$/NEW LINE/' FILE")
