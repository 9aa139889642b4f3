"""The engine's benchmark on a tiny model: both sides give the same tokens, and what is reported adds up."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from agentkv.bench.engine import run_engine
from agentkv.bench.peers import Transformers, unpacked_weights
from agentkv.bench.report import plot, table
from agentkv.bench.shapes import SHAPES, write_model
from agentkv.engine.loader import load_model
from agentkv.errors import BadRequest

SMALL = {"model": "tiny", "prompt": 20, "batch": 3, "batch_prompt": 30, "new": 6, "repeats": 2}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["qwen3-90m"] | sizes | heads)


def test_the_named_shape_is_what_the_figures_are_asked_for() -> None:
    shape = SHAPES["qwen3-90m"]
    assert (shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]) == (12, 4, 64)
    hidden, q_size, kv_size = shape["hidden_size"], 64 * shape["num_attention_heads"], 64 * 4
    layer = hidden * (2 * q_size + 2 * kv_size + 3 * shape["intermediate_size"] + 2) + 2 * 64
    assert 12 * layer + hidden * (shape["vocab_size"] + 1) == pytest.approx(90e6, rel=0.01)


def test_against_transformers(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_engine(**SMALL, threads=1, tell=lines.append)
    assert len(lines) == 8
    assert {name: work["equal_answers"] for name, work in result["workloads"].items()} == {
        "single": "2 of 2",
        "batch": "6 of 6",
    }
    for work in result["workloads"].values():
        for index, (mine, theirs) in enumerate(zip(work["runs"]["agentkv"], work["runs"]["transformers"], strict=True)):
            assert work["ratios"]["decode"][index] == mine["decode"] / theirs["decode"]
            assert mine["prefill"] == pytest.approx(work["sequences"] * work["prompt_tokens"] / mine["prefill_s"])
            assert theirs["decoded"] == work["sequences"] * (work["new_tokens"] - 1)
            assert theirs["prefill_s"] + theirs["decode_s"] <= theirs["seconds"]
        assert work["ratio"]["decode"] == median(work["ratios"]["decode"])
    assert {"date", "command", "commit", "device", "threads", "versions", "load", "dtype"} <= result.keys()
    assert json.loads(json.dumps(result)) == result
    assert "3 x 30 prompt tokens, 6 new" in table(result)
    pytest.importorskip("matplotlib")
    plot(result, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_the_peer_may_do_fewer_sequences() -> None:
    batch = run_engine(**SMALL, peer_sequences=1, threads=1)["workloads"]["batch"]
    assert [run["sequences"] for run in batch["runs"]["transformers"]] == [1, 1]
    assert [run["sequences"] for run in batch["runs"]["agentkv"]] == [3, 3]
    assert batch["equal_answers"] == "2 of 2"


def test_the_peer_has_the_same_weights(tmp_path: Path) -> None:
    loaded = load_model(write_model("tiny", tmp_path))
    theirs = Transformers(loaded).model.state_dict()
    for name, tensor in unpacked_weights(loaded).items():
        assert (tensor == theirs[name]).all(), name


class Handler(BaseHTTPRequestHandler):
    """A server that streams as many tokens as it is asked for."""

    asked: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "its-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        event = b"data: " + json.dumps({"choices": [{"text": "x"}]}).encode() + b"\n\n"
        self._answer(event * body["max_tokens"] + b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_against_a_server(url: str) -> None:
    result = run_engine(**SMALL, peer=url + "/v1", threads=1)
    assert result["peer"] == url
    assert result["peer_together"]
    assert [run["decoded"] for run in result["workloads"]["single"]["runs"][url]] == [5, 5]
    assert result["workloads"]["batch"]["equal_answers"] == "not known"
    long = [each for each in Handler.asked if len(each["prompt"]) == 30]
    assert len(long) == 6
    assert all(each["model"] == "its-model" and each["temperature"] == 0 and each["ignore_eos"] for each in long)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"peer": "nobody"}, "unknown peer"),
        ({"peer": "http://127.0.0.1:9"}, "GET /v1/models"),
        ({"new": 1}, "new"),
        ({"batch_prompt": 300}, "window"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(BadRequest, match=what):
        run_engine(**SMALL | options, threads=1)


def test_vllm_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match="no vllm"):
        run_engine(**SMALL, peer="vllm", threads=1)


def test_the_command_line(tmp_path: Path) -> None:
    from agentkv.cli import app

    sizes = ["--prompt", "9", "--batch", "2", "--batch-prompt", "9", "--new", "3", "--repeats", "1", "--threads", "1"]
    out = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["bench", "engine", "--model", "tiny", *sizes, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(out.read_text())


PROGRAM = """#!{python}
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer([json.dumps({{"data": [{{"id": "m"}}]}}).encode()])
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        event = b"data: " + json.dumps({{"choices": [{{"token_ids": [77, 77]}}]}}).encode() + b"\\n\\n"
        self.answer(event for _ in range(body["max_tokens"] // 2))
    def answer(self, parts):
        self.send_response(200)
        self.end_headers()
        for part in parts:
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            self.wfile.write(part)
    def log_message(self, *args):
        pass

helper = subprocess.Popen(["sleep", "600"])
with open(os.environ["NOTES"], "w") as notes:
    json.dump({{"arguments": sys.argv, "environment": dict(os.environ), "helper": helper.pid}}, notes)
if {ready}:
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
print("no room for the cache")
sys.exit(3)
"""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool], Path]:
    """A program of that name on the PATH, which starts a helper, notes how it was called, and serves or fails."""

    def put(ready: bool) -> Path:
        program = tmp_path / "bin" / "vllm"
        program.parent.mkdir()
        program.write_text(PROGRAM.format(python=sys.executable, ready=ready))
        program.chmod(0o755)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("NOTES", str(tmp_path / "notes.json"))
        return tmp_path / "notes.json"

    return put


def gone(pid: int) -> bool:
    """Does the process end within seconds?"""
    stat = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    return time.monotonic() < end


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system's process table")
def test_vllm_is_started_like_us_and_ended_whole(vllm: Callable[[bool], Path]) -> None:
    path = vllm(True)
    result = run_engine(**SMALL, peer="vllm", threads=1)
    notes = json.loads(path.read_text())
    told = dict(zip(notes["arguments"][1:], notes["arguments"][2:], strict=False))
    assert (told["--dtype"], told["--max-model-len"], told["--max-num-seqs"]) == ("float32", "36", "3")
    assert notes["environment"]["OMP_NUM_THREADS"] == "1"
    assert notes["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert gone(notes["helper"])
    batch = result["workloads"]["batch"]
    assert batch["equal_answers"].startswith("0 of ")  # it says which tokens: none are ours
    for run in batch["runs"]["vllm"]:
        assert 0 < run["decoded"] <= 3 * 4
        busy = 3 * 30 / run["prefill_cpu"] + run["decoded"] / run["decode_cpu"]
        assert busy == pytest.approx(3 * 3 * 0.02, rel=0.5)  # what its handlers burn


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system's process table")
def test_vllm_that_does_not_start_says_why(vllm: Callable[[bool], Path]) -> None:
    path = vllm(False)
    with pytest.raises(BadRequest, match=r"exit code 3\): no room for the cache"):
        run_engine(**SMALL, peer="vllm", threads=1)
    assert gone(json.loads(path.read_text())["helper"])
