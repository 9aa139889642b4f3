"""Options that no engine could run are refused when a method is made, or when a runtime opens; never in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentkv import Runtime, methods
from agentkv.check.models import MICRO
from agentkv.engine.forms import model_shape
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.errors import BadRequest
from agentkv.methods.kvzip import KVzip

HUGE = 10**30


@pytest.mark.parametrize(
    "text",
    [
        f"streamingllm:sinks={HUGE}",
        f"streamingllm:recent={2**31}",
        f"kvzip:sinks={HUGE}",
        f"kvzip:lead_in={HUGE}",
        "kvzip:lead_in=1048576",
        "kvzip:chunk=1",
        f"kvzip:prefix=({HUGE},)",
        f"kvzip:prefix_later=({HUGE},)",
        f"kvzip:suffix=[{HUGE}]",
        "kvzip:prefix=(True,)",
        f"quest:budget={HUGE}",
        f"omnikv:observers=({HUGE},)",
        f"kivi:residual={32 * HUGE}",
        f"palu:rank_k={HUGE}",
        f"adakv:capacity={-HUGE}",
        "h2o:heavy=1e-320,recent=0.9",
        "h2o:heavy=0.9,recent=1e-300",
        "h2o:heavy=1e999,recent=1e999",
        "snapkv:capacity=10000000,window=1000000",
        f"adakv:capacity={2**30},window={2**20}",
    ],
)
def test_numbers_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"[a-z_]+=.+: "):
        methods.parse(text)


def test_an_instance_is_bounded_too() -> None:
    with pytest.raises(BadRequest, match="at most 2,147,483,647"):
        methods.check_types(KVzip(sinks=HUGE))


def test_what_is_bounded_still_runs() -> None:
    """The largest of each serve like any other."""
    largest = f"kvzip:sinks={2**31 - 1},system={2**31 - 1},chunk={2**31 - 1},lead_in={2**31 - 1}"
    both = [largest, f"streamingllm:sinks={2**31 - 1},recent={2**31 - 1}", "h2o:heavy=1e-6,recent=0.9"]
    with Runtime("micro", db=None, memory="48MiB", page_size=16, methods=both) as runtime:
        for name in both:
            with runtime.session(method=name) as session:
                for _ in range(2):
                    session.add_user("abc 123 " * 12)
                    session.generate(max_tokens=3)


@pytest.mark.parametrize("option", ["prefix", "prefix_later", "suffix"])
def test_tokens_that_the_model_does_not_have_are_refused_when_it_opens(option: str) -> None:
    with pytest.raises(BadRequest, match="token id 999999 is none of its"):
        Runtime("micro", db=None, memory="48MiB", method=f"kvzip:{option}=(999999,)")


@pytest.fixture(scope="module")
def micro() -> LoadedModel:
    return load_model(MICRO)


@pytest.mark.parametrize(
    "observers", [[], None, "12", [1.7], [1e999], [-3, 2], [4, 1], [1, 1], [True], [[1]], {"0": 1}], ids=str
)
def test_a_file_of_observers_is_refused_like_the_option(observers: Any, tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text(json.dumps({"model": "x", "observers": observers}))
    with pytest.raises(BadRequest, match="no file of observers"):
        methods.get("omnikv", prepared=str(tmp_path / "o.json"))


def test_observers_that_a_model_does_not_have_are_refused(micro: LoadedModel, tmp_path: Path) -> None:
    shape = model_shape(micro, 16)
    (tmp_path / "o.json").write_text(json.dumps({"model": shape.fingerprint, "observers": [0, 10**30]}))
    assert "its layers are 0 to" in str(methods.get("omnikv", prepared=str(tmp_path / "o.json")).unserved(shape))
    (tmp_path / "o.json").write_text("[" * 100_000)
    with pytest.raises(BadRequest, match="no file of observers"):
        methods.get("omnikv", prepared=str(tmp_path / "o.json"))
