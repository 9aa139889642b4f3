"""Probes, metrics, keys, the log line and the lines to paste."""

from __future__ import annotations

import httpx
import pytest

from agentkv.server.app import paste_lines
from agentkv.server.metrics import log_line
from agentkv.types import PrunedSpan, Turn, Usage

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_probes(served):
    assert httpx.get(served.url + "/healthz").json() == {"alive": True}
    assert httpx.get(served.url + "/readyz").json() == {"ready": True}
    served.runtime.stuck = True
    stuck = httpx.get(served.url + "/readyz")
    assert (stuck.status_code, stuck.json()) == (503, {"ready": False, "reason": "no token for 11 s"})
    assert httpx.get(served.url + "/healthz").status_code == 200
    model = httpx.get(served.url + "/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 10_000, "model")
    assert httpx.get(served.url + "/v1/models/fake").json() == model
    assert httpx.get(served.url + "/v1/models/other").status_code == 404


def samples(text):
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}


def test_metrics_add_up(served):
    url = served.url
    history = HELLO["messages"] + [{"role": "assistant", "content": "echo: hello"}, {"role": "user", "content": "more"}]
    httpx.post(url + "/v1/chat/completions", json=HELLO | {"user": "u"})
    httpx.post(url + "/v1/chat/completions", json={"messages": history, "user": "u"})
    httpx.post(url + "/v1/chat/completions", json={"messages": [*history[:1], *history[1:]], "user": "other"})
    httpx.post(url + "/v1/chat/completions", json={"messages": []})
    seen = samples(httpx.get(url + "/metrics").text)
    assert seen['agentkv_requests_total{code="ok",route="chat"}'] == 3
    assert seen['agentkv_requests_total{code="bad_request",route="chat"}'] == 1
    kind = {name: seen[f'agentkv_tokens_total{{kind="{name}"}}'] for name in ("prompt", "cached", "prefilled")}
    assert kind["prompt"] == kind["cached"] + kind["prefilled"] > kind["cached"] > 0
    assert seen['agentkv_misses_total{reason="new"}'] == 1
    arena = sum(seen[f'agentkv_arena_bytes{{state="{name}"}}'] for name in ("free", "active", "chains", "radix"))
    assert arena == seen["agentkv_arena_bytes_total"] == 10_000
    assert seen['agentkv_ttft_seconds_count{route="chat"}'] == 3
    assert seen['agentkv_queue{state="running"}'] == 0
    assert seen["agentkv_ready"] == 1
    served.runtime.stuck = True
    seen = samples(httpx.get(url + "/metrics").text)
    assert seen["agentkv_ready"] == 0
    assert "agentkv_arena_bytes_total" not in seen


def test_keys_make_tenants(serve):
    served = serve(api_keys=("one", "two"))
    post = served.url + "/v1/chat/completions"
    for headers in ({}, bearer("three"), {"Authorization": "one"}):
        reply = httpx.post(post, json=HELLO, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/metrics", "/v1/sessions"):
        assert httpx.get(served.url + path).status_code == 401
        assert httpx.get(served.url + path, headers=bearer("one")).status_code == 200
    assert httpx.get(served.url + "/healthz").status_code == 200
    mine = httpx.post(post, json=HELLO | {"user": "u"}, headers=bearer("one")).json()["agentkv"]
    history = HELLO["messages"] + [{"role": "assistant", "content": "echo: hello"}, {"role": "user", "content": "more"}]
    tenants = {tenant for tenant, _ in served.runtime.live}
    assert len(tenants) == 1
    assert "one" not in tenants.pop()
    for extra in ({"user": "u"}, {"agentkv": {"chain_id": mine["chain_id"]}}, {"agentkv": {"session_id": mine["session_id"]}}):
        theirs = httpx.post(post, json={"messages": history, **extra}, headers=bearer("two")).json()
        assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert theirs["agentkv"]["miss"]["reason"] == "new"
    ours = httpx.post(post, json={"messages": history, "user": "u"}, headers=bearer("one")).json()
    assert ours["agentkv"]["session_id"] == mine["session_id"]
    assert httpx.get(served.url + f"/v1/sessions/{ours['agentkv']['chain_id']}", headers=bearer("two")).status_code == 400


def test_the_log_line():
    usage = Usage(prompt_tokens=31_204, cached_tokens=30_988, prefilled_tokens=216)
    pruned = tuple(PrunedSpan(span_id=name, call_id=None, tokens=5, why="") for name in "ab")
    turn = Turn(number=12, text="", usage=usage, pruned_now=pruned, chain_id="c_a3f09b")
    line = log_line(turn, 0.041)
    assert line == "turn 12 · 31,204 prompt · 30,988 cached · 216 prefilled · 2 pruned · 41 ms · chain a3f"


@pytest.mark.parametrize("base", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/"])
def test_lines_to_paste(base):
    text = paste_lines(base, "micro", 32_768)
    assert text.count("http://127.0.0.1:8000/v1") == 4
    for part in ('model_name: "openai/micro"', "cost_tracking: ignore_errors", "max_input_tokens=32768", 'OpenAI(base_url="'):
        assert part in text
    assert "max_input_tokens" not in paste_lines(base, "micro")
