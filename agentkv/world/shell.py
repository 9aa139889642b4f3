"""The world's real tool: a small grammar run by the real commands inside one directory.

Nothing of a command line reaches a shell: `command.parse` accepts a few forms, every path is
resolved below the directory without following links, and programs run only if the world wrote
them and their bytes are unchanged.  Children get no inherited environment, five seconds and
64 KB of output.  Whatever a command line holds, the answer is text and an exit status.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from agentkv.world.command import Cat, Command, Echo, Grep, Head, Ls, Refused, RunFile, Sed, parse
from agentkv.world.simulator import CAP, Outcome, cap, refuse_program, runs

SECONDS = 5.0
_PATH = "/usr/bin:/bin"


class Shell:
    """Runs command lines in `root`; `programs` maps paths to the texts that may be run."""

    def __init__(self, root: Path, programs: Mapping[str, str]) -> None:
        self.root = root.resolve()
        self.hashes = {path: _digest(text.encode()) for path, text in programs.items()}

    def run(self, line: str) -> Outcome:
        """Output and exit status of one command line; never raises."""
        try:
            return self._run(parse(line))
        except Refused as refusal:
            return f"{refusal}\n", refusal.code
        except (OSError, ValueError) as error:
            return f"refused: {type(error).__name__}\n", 2

    def _run(self, command: Command) -> Outcome:
        match command:
            case Ls(path):
                return self._exec(["ls", *([] if path is None else ["--", self._inside(path)])])
            case Cat(paths):
                return self._exec(["cat", "--", *(self._inside(path) for path in paths)])
            case Head(path, count):
                return self._exec(["head", "-n", str(count), "--", self._inside(path)])
            case Grep(pattern, path):
                return self._exec(["grep", "-e", pattern, "--", self._inside(path)])
            case Sed():
                return self._exec(["sed", "--sandbox", "-i", "-e", command.script, "--", self._inside(command.path)])
            case Echo(text, path):
                return (f"{text}\n", 0) if path is None else self._echo(text, self._inside(path))
            case RunFile():
                return self._program(command)

    def _inside(self, path: str) -> str:
        """`path` itself, when no part of it is a link; else it is refused."""
        at = self.root
        for part in path.split("/"):
            at = at / part
            if at.is_symlink():
                raise Refused(f"refused: {path} goes through a link")
        if not at.resolve().is_relative_to(self.root):
            raise Refused(f"refused: {path} is outside the directory")
        return path

    def _echo(self, text: str, path: str) -> Outcome:
        """Write one line; a new file is made, a link or directory is never opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(self.root / path, flags, 0o644)
        except OSError:
            return f"echo: cannot write {path}\n", 2
        with os.fdopen(handle, "wb") as file:
            file.write(f"{text}\n".encode("ascii"))
        return "", 0

    def intact(self, path: str) -> bool:
        """Whether the program at `path` is the world's, unchanged, and no link."""
        file = self.root / self._inside(path)
        if path not in self.hashes or not file.is_file():
            return False
        return stat.S_ISREG(file.lstat().st_mode) and _digest(file.read_bytes()) == self.hashes[path]

    def _program(self, command: RunFile) -> Outcome:
        if not self.intact(command.path) or not runs(command):
            return refuse_program(command)
        if command.interpreter == "sh":
            return self._exec(["sh", command.path])
        # Isolated: no site, no environment, and the directory is not on the import path.
        return self._exec([sys.executable, "-I", "-S", "-B", "-X", "utf8", command.path])

    def _exec(self, argv: list[str]) -> Outcome:
        """Run a program with capped time and output; its two streams come as one text."""
        program = argv[0] if os.path.isabs(argv[0]) else shutil.which(argv[0], path=_PATH)
        if program is None:
            return f"{argv[0]}: not found\n", 127
        with subprocess.Popen(
            [program, *argv[1:]] if os.path.isabs(argv[0]) else argv,
            executable=program,
            cwd=self.root,
            env={"LC_ALL": "C", "PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child:
            _limit(child.pid)
            data, late = _collect(child)
            if late or len(data) > CAP:
                _kill(child)
            code = child.wait()
        output = cap(data.decode("utf-8", errors="replace"))
        if late:
            return f"{output}[stopped after {SECONDS:g} s]\n", 124
        # A program stopped for its long output has printed all that is shown.
        return output, 0 if len(data) > CAP else code if code >= 0 else 128 - code


def _collect(child: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
    """Read until the end, the cap or the deadline; says whether the deadline passed."""
    assert child.stdout is not None
    data = bytearray()
    deadline = time.monotonic() + SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while len(data) <= CAP:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return bytes(data), True
            piece = os.read(child.stdout.fileno(), 65_536)
            if not piece:
                break
            data.extend(piece)
    return bytes(data), False


def _limit(pid: int) -> None:
    """Resource limits of a running child, where the system can set them from outside."""
    try:
        import resource

        # From outside, because code between fork and exec is unsafe with threads.
        resource.prlimit(pid, resource.RLIMIT_CPU, (max(1, int(SECONDS)), int(SECONDS) + 2))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    except (ImportError, AttributeError, OSError):
        return  # the child may be gone already


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        child.kill()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
