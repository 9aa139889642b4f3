"""The programs that a world may run: each has a source text and a twin in plain Python.

The source is what the real interpreter runs; `run` is what the simulator answers.  A test
holds the two equal.
"""

from __future__ import annotations

import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Protocol

_CHECK = """import sys
import zlib

want = {want}
rest = {rest}
found = {{}}
other = 0
with open("m.py", encoding="utf-8", errors="replace", newline="\\n") as file:
    for line in file.read().split("\\n"):
        name, _, value = line.partition(" = ")
        if name in want:
            found[name] = value
        else:
            other = zlib.crc32(line.encode(), other)
for name, code in want.items():
    value = found.get(name, "")
    if zlib.crc32((name + " = " + value).encode()) != code:
        print("m.py: " + name + " = " + value + " is not as in the spec")
        sys.exit(1)
if other != rest:
    print("m.py: another line was changed")
    sys.exit(1)
print("ok")
"""


class Program(Protocol):
    """A file of the world that may be run."""

    def source(self) -> str:
        """The file's text."""

    def run(self, path: str, files: MutableMapping[str, str]) -> tuple[str, int]:
        """What running the file at `path` prints and returns; may change `files`."""


@dataclass(frozen=True)
class Once:
    """A shell script that prints some lines and deletes itself."""

    name: str
    lines: tuple[str, ...]

    def source(self) -> str:
        """The file's text."""
        return "cat <<'END'\n" + "".join(line + "\n" for line in self.lines) + f"END\nrm {self.name}\n"

    def run(self, path: str, files: MutableMapping[str, str]) -> tuple[str, int]:
        """Print the lines and remove the file."""
        del files[self.name]
        return "".join(line + "\n" for line in self.lines), 0


@dataclass(frozen=True)
class Show:
    """A shell script that prints some lines, as often as it is run."""

    lines: tuple[str, ...]

    def source(self) -> str:
        """The file's text."""
        return "cat <<'END'\n" + "".join(line + "\n" for line in self.lines) + "END\n"

    def run(self, path: str, files: MutableMapping[str, str]) -> tuple[str, int]:
        """Print the lines."""
        return "".join(line + "\n" for line in self.lines), 0


@dataclass(frozen=True)
class Rewrite:
    """A shell script that replaces the text of `target`."""

    target: str
    lines: tuple[str, ...]

    def source(self) -> str:
        """The file's text."""
        return f"cat > {self.target} <<'END'\n" + "".join(line + "\n" for line in self.lines) + "END\n"

    def run(self, path: str, files: MutableMapping[str, str]) -> tuple[str, int]:
        """Write the file and print nothing."""
        files[self.target] = "".join(line + "\n" for line in self.lines)
        return "", 0


@dataclass(frozen=True)
class Check:
    """A test that reads `m.py` as text and compares checksums, so it gives no value away."""

    want: tuple[tuple[str, int], ...]
    rest: int

    @classmethod
    def of(cls, module: str, right: dict[str, str]) -> Check:
        """The check that passes when `module` has the values of `right` and is else unchanged."""
        want = tuple((name, _line(name, value)) for name, value in right.items())
        return cls(want, _rest(module, set(right)))

    def source(self) -> str:
        """The file's text."""
        return _CHECK.format(want=dict(self.want), rest=self.rest)

    def run(self, path: str, files: MutableMapping[str, str]) -> tuple[str, int]:
        """Name the first constant that is wrong, or print ok."""
        module = files["m.py"]
        want = dict(self.want)
        found: dict[str, str] = {}
        for line in module.split("\n"):
            name, _, value = line.partition(" = ")
            if name in want:
                found[name] = value
        for name, code in want.items():
            value = found.get(name, "")
            if _line(name, value) != code:
                return f"m.py: {name} = {value} is not as in the spec\n", 1
        if _rest(module, set(want)) != self.rest:
            return "m.py: another line was changed\n", 1
        return "ok\n", 0


def _line(name: str, value: str) -> int:
    return zlib.crc32(f"{name} = {value}".encode())


def _rest(module: str, names: set[str]) -> int:
    other = 0
    for line in module.split("\n"):
        if line.partition(" = ")[0] not in names:
            other = zlib.crc32(line.encode(), other)
    return other
