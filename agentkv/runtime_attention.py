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
FASTER = 0.95
"""Of our kernel's time, at most, where the library's is to be taken unasked: a row's bits depend on its batch there."""


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
        return _measured(loaded, page_size, model)
    library.check(loaded, page_size)
    if not library.built(loaded, page_size):
        raise BadRequest("FlashInfer's decode attention is not built for this model", hint=_how(model), param="attention")
    return Choice("flashinfer", "asked for")


def _measured(loaded: LoadedModel, page_size: int, model: str) -> Choice:
    """The library where it is there, serves the model, was faster on the whole on such a GPU, and is built."""
    why = library.unserved(loaded, page_size)
    if why is not None:
        return Choice("triton", f"FlashInfer does not serve the model: {why}")
    version, gpu, c = library.version(), gpu_name(loaded.device), loaded.config
    if version is None:
        return Choice("triton", "FlashInfer is not installed")
    times = measured_decode(gpu, version, (c.num_heads, c.num_kv_heads, c.head_dim, page_size))
    if not times:
        return Choice("triton", f"FlashInfer {version} was not measured with such heads on an {gpu}")
    ratio = geometric_mean(times.values())
    said = f"FlashInfer {version} takes {ratio:.2f} times as long on the whole ({len(times)} shape{'s' * (len(times) > 1)})"
    if ratio > FASTER:
        return Choice("triton", said)
    try:
        if not library.built(loaded, page_size):
            return Choice("triton", f"{said}, and is not built. {_how(model)}")
        library.FlashInferDecode(loaded, page_size)  # nobody asked for it, so it must not keep an engine from opening
    except BadRequest as error:
        return Choice("triton", f"{said}, but {error.message}")
    return Choice("flashinfer", said)


def build(path: Path, *, device: str = "auto", dtype: str = "auto", page_size: int = 16) -> float:
    """Compile the library's kernel for the model at `path`, of which no weight is read; seconds. It stays on disk. Raises what
    `choose` raises, and BadRequest where compiling fails."""
    began = perf_counter()
    library.build(survey_model(path, device=usable_device(device), dtype=dtype), page_size)
    return perf_counter() - began


def _how(model: str) -> str:
    return f"Build it: agentkv warmup {model} --flashinfer"
