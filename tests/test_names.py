"""Method names stand where they belong: in methods/, and elsewhere as arguments or data only.

"dense" is left out of the search for words: it is a plain word (a dense tensor, dense attention). As a name it is a string, so
there only the string is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentkv.methods import NAMES

ROOT = Path(__file__).resolve().parent.parent
SILENT = ("agentkv/engine", "agentkv/memory", "agentkv/server", "kernels", "agentkv/runtime*.py")
GIVEN = ("agentkv/bench", "agentkv/world", "examples", "agentkv/cli*.py", "agentkv/check")
PLANNED = ("streamingllm", "snapkv", "h2o", "adakv", "quest", "omnikv", "kivi", "fp8_kv", "palu", "kvzip")
WORDS = sorted(NAMES.keys() - {"dense"} | {*PLANNED})
"""Those that exist, and those of the plan, so that a name is refused before its file is there."""


def files(places: tuple[str, ...]) -> Iterator[Path]:
    """Sources of folders and of patterns."""
    for place in places:
        found = sorted(ROOT.glob(place))
        assert found, place
        for path in found:
            yield from sorted((*path.rglob("*.py"), *path.rglob("*.cpp"))) if path.is_dir() else [path]


def words_in(text: str) -> list[str]:
    """Names that stand in a text as words or parts of words with underscores or capitals; a request is no quest."""
    return [word for word in WORDS if re.search(rf"(?<![a-z]){word}(?![a-z])", text, re.IGNORECASE)]


def branches_on_a_name(source: str) -> list[str]:
    """Names that a file's code knows: as an identifier or import, or in a comparison or a match."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        for name in (getattr(node, key, None) for key in ("id", "attr", "name", "arg", "module")):
            bad += words_in(name) if isinstance(name, str) else []
        if isinstance(node, ast.Compare | ast.MatchValue):
            strings = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))
            bad += [text for text in strings if text in {*WORDS, *NAMES}]
    return bad


@pytest.mark.parametrize("path", list(files(SILENT)), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_method_is_named_comments_included(path: Path) -> None:
    text = path.read_text()
    assert words_in(text) == []
    if not path.name.startswith("runtime"):  # whose callers get full attention unless they name another
        assert '"dense"' not in text


@pytest.mark.parametrize("path", list(files(GIVEN)), ids=lambda path: str(path.relative_to(ROOT)))
def test_methods_are_named_as_arguments_or_data_only(path: Path) -> None:
    if path.suffix == ".py":
        assert branches_on_a_name(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["if method == 'kivi': pass", "from agentkv.methods import palu", "def quest_row(): pass", "x.SnapKV()"]
)
def test_planted_names_are_found(source: str) -> None:
    assert branches_on_a_name(source)


def test_arguments_and_data_are_allowed() -> None:
    assert branches_on_a_name("run(method='kivi')\nrows = ['snapkv', 'palu']") == []
