"""Triton in its interpreter: in a child, because it decides when it is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lets the tests of this folder import their helper by name


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where Triton is interpreted. It takes loop bounds by int(array of one element), which numpy 2.4 refuses."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run in a child, where Triton is interpreted")
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def interpret() -> Callable[[str], None]:
    """Runs those tests of a file that use `interpreter`, in a child; they must pass."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is the child")

    def run(file: str) -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "in_the_interpreter", file]
        env = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout

    return run
