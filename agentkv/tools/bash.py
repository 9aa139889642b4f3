"""`agentkv.tools.bash`: UNRESTRICTED shell access for a model. Never used unless you pass it.

The command runs with your rights, your environment and your network, in your working directory. Nothing is checked,
sandboxed or undone. Pass it only inside a container or a machine that you can lose, or behind `approve=`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import IO

TIMEOUT = 60.0
CAP = 64 * 1024


def bash(command: str) -> str:
    """Run a shell command and return its output.

    Args:
        command: The command line, run by bash (or sh where there is none).
    """
    return run_shell(command)


def make_bash(*, timeout: float = TIMEOUT, cap: int = CAP, cwd: str | None = None) -> Callable[[str], str]:
    """A `bash` tool with other limits: seconds, bytes of output, working directory. As unrestricted as `bash`."""

    def limited(command: str) -> str:
        return run_shell(command, timeout=timeout, cap=cap, cwd=cwd)

    limited.__name__, limited.__doc__ = bash.__name__, bash.__doc__
    return limited


def run_shell(command: str, *, timeout: float = TIMEOUT, cap: int = CAP, cwd: str | None = None) -> str:
    """Output and errors of a command, in order, the middle cut out above `cap` bytes; then how it ended, if not with 0.

    After `timeout` seconds the command and its children are killed.
    """
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    process = subprocess.Popen(
        [shell, "-c", command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = _Capped(process.stdout, cap)
    ending = ""
    try:
        code = process.wait(timeout)
        if code != 0:
            ending = f"[exit code {code}]"
    except subprocess.TimeoutExpired:
        ending = f"[killed after {timeout:g} s]"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.text(wait=0.5)
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{ending}" if ending else text


class _Capped:
    """Reads a pipe to its end in a thread, keeping the first and last half of `cap` bytes.

    A background child may hold the pipe open for ever; the thread is then left behind with it.
    """

    def __init__(self, pipe: IO[bytes], cap: int) -> None:
        self._pipe = pipe
        self._half = max(1, cap // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                with self._lock:
                    room = self._half - len(self._head)
                    self._head += chunk[:room]
                    self._tail += chunk[room:]
                    over = len(self._tail) - self._half
                    if over > 0:
                        del self._tail[:over]
                        self._dropped += over

    def text(self, wait: float) -> str:
        """What came, after waiting up to `wait` seconds for the end of the pipe."""
        self._thread.join(wait)
        with self._lock:
            head, tail = bytes(self._head), bytes(self._tail)
            if not self._dropped:
                return (head + tail).decode("utf-8", "replace")
            gap = f"\n[... {self._dropped} bytes left out ...]\n"
            return head.decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")
