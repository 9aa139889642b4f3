"""`agentkv bench gpu` in sizes that a CPU can do: what it writes, that it goes on where it stopped, that a row may fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.bench import gpu
from agentkv.bench.decode_step import Step
from agentkv.bench.dequant_rows import drawn_pages, layout_of
from agentkv.bench.gpu_report import MARK, MARK_END, write_page
from agentkv.bench.gpu_rows import Measured, Rig, Row, layers_of
from agentkv.bench.injected import inject
from agentkv.bench.paged_peer import MODES, better
from agentkv.bench.paged_shapes import SHAPES, Shape, draw
from agentkv.bench.prefill_row import attention_flops
from agentkv.bench.prefill_run import prompt_flops
from agentkv.bench.shapes import draw_model
from agentkv.bench.step_bytes import step_bytes
from agentkv.errors import BadRequest
from agentkv.kernels.quantized_pages import read_pages

CPU = torch.device("cpu")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the rows by three, the second of which fails at first; gives the names in the order they were measured."""
    calls: list[str] = []

    def measures(name: str) -> Callable[[Rig], Measured]:
        def measure(rig: Rig) -> Measured:
            calls.append(name)
            if name == "b" and calls.count("b") == 1:
                raise RuntimeError("an illegal memory access")
            return Measured([3.0, 1.0, 2.0], 0.5, rig.copy, "TB/s")

        return measure

    rows = [Row(name, "of copy", 0.5, measures(name), at_most=name == "c") for name in "abc"]
    monkeypatch.setattr(gpu, "all_rows", lambda: rows)
    return calls


def test_a_run_goes_on_and_tries_again_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = counted(monkeypatch)
    given: dict[str, Any] = {"out": tmp_path, "device": "cpu", "tiny": True, "repeats": 2}
    first = gpu.run_gpu(**given, commit="one")
    assert calls == ["a", "b", "c"]
    assert [("error" in row, row["met"]) for row in first["rows"]] == [(False, True), (True, False), (False, True)]
    assert "RuntimeError: an illegal memory access (test_gpu.py:" in first["rows"][1]["error"]
    assert " measure, " in first["rows"][1]["error"]
    second = gpu.run_gpu(**given, commit="two")
    assert calls == ["a", "b", "c", "b"]
    assert [row["commit"] for row in second["rows"]] == ["one", "two", "one"]
    third = gpu.run_gpu(**given, rows="a; c", commit="three")
    assert calls == ["a", "b", "c", "b", "a", "c"]
    assert [row["commit"] for row in third["rows"]] == ["three", "two", "three"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == third
    assert third["rows"][0]["us"] == [3.0, 1.0, 2.0]
    assert third["rows"][0]["median_us"] == 2.0
    assert third["not_built"] == list(gpu.NOT_BUILT)


def test_rows_that_a_run_does_not_come_to_stay_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether its time is over, or it is killed: by then the row that was measured is written beside those of before."""
    counted(monkeypatch)
    given: dict[str, Any] = {"out": tmp_path, "device": "cpu", "tiny": True, "repeats": 1}
    gpu.run_gpu(**given, commit="one")
    late = gpu.run_gpu(**given, rows="a;b;c", minutes=-1.0, commit="two")
    assert late["not_reached"] == ["a", "b", "c"]
    assert [row["commit"] for row in late["rows"]] == ["one", "one", "one"]

    def killed(text: str) -> None:
        if text.startswith("a "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu.run_gpu(**given, rows="a;b;c", commit="three", tell=killed)
    assert [row["commit"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["three", "one", "one"]


def test_a_row_that_is_not_there_is_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="'nonsense'"):
        gpu.run_gpu(out=tmp_path / "new", device="cpu", tiny=True, rows="tables;nonsense")
    assert not (tmp_path / "new").exists()


def test_no_row_begins_after_its_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = counted(monkeypatch)
    result = gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, repeats=1, minutes=-1.0)
    assert calls == []
    assert result["not_reached"] == ["a", "b", "c"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text("[1]")
    with pytest.raises(BadRequest, match=r"gpu\.json"):
        gpu.run_gpu(out=tmp_path, device="cpu", tiny=True)


def test_the_file_of_another_device_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted(monkeypatch)
    given: dict[str, Any] = {"out": tmp_path, "device": "cpu", "tiny": True, "repeats": 1}
    result = gpu.run_gpu(**given)
    text = json.dumps({**result, "device": "NVIDIA H200"})
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(BadRequest, match="NVIDIA H200"):
        gpu.run_gpu(**given, rows="a")
    assert (tmp_path / "gpu.json").read_text() == text


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="cannot be a folder"):
        gpu.run_gpu(out=tmp_path / "file", device="cpu", tiny=True)
    with pytest.raises(BadRequest, match="repeats=0"):
        gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, repeats=0)
    with pytest.raises(BadRequest, match="minutes=nan"):
        gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, minutes=float("nan"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="GPU"):
        gpu.run_gpu(out=tmp_path)


def test_gain_over_a_peer_is_wanted_where_the_row_says_so() -> None:
    row = Row("x", "of copy", 0.8, lambda rig: Measured([], 0, 0, ""), gain=1.3)
    judged = [row.judged(Measured([1.0], 0.9, 4.0, "TB/s", gain=gain))["met"] for gain in (None, 1.2, 1.3)]
    assert judged == [False, False, True]


def test_a_peers_better_mode_is_of_its_wrapper_and_its_fastest_of_all() -> None:
    peer = {
        "name": "flashinfer",
        "cuda_cores_us": [30.0, 10.0, 20.0],
        "tensor_cores_us": [50.0],
        "xqa_us": [9.0],
        "why_not": "",
    }
    assert (better(peer), better(peer, MODES), better({"why_not": "no"})) == (20.0, 9.0, None)


@pytest.mark.parametrize("granularity", ["stripe", "layer", "head"])
def test_drawn_pages_are_all_different(granularity: Any) -> None:
    """Every table entry leads to bytes of its own, inside the arena."""
    drawn = draw(Shape("", (40, 17), 4, 2, 0.5, head_dim=16), 3, CPU, granularity)
    seen = set()
    for pages, table in zip(drawn.layers, drawn.tables, strict=True):
        for row, count in enumerate((3, 2)):
            for head in range(2):
                entries = table[row, head, :count] if granularity == "head" else table[row, :count]
                seen |= {pages[entry, head].data_ptr() for entry in entries}
                assert all(bool(pages[entry, head].isfinite().all()) for entry in entries)
    assert len(seen) == 3 * 2 * 5


@pytest.mark.parametrize("bits", [4, 8])
def test_drawn_quantised_pages_are_finite(bits: int) -> None:
    shape = Shape("", (40, 17), 4, 2, 0.5, head_dim=16)
    pages, table = drawn_pages(shape, layout_of(shape, bits), CPU)
    seen = [*table[0, :2].tolist(), table[1, 0].item()]
    assert len(set(seen)) == 3
    k, v = read_pages(pages, torch.tensor(seen))
    assert k.isfinite().all()
    assert v.isfinite().all()
    assert v.std() > 0.01


def test_no_layer_of_a_replay_finds_its_bytes_in_a_cache() -> None:
    for shape in SHAPES:
        assert (layers_of(shape, tiny=False) - 1) * shape.kv_bytes > 500e6


def test_flops_of_a_chunk_are_those_of_the_pairs_that_are_seen() -> None:
    seen = sum(query + 1 + 7 for query in range(5))
    assert attention_flops(5, 7, 3, 16) == seen * 3 * 16 * 2 * 2


def test_a_captured_step_is_the_engines_own() -> None:
    injected = inject(draw_model("tiny", CPU, torch.float32), methods.get("dense"), [39] * 3)
    step = Step(injected)
    tokens = step.eager()
    for warm in (False, True):
        work, drawn = step.device_work(warm=warm)
        for _ in range(3):
            work()
            assert drawn() == tokens
    held = sum(work.slot + 1 for work in injected.batch.rows)
    assert step_bytes(injected) == (step.runner.loaded.weight_bytes, held * 2 * 2 * 2 * 16 * 4, 0, 0)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_whole_model_rows_have_the_peer_of_the_same_run(tmp_path: Path) -> None:
    result = gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, repeats=2, rows="qwen3-4b, 1x32K;prefill, qwen")
    step, prefill = (row for row in result["rows"] if row["name"].startswith(("dense", "prefill")) and "us" in row)
    assert step["gain"] == pytest.approx(median(step["peer"]["decode_us"]) / step["median_us"])
    assert step["same_tokens_as_eager"]
    assert prefill["gain"] == pytest.approx(prefill["tokens_per_s"] / prefill["peer"]["prefill_tokens_per_s"])
    assert prefill["value"] == pytest.approx(prefill["tflop_per_s"] / result["ceilings"]["matmul"]["value"])


def test_a_page_has_a_line_a_row_and_where_missed_time_goes(tmp_path: Path) -> None:
    kernels = {"us": 4.0, "launches": 9, "longest": [{"kernel": "one", "us": 3.0, "launches": 8}]}
    slow = Row("slow", "x", 2.0, lambda rig: Measured([], 0, 0, "")).judged(Measured([4.0], 1.0, 1.0, "TB/s"))
    told = Row("told", "x", None, lambda rig: Measured([], 0, 0, "")).judged(Measured([4.0], 1.0, 1.0, "TB/s"))
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{MARK}\nearlier\n{MARK_END}\nafter\n")
    write_page({"rows": [slow | {"kernels": kernels}, told, {"name": "broken", "error": "no", "target": 1.0}]}, page)
    lines = page.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert [line.split(" | ")[3] for line in lines if line.startswith(("| slow", "| told"))] == ["no", ""]
    assert "- slow, 0.00 ms of 9 launches: one 75% (8)." in lines
    assert "earlier" not in page.read_text()
    page.write_text("no marks")
    with pytest.raises(BadRequest, match="has no"):
        write_page({"rows": []}, page)


def test_flops_of_a_prompt_count_each_weight_twice_a_token() -> None:
    loaded = draw_model("tiny", CPU, torch.float32)
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 96
    assert prompt_flops(loaded, 7) == 2 * (2 * 7 * layer + 4 * 4 * 16 * 7 * 8 / 2)


def test_it_needs_few_packages() -> None:
    """As on a machine that has torch, triton, transformers and msgspec, but not what the servers and stores are made of."""
    absent = ["typer", "rich", "sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx", "platformdirs", "llguidance", "gguf"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from agentkv.bench.gpu import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--minutes" in done.stdout


def test_page_scores_are_measured_with_the_rest_of_the_layer(tmp_path: Path) -> None:
    (row,) = gpu.run_gpu(out=tmp_path, device="cpu", tiny=True, repeats=2, rows="page scores")["rows"]
    assert row["bytes"] == 2 * ((128 - 1) // 16) * 2 * 16 * 4  # two rows of so many whole pages before the newest, in float32
    assert row["value"] == pytest.approx(row["bytes"] / row["median_us"] / 1e6 / row["ceiling"]["value"])
    assert min(row["best_us"], row["attention_us"], row["layer_us"]) > 0
