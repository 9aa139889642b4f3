"""Whose kernel reads decode rows that share a page table: the one asked for, or one that is built and was measured faster."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Literal, NamedTuple

from agentkv.engine import attention_flashinfer as library
from agentkv.engine.devices import gpu_name, usable_device
from agentkv.engine.loader import LoadedModel
from agentkv.engine.survey import survey_model
from agentkv.errors import BadRequest
from agentkv.runtime_backends import measured_decode

Backend = Literal["triton", "flashinfer"]
WAYS = ("auto", "triton", "flashinfer")
MEAN, MOST = 0.95, 1.0
"""Of our kernel's time, in the geometric mean and in any shape measured, where the library's is to be taken unasked: an
engine has short rows and long ones, side by side, and there a row's bits depend on its batch."""


class Choice(NamedTuple):
    """backend: whose kernel; why: in words for people."""

    backend: Backend
    why: str


def choose(wanted: str, loaded: LoadedModel, page_size: int, model: str = "MODEL") -> Choice:
    """What `attention=wanted` means for the model on its device. model: what it was opened as, for hints.

    BadRequest for another word, and for a library that is asked for and is not installed or not built; BadModel where it does
    not serve the model. Nothing is compiled."""
    if wanted not in WAYS:
        raise BadRequest(f"attention={wanted!r}: {', '.join(WAYS)}", param="attention")
    if wanted == "triton":
        return Choice("triton", "asked for")
    if wanted == "auto":
        return _measured(library.Heads.of(loaded, page_size), model)
    heads = library.Heads.of(loaded, page_size)
    library.check(heads)
    if not library.built(heads):
        raise BadRequest("FlashInfer's decode attention is not built for this model", hint=_how(model), param="attention")
    return Choice("flashinfer", "asked for")


def _measured(heads: library.Heads, model: str) -> Choice:
    """The library where it is there, serves the model, was faster on such a GPU, and is built."""
    why = library.unserved(heads)
    if why is not None:
        return Choice("triton", f"FlashInfer does not serve the model: {why}")
    version, gpu = library.version(), gpu_name(heads.device)
    if version is None:
        return Choice("triton", "FlashInfer is not installed")
    times = measured_decode(gpu, version, heads[:4]).values()
    if not times:
        return Choice("triton", f"FlashInfer {version} was not measured with such heads on an {gpu}")
    shapes = f"{len(times)} shape{'s' * (len(times) > 1)}"
    said = f"FlashInfer {version} takes {min(times):.2f} to {max(times):.2f} times as long ({shapes})"
    if geometric_mean(times) > MEAN or max(times) > MOST:
        return Choice("triton", said)
    try:
        if not library.built(heads):
            return Choice("triton", f"{said}, and is not built. {_how(model)}")
        library.FlashInferDecode(heads)  # nobody asked for it, so it must not keep an engine from opening
    except BadRequest as error:
        return Choice("triton", f"{said}, but {error.message}")
    return Choice("flashinfer", said)


def build(path: Path, *, device: str = "auto", dtype: str = "auto", page_size: int = 16) -> float:
    """Compile the library's kernel for the model at `path`, of which no weight is read; seconds. It stays on disk. Raises what
    `choose` raises, and BadRequest where compiling fails."""
    began = perf_counter()
    library.build(library.Heads.of(survey_model(path, device=usable_device(device), dtype=dtype), page_size))
    return perf_counter() - began


def _how(model: str) -> str:
    return f"Build it: agentkv warmup {model} --flashinfer"
