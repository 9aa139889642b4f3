"""Asks kvpress, an independent implementation of eviction methods in an environment of its own (`make oracles`)."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
READY = ROOT / ".oracles" / "kvpress" / ".ready"
PYTHON = READY.parent / "bin" / "python"
SCRIPT = Path(__file__).with_name("oracle_kvpress.py")


@dataclass(frozen=True)
class Run:
    """One prompt under one press.

    press: snapkv, streamingllm, adakv or kvzip. tokens: ids. capacity: tokens kept per KV head, everything included (adakv and
    kvzip: the mean over the heads of a layer, or of the model). options: what the press is built with, by kvpress's names.
    """

    press: str
    tokens: list[int]
    capacity: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """What kvpress did. Arrays [num_layers, num_kv_heads, num_tokens].

    kept: bool. scores: float32, those it ranked by (of kvzip before its sinks are raised above them); NaN if it asked for none.
    prefix, chunks, replays: of kvzip, tokens before the context, tokens by chunk, and ids forwarded behind the prompt by chunk.
    """

    kept: NDArray[np.bool_]
    scores: NDArray[np.float32]
    prefix: int = 0
    chunks: list[int] = field(default_factory=list)
    replays: list[list[int]] = field(default_factory=list)

    def positions(self, layer: int, kv_head: int) -> list[int]:
        """The kept positions of one head, ascending."""
        return [int(position) for position in np.flatnonzero(self.kept[layer, kv_head])]


def ask_kvpress(model: Path, runs: list[Run], folder: Path, dtype: str = "float32") -> list[Kept]:
    """Play runs in one subprocess; `folder` holds what is passed. Skips the test if the environment has not been made.

    kvzip also reads the tokenizer of `model`, and its chat template if it has one.
    """
    if not READY.is_file():
        pytest.skip("kvpress is not installed in .oracles/: run make oracles")
    request = folder / "request.json"
    request.write_text(json.dumps({"dtype": dtype, "runs": [asdict(run) for run in runs]}))
    command = [PYTHON, SCRIPT, model, request, folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}  # ours would shadow its transformers' dependencies
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads((folder / "facts.json").read_text())["runs"]
    with np.load(folder / "arrays.npz") as arrays:
        return [Kept(arrays[f"kept_{index}"], arrays[f"scores_{index}"], **more) for index, more in enumerate(facts)]
