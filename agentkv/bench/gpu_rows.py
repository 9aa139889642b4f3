"""The rows of `agentkv bench gpu`: kernels against the rates that the same run measured."""

# mypy: disable-error-code="no-untyped-call"
# (kernels and torch's operations)

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentkv.bench.device_times import Work, graph_of, times
from agentkv.bench.model_peer import transformers_run
from agentkv.bench.paged_peer import MODES, better, flashinfer_decode
from agentkv.bench.paged_shapes import PAGE, SHAPES, SHORT, Drawn, Shape, draw
from agentkv.engine.cache.layout import Granularity


@dataclass
class Rig:
    """What rows are measured on. tiny: sizes that a CPU can interpret, for tests. copy: TB/s, bytes read and written; matmul:
    TFLOP/s in bfloat16; both are measured before any row. kept: what several rows measure once a run, by what it is."""

    device: torch.device
    repeats: int
    tiny: bool = False
    peers: bool = True
    copy: float = 0.0
    matmul: float = 0.0
    whole_peers: dict[tuple[str, int, int], dict[str, Any]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def whole_peer(self, model: str, num_rows: int, length: int) -> dict[str, Any]:
        """transformers on so many prompts of a model, measured once a run. Free what the device holds before."""
        if not self.peers:
            return {"why_not": "not asked for"}
        key = (model, num_rows, length)
        if key not in self.whole_peers:
            try:
                self.whole_peers[key] = transformers_run(model, num_rows, length, self.device)
            except (ImportError, RuntimeError) as error:
                self.whole_peers[key] = {"why_not": f"{type(error).__name__}: {error}"[:300]}
            self.free()
        return self.whole_peers[key]

    def free(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_ceilings(self) -> dict[str, Any]:
        """The copy and the matmul rate, with every repeat."""
        copy, matmul = self._copy((1 << 20) if self.tiny else (4 << 30)), self._matmul(64 if self.tiny else 8192)
        self.copy, self.matmul = copy["value"], matmul["value"]
        return {"copy": copy, "matmul": matmul}

    def _copy(self, num_bytes: int) -> dict[str, Any]:
        source = torch.empty(num_bytes // 4, dtype=torch.float32, device=self.device).normal_()
        target = torch.empty_like(source)
        us = times(lambda: target.copy_(source), self.device, self.repeats)
        return {"unit": "TB/s", "value": 2 * num_bytes / median(us) / 1e6, "bytes": 2 * num_bytes, "us": us}

    def _matmul(self, size: int) -> dict[str, Any]:
        a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=self.device).unbind(0)
        us = times(lambda: a @ b, self.device, self.repeats)
        return {"unit": "TFLOP/s", "value": 2 * size**3 / median(us) / 1e6, "size": size, "us": us}


@dataclass
class Measured:
    """us: every repeat, microseconds. value: in the row's unit. peer: what the same work took a peer in this run, or why_not.
    gain: over the peer's better mode. short: what else the row must show and did not, None: nothing."""

    us: list[float]
    value: float
    ceiling: float
    ceiling_unit: str
    peer: dict[str, Any] | None = None
    gain: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    short: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table. value must reach `target` (at_most: must not exceed it; None: it is reported), and gain over the
    peer `gain`."""

    name: str
    unit: str
    target: float | None
    measure: Callable[[Rig], Measured]
    at_most: bool = False
    gain: float | None = None

    def judged(self, measured: Measured) -> dict[str, Any]:
        """The row as JSON."""
        signed = -1 if self.at_most else 1
        reached = self.target is None or signed * measured.value >= signed * self.target
        gained = self.gain is None or (measured.gain is not None and measured.gain >= self.gain)
        return {
            "name": self.name,
            "unit": self.unit,
            "value": measured.value,
            "target": self.target,
            "at_most": self.at_most,
            "met": reached and gained and measured.short is None,
            "value_met": reached,
            "short": measured.short,
            "us": measured.us,
            "median_us": median(measured.us),
            "ceiling": {"value": measured.ceiling, "unit": measured.ceiling_unit},
            "peer": measured.peer,
            "gain": measured.gain,
            "gain_target": self.gain,
            **measured.more,
        }


def small(shape: Shape) -> Shape:
    """The shape for an interpreter: lengths over 1,024, 8 heads at most, heads of 16."""
    heads = shape.num_heads // shape.num_kv_heads
    lens = tuple(max(PAGE + 1, length // 1024) for length in shape.lens[:2])
    return shape._replace(lens=lens, num_heads=heads, num_kv_heads=1, head_dim=16)


def kernel_rows() -> Iterator[Row]:
    """Decode attention of all shapes, tables by layer and head, a prompt's chunk."""
    for shape in (*SHAPES, *SHORT):
        yield Row(f"paged decode attention {shape.name}", "of copy", shape.share or None, decode_of(shape), gain=shape.gain)
    whole = SHAPES[0]
    yield Row(f"per-layer tables, same bytes, {whole.name}", "of shared-table speed", 0.9, _tables(whole, "layer"))
    yield Row(f"per-head tables, same bytes, {whole.name}", "of shared-table speed", 0.9, _tables(whole, "head"))


def decode_work(drawn: Drawn, *, plan_each: bool = False) -> Work:
    """One decode of every layer. plan_each: a work list for each layer, as where layers hold different numbers of slots."""
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode

    lens, device = drawn.lens, drawn.q.device
    rows = torch.arange(len(lens), device=device)
    bound = bound_pieces(lens.numel(), sum(drawn.shape.lens) * (lens.numel() // len(lens)))

    def run() -> list[Tensor]:
        plan = plan_decode(lens, rows, bound)
        outs = []
        for pages, table in zip(drawn.layers, drawn.tables, strict=True):
            outs.append(paged_decode(drawn.q, pages, table, plan, drawn.shape.head_dim**-0.5)[0])
            plan = plan_decode(lens, rows, bound) if plan_each else plan
        return outs

    return run


def layers_of(shape: Shape, tiny: bool) -> int:
    """Layers of one replay: as a step has many, and so that no layer finds its bytes in the cache."""
    return 2 if tiny else max(2, min(16, round(4e9 / shape.kv_bytes)))


def decode_of(shape: Shape) -> Callable[[Rig], Measured]:
    """Measures one layer's decode attention, its merge included, out of a replay of several layers of a step."""

    def measure(rig: Rig) -> Measured:
        given = small(shape) if rig.tiny else shape
        layers = layers_of(given, rig.tiny)
        drawn = draw(given, layers, rig.device)
        us = [each / layers for each in times(graph_of(decode_work(drawn), rig.device), rig.device, rig.repeats)]
        one = Drawn(given, drawn.q, drawn.lens, drawn.layers[:1], drawn.tables[:1])
        alone = times(graph_of(decode_work(one), rig.device), rig.device, rig.repeats)
        del drawn, one
        peer = flashinfer_decode(given, layers, rig.device, rig.repeats) if rig.peers else {"why_not": "not asked for"}
        speed = given.kv_bytes / median(us) / 1e6
        more: dict[str, Any] = {"tb_per_s": speed, "layers_a_replay": layers, "plan_and_one_layer_us": median(alone)}
        gain, beside_any = (theirs / median(us) if theirs else None for theirs in (better(peer), better(peer, MODES)))
        more["beside_its_fastest_kernel"] = beside_any
        return Measured(us, speed / rig.copy, rig.copy, "TB/s", peer, gain, more)

    return measure


def _tables(shape: Shape, granularity: Granularity) -> Callable[[Rig], Measured]:
    def measure(rig: Rig) -> Measured:
        given = small(shape) if rig.tiny else shape
        layers = layers_of(given, rig.tiny)

        def taken(kind: Granularity, plan_each: bool) -> list[float]:
            work = graph_of(decode_work(draw(given, layers, rig.device, kind), plan_each=plan_each), rig.device)
            return [each / layers for each in times(work, rig.device, rig.repeats)]

        shared, own = taken("stripe", False), taken(granularity, True)
        speed = given.kv_bytes / median(own) / 1e6
        more = {"shared_table_us": shared, "tb_per_s": speed, "work_list": "one for each layer"}
        return Measured(own, median(shared) / median(own), rig.copy, "TB/s", more=more)

    return measure
