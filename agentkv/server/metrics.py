"""Counters of what was asked and served, and gauges read from the runtime when they are scraped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentkv.server.ports import RuntimePort
from agentkv.types import Turn

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTERS = {
    "preemptions": "Requests that lost their row to others and waited again",
    "recomputed_tokens": "Tokens forwarded again after a preemption",
    "deadline_misses": "Requests that ended because their timeout passed",
}
TOKENS = ("prompt", "cached", "prefilled", "completion", "evicted")


class RuntimeGauges(Collector):
    """Arena bytes by owner (they add up to the total), queue lengths and readiness, read at scrape time."""

    def __init__(self, runtime: RuntimePort) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """One family each; what the runtime does not report is left out, never shown as 0."""
        ready = self._runtime.ready()
        yield GaugeMetricFamily("agentkv_ready", "Tokens progress while work is queued", value=float(ready))
        if not ready:
            return  # an engine that is stuck does not answer
        stats = self._runtime.stats()
        arena, queue = dict(stats.get("arena") or {}), dict(stats.get("queue") or {})
        total = arena.pop("total", None)
        queue.pop("finished", None)  # a count of the past, not a state
        yield _gauge("agentkv_arena_bytes", "KV arena bytes by holder; they add up to the total", "state", arena)
        yield _gauge("agentkv_queue", "Requests in the engine", "state", queue)
        if total is not None:
            yield GaugeMetricFamily("agentkv_arena_bytes_total", "KV arena bytes", value=total)
        waiting = {str(priority): count for priority, count in (stats.get("waiting_by_priority") or {}).items()}
        yield _gauge("agentkv_waiting", "Requests that wait, by priority", "priority", waiting)
        for name, text in COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(f"agentkv_{name}", text, value=stats[name])
        yield from _tiers(stats)
        yield from _graphs(stats.get("graphs") or {})

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not touch the engine."""
        return ()


class Metrics:
    """One registry per app, so that two apps in a process do not share counts."""

    def __init__(self, runtime: RuntimePort) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(RuntimeGauges(runtime))
        self._requests = Counter("agentkv_requests", "Requests by route and outcome", ["route", "code"], registry=self.registry)
        self._tokens = Counter(
            "agentkv_tokens", "Tokens by kind; prompt = cached + prefilled", ["kind"], registry=self.registry
        )
        self._pruned = Counter("agentkv_pruned_tokens", "Tokens whose KV pruning removed", registry=self.registry)
        self._spans = Counter("agentkv_pruned_spans", "Spans that pruning removed", registry=self.registry)
        self._misses = Counter(
            "agentkv_misses", "Turns that recomputed something, by reason", ["reason"], registry=self.registry
        )
        self._first = Histogram(
            "agentkv_ttft_seconds", "Arrival to first token", ["route"], buckets=SECONDS, registry=self.registry
        )
        self._whole = Histogram(
            "agentkv_request_seconds", "Arrival to last token", ["route"], buckets=SECONDS, registry=self.registry
        )

    def failed(self, route: str, code: str) -> None:
        """A request ended in an error (or its client was gone: 'cancelled')."""
        self._requests.labels(route, code).inc()

    def answered(self, route: str, turn: Turn, started: float, first_event: float | None) -> str:
        """A turn was committed and answered; returns its log line. Times are of the monotonic clock."""
        seconds = time.monotonic() - started
        if first_event is not None:
            self._first.labels(route).observe(first_event - started)
        self._requests.labels(route, "ok").inc()
        self._whole.labels(route).observe(seconds)
        for kind in TOKENS:
            self._tokens.labels(kind).inc(getattr(turn.usage, f"{kind}_tokens"))
        self._pruned.inc(sum(span.tokens for span in turn.pruned_now))
        self._spans.inc(len(turn.pruned_now))
        if turn.miss is not None:
            self._misses.labels(turn.miss.reason).inc()
        return log_line(turn, seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


def log_line(turn: Turn, seconds: float) -> str:
    """One line a request: `turn 12 · 31,204 prompt · 30,988 cached · 216 prefilled · 2 pruned · 41 ms · chain a3f`."""
    usage = turn.usage
    chain = turn.chain_id.replace("_", "-").rsplit("-", 1)[-1][:3] or "-"
    parts = (
        f"turn {turn.number}",
        f"{usage.prompt_tokens:,} prompt",
        f"{usage.cached_tokens:,} cached",
        f"{usage.prefilled_tokens:,} prefilled",
        f"{len(turn.pruned_now):,} pruned",
        f"{seconds * 1000:,.0f} ms",
        f"chain {chain}",
    )
    return " · ".join(parts)


def _graphs(told: Mapping[str, Any]) -> Iterator[Metric]:
    """Decode steps as graphs, where there are any."""
    if told:
        yield CounterMetricFamily("agentkv_graph_captures", "Decode steps captured as graphs", value=told["captured"])
        yield CounterMetricFamily("agentkv_graph_replays", "Decode steps that a graph ran", value=told["replays"])
        yield CounterMetricFamily("agentkv_graph_eager", "Decode steps that no graph was there for", value=told["eager"])
        yield CounterMetricFamily("agentkv_graph_capture_seconds", "Time that captures took", value=told["seconds"])
        yield GaugeMetricFamily("agentkv_graph_bytes", "Device memory that captures took", value=told["bytes"])


def _tiers(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Fragmentation of the arena, and the KV in host memory."""
    if "fragmented_bytes" in stats:
        text = "Free arena bytes that a unit class cannot have without moves"
        yield _gauge("agentkv_arena_fragmented_bytes", text, "unit", stats["fragmented_bytes"])
        yield CounterMetricFamily("agentkv_arena_moved_bytes", "Arena bytes moved to make room", value=stats["moved_bytes"])
    if "warm" in stats:
        warm = stats["warm"]
        yield GaugeMetricFamily(
            "agentkv_warm_bytes", "KV of idle chains and preempted requests in host memory", value=warm["bytes"]
        )
        yield CounterMetricFamily("agentkv_demotions", "KV states copied to host memory", value=warm["demotions"])
        yield CounterMetricFamily("agentkv_restores", "KV states copied back", value=warm["restores"])


def _gauge(name: str, text: str, label: str, values: Mapping[str, Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
