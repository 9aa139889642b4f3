"""The runtime's `attention`: what is refused when it opens, what 'auto' goes by, and what the doctor and warm-up make of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer_stand_in import StandIn, install
from typer.testing import CliRunner

from agentkv import Runtime, runtime_attention, runtime_backends
from agentkv.cli import app
from agentkv.engine import attention_flashinfer, sizing
from agentkv.engine.core import EngineConfig
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.sizing import plan_memory
from agentkv.errors import BadModel, BadRequest
from agentkv.methods.dense import Dense
from agentkv.runtime_attention import build, choose
from agentkv.runtime_backends import measured_decode

SMALL: dict[str, Any] = {"db": None, "memory": "16MiB", "window": 512}
GPU, XQA = "NVIDIA Thing", "FlashInfer 0.6.3 xqa in place"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(Path(runtime_attention.__file__).parent / "data" / "micro")


def measured(monkeypatch: pytest.MonkeyPatch, **ratios: float) -> None:
    """As if this machine were a GPU on which heads like the bundled model's were measured."""
    rows = {XQA: {name.replace("_", " ").strip() + " 6/2": ratio for name, ratio in ratios.items()} | {"8x2K 32/8": 0.1}}
    monkeypatch.setattr(runtime_backends, "_known", lambda: {GPU: {"operations": {"decode": rows}}})
    monkeypatch.setattr(runtime_backends, "MEASURED", (64, 128))
    monkeypatch.setattr(runtime_attention, "gpu_name", lambda device: GPU)


def test_a_cpu_has_our_own_and_says_why(loaded: LoadedModel) -> None:
    with Runtime("micro", **SMALL) as runtime:
        assert runtime.attention == "triton"
    assert choose("auto", loaded, 128) == (
        "triton",
        "FlashInfer does not serve the model: it is for NVIDIA GPUs, the model is on cpu",
    )
    assert choose("triton", loaded, 128).backend == "triton"


@pytest.mark.parametrize("given", ["fa2", None, 1])
def test_another_word_is_refused(given: Any) -> None:
    with pytest.raises(BadRequest, match="auto, triton, flashinfer") as caught:
        Runtime("micro", attention=given, **SMALL)
    assert caught.value.details["param"] == "attention"


def test_what_is_asked_for_and_cannot_be_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(attention_flashinfer, "version", lambda: None)
    with pytest.raises(BadModel, match="the model is on cpu"):
        Runtime("micro", attention="flashinfer", **SMALL)
    found: StandIn = request.getfixturevalue("library")
    monkeypatch.setattr(attention_flashinfer, "version", lambda: None)
    with pytest.raises(BadRequest, match="not installed") as caught:
        Runtime("micro", attention="flashinfer", **SMALL)
    assert "agentkv[cuda]" in caught.value.hint
    monkeypatch.setattr(attention_flashinfer, "version", lambda: "0.6.3")
    with pytest.raises(BadRequest, match="not built") as caught:
        Runtime("micro", attention="flashinfer", **SMALL)
    assert "agentkv warmup micro --flashinfer" in caught.value.hint
    assert not found.specs


def test_a_session_says_the_same_by_either(library: StandIn) -> None:
    library.compiled = True
    said = []
    for attention in ("triton", "flashinfer"):
        with Runtime("micro", attention=attention, **SMALL) as runtime:
            assert runtime.attention == attention
            session = runtime.session()
            session.add_user("hello")
            said.append(session.generate(max_tokens=12).text)
            runtime.check()
    assert said[0] == said[1]
    assert len(library.calls) > 8


@pytest.mark.parametrize(
    ("ratios", "built", "backend", "why"),
    [
        ({}, True, "triton", "was not measured with such heads on an NVIDIA Thing"),
        ({"_8x32K": 1.01, "_8x2K": 0.6}, True, "triton", "takes 0.60 to 1.01 times as long (2 shapes)"),
        ({"_8x32K": 0.94, "_8x2K": 0.97}, True, "triton", "takes 0.94 to 0.97 times"),
        ({"_8x32K": 1.0, "_8x2K": 0.7}, True, "flashinfer", "takes 0.70 to 1.00 times as long (2 shapes)"),
        ({"_8x32K": 0.9, "_8x2K": 0.7}, False, "triton", "is not built. Build it: agentkv warmup MODEL --flashinfer"),
    ],
)
def test_auto_is_ours_unless_the_other_was_measured_faster_and_is_there(
    ratios: dict[str, float], built: bool, backend: str, why: str,
    loaded: LoadedModel, library: StandIn, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    measured(monkeypatch, **ratios)
    library.compiled = built
    found = choose("auto", loaded, 128)
    assert found.backend == backend
    assert why in found.why
    assert not library.specs, "nothing is compiled"
    monkeypatch.setattr(attention_flashinfer, "version", lambda: "0.7.0")
    assert choose("auto", loaded, 128) == ("triton", "FlashInfer 0.7.0 was not measured with such heads on an NVIDIA Thing")


@pytest.mark.parametrize("broken", ["flashinfer.decode", "flashinfer.jit.xqa"])
def test_auto_opens_where_the_library_is_broken(
    broken: str, loaded: LoadedModel, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, _8x32K=0.5)
    library.compiled = True
    monkeypatch.setitem(sys.modules, broken, None)
    with Runtime("micro", **SMALL) as runtime:
        assert runtime.attention == "triton"
    assert "(1 shape), but FlashInfer's decode attention cannot be" in choose("auto", loaded, 128).why
    with pytest.raises(BadRequest, match="ModuleNotFoundError"):
        Runtime("micro", attention="flashinfer", **SMALL)


def test_figures_are_of_these_heads_dims_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {XQA: {"8x32K 32/8": 0.9, "8x32K 32/4": 1.1, "8x2K 32/8": 0.8}, "FlashInfer 0.6.3": {"8x32K 32/8": 1.5}}
    monkeypatch.setattr(runtime_backends, "_known", lambda: {GPU: {"operations": {"decode": rows}}})
    assert measured_decode(GPU, "0.6.3", (32, 8, 128, 16)) == {"8x32K 32/8": 0.9, "8x2K 32/8": 0.8}
    assert measured_decode(GPU, "0.6.3", (2, 8, 128, 16)) == {}
    for gpu, version, shape in (
        (None, "0.6.3", (32, 8, 128, 16)),
        (GPU, "0.6.4", (32, 8, 128, 16)),
        (GPU, "0.6.3", (32, 8, 64, 16)),
    ):
        assert measured_decode(gpu, version, shape) == {}


def test_its_workspace_is_in_the_plan(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "usable_memory", lambda device: 4 << 30)
    config = EngineConfig(0, 512, page_size=128, max_rows=4, step_tokens=64)
    ours = plan_memory(loaded, config, Dense(), step=64 << 20)
    theirs = plan_memory(
        loaded, EngineConfig(0, 512, page_size=128, max_rows=4, attention="flashinfer"), Dense(), step=64 << 20
    )
    assert (ours.library, theirs.library) == (0, attention_flashinfer.WORKSPACE)
    assert ours.arena - theirs.arena in (0, sizing.ARENA_ROUND), "a share of it, rounded"


def test_warmup_compiles_what_is_asked_for_and_runs_it(library: StandIn) -> None:
    command = ["warmup", "micro", "--rows", "2", "--tokens", "40", "--memory", "16MiB", "--window", "512", "--json"]
    done = CliRunner().invoke(app, command)
    assert json.loads(done.stdout.splitlines()[-1])["flashinfer"] is None
    assert not library.specs
    assert not library.calls
    # builds for pages of a GPU; the CPU's are larger, which the stand-in does not mind
    done = CliRunner().invoke(app, [*command[:-1], "--flashinfer"])
    assert done.exit_code == 0, done.output
    assert "compiled, or found, in" in done.output
    (made,) = library.specs
    assert made[2:6] == (16, 64, 3, False)
    assert library.calls


def test_compiling_that_fails_is_told(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Could not find nvcc")

    spec = SimpleNamespace(is_compiled=False, build_and_load=broken)
    monkeypatch.setattr(sys.modules["flashinfer.jit.xqa"], "gen_xqa_module", lambda *arguments: spec)
    with pytest.raises(BadRequest, match="cannot be compiled: RuntimeError: Could not find nvcc") as caught:
        build(Path(runtime_attention.__file__).parent / "data" / "micro")
    assert "nvcc and ninja" in caught.value.hint


def test_the_doctor_says_which_and_why(library: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTKV_HOME", str(tmp_path))
    doctor = ["doctor", "--memory", "16MiB", "--window", "512"]
    measured(monkeypatch, _8x32K=0.9)
    done = CliRunner().invoke(app, doctor)
    assert "decode attention by this package: FlashInfer 0.6.3 takes 0.90 to 0.90 times as long" in done.output
    assert "agentkv warmup micro --flashinfer" in done.output
    library.compiled = True
    assert "decode attention by FlashInfer: FlashInfer 0.6.3 takes 0.90 to 0.90 times" in CliRunner().invoke(app, doctor).output
    assert "decode attention by this package: asked for" in CliRunner().invoke(app, [*doctor, "--attention", "triton"]).output
    monkeypatch.setattr(attention_flashinfer, "version", lambda: None)
    done = CliRunner().invoke(app, [*doctor, "--attention", "flashinfer", "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout.splitlines()[-1])
    assert [each["part"] for each in report["problems"]] == ["attention"]
    assert "arena_bytes" in report["model"]["methods"][0], "the rest is planned"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"capability": (8, 0)}, "compute capability 9.x, 10.x, 12.x, cuda:0 has 8.0"),
        ({"dtype": "float32"}, "half precision, the model is in float32"),
        ({"page": 128, "head_dim": 80}, "heads of 64 or 128 dims, the model's have 80"),
        ({"page": 48}, "pages of 16, 32, 64 or 128 slots, these have 48"),
        ({"num_heads": 34, "num_kv_heads": 2}, "up to 16 query heads a KV head, the model has 17"),
        ({}, None),
    ],
)
def test_which_models_it_serves(
    change: dict[str, Any], why: str | None, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {key: change.pop(key) for key in ("head_dim", "num_heads", "num_kv_heads") if key in change}
    capability, page = change.pop("capability", (9, 0)), change.pop("page", 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype = getattr(torch, change.pop("dtype", "bfloat16"))
    given = replace(loaded, config=replace(loaded.config, **shape), device=torch.device("cuda:0"), dtype=dtype)
    said = attention_flashinfer.unserved(attention_flashinfer.Heads.of(given, page))
    assert said is None if why is None else why in str(said)
