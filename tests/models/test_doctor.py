"""The doctor: its plan is what a runtime then has, and what would not work is said before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentkv import Runtime, methods, runtime_plan
from agentkv.cli import app
from agentkv.engine import sizing, survey
from agentkv.engine.core import SLOT, EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sizing import measure_step
from agentkv.engine.sparse import ModelShape, SparseMethod, StateSpec
from agentkv.engine.survey import longest_session, session_bytes, survey_model, try_step
from agentkv.errors import Capacity
from agentkv.runtime_doctor import examine
from agentkv.runtime_findings import Findings
from agentkv.runtime_plan import plan_model
from agentkv.types import Sampling

MIB = 1 << 20
FAMILIES = ["llama", "qwen2", "gemma3", "qwen3-sliding"]


def planned(model: str | Path, **options: Any) -> tuple[dict[str, Any], Findings]:
    found = Findings()
    return plan_model(model, found, **options), found


@pytest.fixture
def micro(tmp_path: Path, micro_path: Path) -> Path:
    """A copy of the bundled model that a test may damage."""
    return shutil.copytree(micro_path, tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_survey_knows_what_loading_finds_and_reads_no_weight(checkpoint: Any, family: str, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "copy")
    real = load_model(folder)
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = b"\xff" * (len(data) - start)  # NaN in every weight
        shard.write_bytes(data)
    found = survey_model(folder, device="cpu")
    assert (found.weight_bytes, found.config, found.dtype) == (real.weight_bytes, real.config, real.dtype)
    assert found.groups(4) == real.groups(4)
    config = EngineConfig(memory=0, window=64, page_size=4, max_rows=4, step_tokens=16)
    assert try_step(found, config, methods.get("dense")) == measure_step(real, config, methods.get("dense"))
    zeros = load_model(folder, contents=False)
    assert all(not parameter.any() for name, parameter in zeros.model.named_parameters() if "norm" not in name)


def test_a_gguf_file_is_surveyed_too(tmp_path: Path) -> None:
    from gguf_files import tiny, write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"))
    real, found = load_model(path), survey_model(path, device="cpu", dtype="bfloat16")
    assert (2 * found.weight_bytes, found.config) == (real.weight_bytes, real.config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pages", [5, 11, 30])
def test_the_longest_session_is_the_longest_that_the_engine_takes(model: Any, family: str, pages: int) -> None:
    loaded = model(family, "float32")
    groups = loaded.groups(4)
    config = EngineConfig(memory=pages * groups[0].stripe_bytes, window=100, page_size=4, max_rows=2, step_tokens=8)

    def taken(length: int) -> bool:
        llm = LLM(config, ModelRunner(loaded, config, methods.get("dense")))
        try:
            llm.add(Request([0] * (length - 1), Sampling(max_tokens=1)))
        except Capacity:
            return False
        return True

    longest = longest_session(groups, config, config.memory)
    accepted = [length for length in range(2, config.window + 1) if taken(length)]
    assert longest == max(accepted, default=0)
    assert (session_bytes(groups, config, config.window) <= config.memory) == (longest == config.window)


def test_the_plan_is_what_a_runtime_has() -> None:
    options = {"memory": "20MiB", "page_size": 64, "dtype": "bfloat16"}
    report, found = planned("micro", **options)
    (row,) = report["methods"]
    with Runtime("micro", db=None, **options) as runtime:
        engine = runtime._engine
        assert runtime.stats()["arena"]["total"] == row["arena_bytes"] == 20 * MIB
        assert (engine.config.page_size, engine.config.window, engine.device) == (64, report["window"], report["device"])
    real = load_model(runtime_plan.model_path("micro"))
    token = 2 * 2 * real.config.num_layers * real.config.num_kv_heads * real.config.head_dim  # K and V, two bytes
    assert row["kv_bytes_per_token"] == row["groups"][0]["token_bytes"] == token
    assert report["weight_bytes"] * 2 == real.weight_bytes
    assert row["tokens_that_fit"] == 20 * MIB // (64 * token) * 64
    assert row["longest_session"] == row["tokens_that_fit"] + 1  # the last token has no KV
    assert [(each["part"], f"window={row['longest_session']}" in each["hint"]) for each in found.problems] == [
        ("method dense", True)
    ]
    (row,) = planned("micro", **options, window=row["longest_session"])[0]["methods"]
    assert row["whole_windows"] == 1


def test_auto_memory_is_planned_like_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sizing, runtime_plan):
        monkeypatch.setattr(module, "usable_memory", lambda device: 800 * MIB)
    report, found = planned("micro", memory="auto", window=1024)
    with Runtime("micro", db=None, memory="auto", window=1024) as runtime:
        assert runtime.stats()["arena"]["total"] == report["methods"][0]["arena_bytes"]
    assert not found.problems


def damage(name: str) -> Callable[[Path], Any]:
    def config(**changes: Any) -> Callable[[Path], Any]:
        def change(folder: Path) -> None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return change

    def cut(folder: Path) -> None:
        shard = min(folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-100])

    def no_template(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        kept = json.loads(path.read_text())
        kept.pop("chat_template", None)
        path.write_text(json.dumps(kept))

    ways: dict[str, Callable[[Path], Any]] = {
        "no config": lambda folder: (folder / "config.json").unlink(),
        "architecture": config(architectures=["MambaForCausalLM"]),
        "shape": config(intermediate_size=40),
        "small vocabulary": config(vocab_size=300),
        "cut": cut,
        "no weights": lambda folder: [each.unlink() for each in folder.glob("*.safetensors*")],
        "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
        "no template": no_template,
        "all gone": shutil.rmtree,
    }
    return ways[name]


@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        ("no config", "model", "config.json is missing"),
        ("architecture", "model", "MambaForCausalLM"),
        ("shape", "model", "the config asks for"),
        ("small vocabulary", "model", "has shape"),
        ("cut", "model", "damaged or truncated"),
        ("no weights", "model", "no safetensors weights"),
        ("no tokenizer", "tokenizer", "tokenizer"),
        ("no template", "tokenizer", "no chat template"),
        ("all gone", "model", "no model directory"),
    ],
)
def test_a_broken_checkpoint_is_a_problem_with_what_to_do(micro: Path, name: str, part: str, text: str) -> None:
    damage(name)(micro)
    report, found = planned(micro)
    told = [each for each in found.problems if each["part"] == part]
    assert text in told[0]["text"]
    assert told[0]["hint"]
    assert ("methods" in report) == (part == "tokenizer")  # a plan needs no tokenizer


def test_a_tokenizer_of_another_model_and_two_faults_at_once(checkpoint: Any, micro_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (micro_path / name).exists():
            shutil.copy(micro_path / name, folder)
    _, found = planned(folder)
    assert ["embeds 97" in each["text"] for each in found.problems] == [True]
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    assert {each["part"] for each in planned(folder)[1].problems} == {"tokenizer", "model"}


@pytest.mark.parametrize(
    ("options", "part", "text"),
    [
        ({"memory": "100GiB", "window": 512}, "method dense", "are more than the 0.78 GiB of cpu"),
        ({"memory": "512KiB"}, "method dense", "requests past 0 tokens"),
        ({"memory": "much"}, "model", "memory='much'"),
        ({"memory": "auto"}, "method dense", "one window of 65,536 tokens needs"),
        ({"window": 10**9}, "model", "window="),
        ({"page_size": 0}, "model", "page_size=0"),
        ({"dtype": "int4"}, "model", "unknown dtype"),
        ({"device": "cuda:77"}, "device", "cannot be used"),
    ],
)
def test_an_impossible_plan(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], part: str, text: str) -> None:
    for module in (sizing, runtime_plan):
        monkeypatch.setattr(module, "usable_memory", lambda device: 800 * MIB)
    problem = planned("micro", **options)[1].problems[0]
    assert (problem["part"], text in problem["text"]) == (part, True), problem
    assert problem["hint"]


def test_weights_that_do_not_fit_and_steps_that_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MOST_TRIED", 1000)
    report, found = planned("micro")
    assert report["methods"][0]["step_bytes"] is None
    assert not found.problems
    report, found = planned("micro", memory="auto")
    assert "arena_bytes" not in report["methods"][0]
    assert "not known before the start" in found.advice[0]["text"]
    monkeypatch.setattr(runtime_plan, "usable_memory", lambda device: 40 * MIB)
    report, found = planned("micro")
    assert "the weights take 48" in found.problems[0]["text"]
    assert "methods" not in report


@dataclass(frozen=True)
class Noting(SparseMethod):
    """Keeps 4 numbers a slot."""

    bad: bool = False

    def states(self, model: ModelShape) -> tuple[StateSpec, ...]:
        return (StateSpec("note", "slot", "float32", "append", (SLOT, 4), part="sealed" if self.bad else "tail"),)


def test_every_method_has_a_row_by_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("noting_methods")
    module.Noting = Noting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "noting_methods", module)
    monkeypatch.setitem(methods.NAMES, "noting", "noting_methods:Noting")
    options = {"memory": "16MiB", "window": 128, "methods": ("dense", "noting")}
    report, found = planned("micro", **options)
    plain, noting = report["methods"]
    assert (plain["method"], noting["method"]) == ("dense", "noting")
    assert noting["kv_bytes_per_token"] == plain["kv_bytes_per_token"] + 16
    assert noting["groups"][1] == {"layers": 0, "window": None, "state": "note", "token_bytes": 16, "page_bytes": 2048}
    assert not found.problems
    monkeypatch.setattr(methods, "get", lambda name: Noting(bad=True))
    _, found = planned("micro", **options)
    assert {each["part"] for each in found.problems} == {"method dense", "method noting"}
    assert all("never seals" in each["text"] for each in found.problems)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AGENTKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_command_line(home: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--memory", "64MiB", "--window", "4096"])
    assert done.exit_code == 0, done.output
    for line in ("the longest session 4,096", "8 layers that see every token", f"{home}/agentkv.db: 0 sessions", "all good"):
        assert line in done.output
    done = CliRunner().invoke(app, ["doctor", "--model", str(home / "nothing"), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout.splitlines()[-1])
    assert [each["part"] for each in report["problems"]] == ["model"]
    assert report["libraries"]["torch"]["version"] == torch.__version__
    done = CliRunner().invoke(app, ["doctor", "--model", str(home / "nothing")])
    assert "problem    model: no model directory" in done.output
    assert done.output.endswith("1 problem\n")


def test_what_is_missing_or_badly_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkv import runtime_doctor
    from agentkv.engine import devices, threads

    def version(name: str) -> str:
        if name in ("llguidance", "matplotlib"):
            raise runtime_doctor.importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(runtime_doctor.importlib.metadata, "version", version)
    monkeypatch.setattr(devices, "cpu_kernels", lambda: "off: no C++ compiler")
    monkeypatch.setattr(devices, "cpu_compiler", lambda: None)
    monkeypatch.setattr(threads, "torch_threads", lambda: 64)
    monkeypatch.setattr(threads, "core_quota", lambda: 2.5)
    monkeypatch.setattr(threads, "allowed_cores", lambda: tuple(range(16)))
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(runtime_doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(devices, "gpu_facts", list)
    report = examine("micro", memory="16MiB", window=128)
    assert [each["part"] for each in report["problems"]] == ["libraries", "gpu"]
    assert "plots" in report["libraries"]["matplotlib"]["for"]
    hints = [each["hint"] for each in report["advice"]]
    assert "g++" in hints[0]
    assert hints[1] == "Set OMP_NUM_THREADS=2"
    assert "passive" in hints[2]
    monkeypatch.setenv("AGENTKV_HOME", "/dev/null/home")
    problems = examine("micro", memory="16MiB", window=128)["problems"]
    assert "store" in {each["part"] for each in problems}
