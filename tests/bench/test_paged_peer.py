"""The library's kernel over pages of an engine, by its stand-in: a row's figure is of the attention that the row names."""

from __future__ import annotations

import pytest
import torch
from flashinfer_stand_in import install

from agentkv.bench.paged_peer import _in_place
from agentkv.bench.paged_shapes import Shape, draw


def test_the_same_rows_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    drawn = draw(Shape("three rows", (40, 17, 3), 8, 2, 0.0, head_dim=64), 2, torch.device("cpu"))
    for layer, out in enumerate(_in_place(drawn)()):
        for row, length in enumerate(drawn.shape.lens):
            entries = drawn.tables[layer][row, : -(-length // 16)].long()
            k, v = (drawn.layers[layer][entries][:, :, kv].transpose(0, 1).flatten(1, 2)[:, :length].double() for kv in (0, 1))
            q = drawn.q[row].double().view(2, 4, 64)
            wanted = (q @ k.mT * 64**-0.5).softmax(-1) @ v
            assert (out[row].double().view(2, 4, 64) - wanted).abs().max() <= 1e-6
