"""What a run of `bench gpu` tells users: the doctor's data and the page's tables follow from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentkv.bench import backends
from agentkv.cli import app
from agentkv.cli_doctor import lines
from agentkv.engine import devices
from agentkv.errors import BadRequest
from agentkv.runtime_backends import DATA, told
from agentkv.runtime_backends import backends as known_of
from agentkv.runtime_doctor import examine

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "gpu.md"
H200 = {"device": "cuda:0", "capability": "9.0", "bytes": 150 << 30, "free_bytes": 149 << 30, "bfloat16": True}


def row(name: str, us: float, **more: Any) -> dict[str, Any]:
    plain = {"value": 0.5, "unit": "of copy", "target": 0.6, "at_most": False, "met": False, "value_met": False}
    found: dict[str, Any] = {"name": name, **plain, "median_us": us, "peer": None, "gain": None, "date": "2026-11-29T01:02:03"}
    return {**found, **more}


def measured(**more: Any) -> dict[str, Any]:
    peer = {"name": "flashinfer", "cuda_cores_us": [30.0, 10.0, 20.0], "xqa_us": [5.0], "tensor_cores_why_not": ["no"]}
    peer |= {"xqa_in_place_us": [8.0]}
    rows = [
        row("paged decode attention 8x32K 32/8", 10.0, peer=peer, gain=0.5),
        row("paged decode attention 1x32K 32/8", 40.0, peer=peer, gain=0.125, target=None, met=True, value_met=True),
        row("chunked prefill attention, 2,048 new", 8.0, peer={"name": "flashinfer", "fa3_us": [4.0]}),
        row("chunked prefill attention, other", 8.0, peer={"why_not": "no"}),
        {"name": "decode that failed", "error": "RuntimeError: no"},
    ]
    ceilings = {
        "copy": {"value": 4.25, "unit": "TB/s", "us": [1.0]},
        "matmul": {"value": 780.0, "unit": "TFLOP/s", "us": [1.0]},
    }
    versions = {"torch": "2.11.0", "flashinfer-python": "0.6.3", "vllm": None}
    whole = {"device": "NVIDIA Thing", "date": "2026-11-01T00:00:00", "commit": "abc", "tiny": False}
    return {**whole, "ceilings": ceilings, "versions": versions, "rows": rows, **more}


def test_ratios_are_of_medians_and_by_peer() -> None:
    found = backends.facts(measured(), "gpu.json")
    assert found["operations"] == {
        "decode": {
            "FlashInfer 0.6.3": {"8x32K 32/8": 2.0, "1x32K 32/8": 0.5},
            "FlashInfer 0.6.3 xqa": {"8x32K 32/8": 0.5, "1x32K 32/8": 0.125},
            "FlashInfer 0.6.3 xqa in place": {"8x32K 32/8": 0.8, "1x32K 32/8": 0.2},
        },
        "prompt chunks": {"FlashInfer 0.6.3 fa3": {"2,048 new": 0.5}},
    }
    assert found["date"] == "2026-11-29T01:02:03"
    assert found["versions"] == {"torch": "2.11.0", "flashinfer-python": "0.6.3"}
    assert found["ceilings"]["copy"] == {"value": 4.25, "unit": "TB/s"}


def test_a_row_names_its_peers_wrapper_and_the_fastest_kernel() -> None:
    times = {"cuda_cores_us": [20.0], "tensor_cores_us": [50.0], "tensor_cores_fa2_us": [8.0, 2.0, 9.0], "xqa_us": [9.0]}
    both = {"gain": 2.0, "beside_its_fastest_kernel": 0.8}
    decode = row("paged decode attention 8x32K 32/8", 10.0, peer={"name": "flashinfer", **times}, **both)
    slow = {"peer": {"name": "flashinfer", "cuda_cores_us": [20.0]}, "gain": 2.0}
    plain = row("paged decode attention other", 10.0, **slow, beside_its_fastest_kernel=2.0)
    result = measured(rows=[decode, plain])
    found = list(backends.facts(result, "gpu.json")["operations"]["decode"].items())
    assert found[0] == ("FlashInfer 0.6.3", {"8x32K 32/8": 2.0, "other": 2.0})
    assert [ratios["8x32K 32/8"] for _, ratios in found[1:]] == [5.0, 0.8, 0.9]
    *_, first, second = backends.tables(result)
    wrapper = "2.00x as fast as flashinfer's wrapper"
    assert first.endswith(f"| {wrapper}, 0.80x its fastest kernel (with tensor cores, fa2) |")
    assert second.endswith(f"| {wrapper}, 2.00x its fastest kernel (of the wrapper) |")


def test_a_gpu_takes_its_own_place_and_a_page_its_tables(tmp_path: Path) -> None:
    path, data, doc = (tmp_path / name for name in ("gpu.json", "backends.json", "page.md"))
    doc.write_text(f"before\n{backends.BEGIN}\nold\n{backends.END}\nafter\n")
    data.write_text(json.dumps({"Other": {"kept": True}, "NVIDIA Thing": {"old": True}}))
    path.write_text(json.dumps(measured()))
    made = backends.write(path, doc=doc, data=data)
    assert json.loads(data.read_text()) == {"Other": {"kept": True}, "NVIDIA Thing": made}
    text = doc.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| paged decode attention 8x32K 32/8 | 10 µs | 0.5 of copy | at least 0.6: not reached | 0.50x as fast as" in text
    assert "decode that failed" not in text


def test_where_methods_pay_is_known_too(tmp_path: Path) -> None:
    path, data, crossovers = (tmp_path / name for name in ("gpu.json", "backends.json", "crossover.json"))
    crossovers.write_text("of another GPU")
    path.write_text(json.dumps(measured()))
    backends.write(path, data=data, crossovers=crossovers)
    assert crossovers.read_text() == "of another GPU"
    pays = {"method": "quest", "faster_from": {"1": 8192}, "cells": [], "commit": "abc"}
    path.write_text(json.dumps(measured(rows=[row("crossover, qwen3-4b, quest", 9.0, **pays)])))
    backends.write(path, data=data, crossovers=crossovers)
    found = json.loads(crossovers.read_text())
    assert found["device"] == "NVIDIA Thing"
    assert found["methods"]["quest"]["faster_from"] == {"1": 8192}


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"rows": []}', json.dumps(measured(tiny=True))])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    with pytest.raises(BadRequest):
        backends.write(path, data=tmp_path / "data.json")
    assert not (tmp_path / "data.json").exists()


def test_a_page_without_the_marks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path, doc = tmp_path / "gpu.json", tmp_path / "page.md"
    path.write_text(json.dumps(measured()))
    doc.write_text("nothing")
    with pytest.raises(BadRequest, match="lacks the lines"):
        backends.write(path, doc=doc, data=tmp_path / "data.json")
    assert not (tmp_path / "data.json").exists()


def test_what_is_shipped_was_made_from_what_was_measured() -> None:
    """Otherwise: agentkv bench backends docs/bench/gpu.json --doc docs/gpu.md, in the project's folder."""
    source = "docs/bench/gpu.json"
    result = json.loads((ROOT / source).read_text())
    assert json.loads(DATA.read_text())[result["device"]] == backends.facts(result, source)
    assert "\n".join(backends.tables(result)) in DOC.read_text()


def test_the_doctor_names_the_backend_the_peer_and_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_facts", lambda: [{**H200, "name": "NVIDIA H200"}])
    report = examine("micro", device="cpu", memory=64 << 20)
    text = "\n".join(lines(report))
    assert "decode: Triton kernels of this package, over pages in place; FlashInfer 0.6.3, not used, takes" in text
    assert "prompt chunks: gathered pages; cuDNN for a long history" in text
    assert f"measured on an NVIDIA H200, {json.loads(DATA.read_text())['NVIDIA H200']['date'][:10]}" in text
    assert "tuned on this GPU: linear (6144x2560" in text


def test_what_an_engine_may_use_is_told_apart() -> None:
    operations = backends.facts(measured(), "gpu.json")["operations"]
    rows = [{"operation": "decode", "backend": "ours", "peers": operations["decode"]}]
    (line, *_) = told({"operations": rows, "tuned": {}, "measured": None})
    assert "FlashInfer 0.6.3 xqa, not used, takes 0.12 to 0.50 times as long (2 shapes)" in line
    assert "FlashInfer 0.6.3 xqa in place, an option, takes 0.20 to 0.80 times as long (2 shapes)" in line


def test_a_gpu_that_nobody_measured_is_told_how() -> None:
    found = known_of("NVIDIA Nothing")
    assert found["measured"] is None
    text = "\n".join(told(found))
    assert "times as long" not in text
    assert "tuned on this GPU: nothing" in text
    assert "nothing was measured on this GPU; agentkv bench gpu --out DIR" in text


def test_the_command_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"data": tmp_path / "data.json", "crossovers": tmp_path / "crossover.json"}
    monkeypatch.setattr(backends.write, "__kwdefaults__", {"doc": None, **files})
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(measured()))
    result = CliRunner().invoke(app, ["bench", "backends", str(path)])
    assert result.output.strip() == "agentkv doctor now knows the NVIDIA Thing"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tiny": None},
        {"versions": None},
        {"ceilings": {}},
        {"rows": [row("paged decode attention 8x32K 32/8", 0.0, peer={"xqa_us": [1.0]})]},
        {"rows": [row("page scores", 1.0, gain=2.0)]},
    ],
)
def test_a_damaged_file_is_refused_whole(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Nothing is written, neither the doctor's data nor the page."""
    given, page, data = tmp_path / "gpu.json", tmp_path / "gpu.md", tmp_path / "known.json"
    whole = measured(**wrong)
    given.write_text(json.dumps({key: value for key, value in whole.items() if key != "tiny" or value is not None}))
    page.write_text(f"{backends.BEGIN}\n{backends.END}\n")
    with pytest.raises(BadRequest, match="no gpu.json"):
        backends.write(given, doc=page, data=data)
    assert not data.exists()
    assert page.read_text() == f"{backends.BEGIN}\n{backends.END}\n"


def test_a_page_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    given = tmp_path / "gpu.json"
    given.write_text(json.dumps(measured()))
    with pytest.raises(BadRequest, match="cannot be read"):
        backends.write(given, doc=tmp_path / "none.md", data=tmp_path / "known.json")
