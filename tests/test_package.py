"""What importing the package costs and shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentkv


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    heavy = ("torch", "sqlalchemy", "transformers", "fastapi", "httpx", "numpy")
    assert run(f"import sys, agentkv; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_runtime_is_reachable_without_the_store() -> None:
    assert run("import sys, agentkv; agentkv.Runtime; print('sqlalchemy' in sys.modules)") == "False"


def test_every_public_name_loads() -> None:
    for name in agentkv.__all__:
        assert getattr(agentkv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        agentkv.nonsense  # noqa: B018
