"""Hugging Face directories and GGUF files to a model ready to run. The only place that reads a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentkv.engine import models
from agentkv.engine.checkpoint import find_gguf
from agentkv.engine.config import read_config
from agentkv.engine.core import KVGroup
from agentkv.engine.layers import Decoder, ModelConfig, PackedWeight
from agentkv.errors import BadModel

if TYPE_CHECKING:
    from agentkv.engine.gguf import GGUFFile

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HASHED_WHOLE = 64 << 20  # a larger shard is fingerprinted by its header and samples
_SAMPLE = 1 << 20
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
_AGAIN = "Copy or download the file again"


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device. window: most logical tokens. fingerprint: of config and weights."""

    model: Decoder
    config: ModelConfig
    path: Path
    device: torch.device
    dtype: torch.dtype
    fingerprint: str

    @property
    def window(self) -> int:
        """Most logical tokens of a sequence, by the checkpoint's config."""
        return self.config.window

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, a tied embedding once."""
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def groups(self, page_size: int) -> tuple[KVGroup, ...]:
        """The model's KV groups in pages of that many tokens: layers that see everything first, then by window."""
        c = self.config
        windows = c.sliding or (None,) * c.num_layers
        return tuple(
            KVGroup(
                layers=tuple(layer for layer in range(c.num_layers) if windows[layer] == window),
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                itemsize=self.dtype.itemsize,
                page_size=page_size,
                window=window,
            )
            for window in sorted(set(windows), key=lambda window: window or 0)
        )


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    contents: bool = True,
) -> LoadedModel:
    """Load a Hugging Face directory, a .gguf file or a directory that holds one.

    dtype: auto (float32 on the CPU, bfloat16 on CUDA) or a name in DTYPES; a GGUF's tensors are dequantised to it. contents
    False reads and checks the files' headers only: every weight is zero (nothing on the device "meta"; untouched memory on a
    CPU), and there is no fingerprint. UnknownModel where nothing is there, BadModel where it cannot be served.
    """
    target = torch.device(device)
    kind = resolve_dtype(dtype, target)
    file = find_gguf(path)
    folder = Path(path)
    gguf = _open(file) if file else None
    raw = gguf.config() if gguf else read_json(folder / "config.json")
    config = read_config(raw)
    model = models.build(config)
    weights: Weights = gguf or _Shards(folder)
    for name, parameter in list(model.named_parameters()):
        _assign(model, name, _read(weights, model, name, parameter, target, kind, contents))
    weights.finish()
    model.requires_grad_(False).eval()
    model.prepare()
    return LoadedModel(model, config, file or folder, target, kind, _fingerprint(raw, weights.files) if contents else "")


class Weights(Protocol):
    """Where a model's tensors come from. files: what they lie in."""

    files: list[Path]

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, on the CPU. BadModel where it is missing or damaged."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes by the file's header, which counts as having read it. BadModel where it is missing."""

    def finish(self) -> None:
        """Called once every parameter is filled; BadModel where the model cannot be right."""


def _open(file: Path) -> GGUFFile:
    from agentkv.engine.gguf import GGUFFile  # only here: most models do without the package

    return GGUFFile(file)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a name stands for on a device; an unknown name is a BadModel."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise BadModel(f"unknown dtype {dtype!r}", hint=f"Known: auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory; BadModel where it is missing or broken."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise BadModel(f"{path.name} in {path.parent} cannot be read: {error}", hint=_AGAIN) from None
    if not isinstance(loaded, dict):
        raise BadModel(f"{path.name} in {path.parent} is not a JSON object", hint=_AGAIN)
    return loaded


class _Shards:
    """The weight files of a directory: tensor name -> file. Each file's header is checked when it is first opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._open: dict[Path, Any] = {}
        if index.is_file():
            mapping = read_json(index).get("weight_map")
            if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
                raise BadModel(f"{index.name} has no weight_map", hint=_AGAIN)
            self.where = {name: folder / file for name, file in mapping.items()}
        elif single.is_file():
            self.where = dict.fromkeys(self._file(single).keys(), single)
        else:
            others = "; other weight formats are not read" if list(folder.glob("*.bin")) else ""
            raise BadModel(
                f"no safetensors weights in {folder}{others}", hint="Needed: model.safetensors, or shards with an index"
            )
        self.files = sorted(set(self.where.values()))

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except FileNotFoundError:
                raise BadModel(
                    f"weight shard {path.name} is missing in {self.folder}", hint="Copy or download the missing shard"
                ) from None
            except (SafetensorError, OSError) as error:
                raise BadModel(f"weight shard {path.name} is damaged or truncated: {error}", hint=_AGAIN) from None
        return self._open[path]

    def finish(self) -> None:
        """Nothing to check: directories often hold tensors beside the decoder's."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU in the file's dtype."""
        found: Tensor = self._ask(name, lambda file: file.get_tensor(name))
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes by its file's header."""
        return tuple(self._ask(name, lambda file: file.get_slice(name).get_shape()))

    def _ask(self, name: str, what: Callable[[Any], Any]) -> Any:
        """Something of the file that holds a tensor."""
        path = self.where.get(name)
        if path is None:
            raise BadModel(f"the weights in {self.folder} lack {name!r}", hint="The checkpoint does not match its config.json")
        try:
            return what(self._file(path))
        except SafetensorError as error:
            raise BadModel(f"weight shard {path.name} does not hold {name!r}: {error}", hint=_AGAIN) from None


def _read(
    weights: Weights, model: Decoder, name: str, parameter: Tensor, device: torch.device, dtype: torch.dtype, contents: bool
) -> Tensor:
    """One of our parameters, packed from its sources, each of the expected shape; zeros of that shape without contents."""
    sources = model.source_names(name)
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    rows: tuple[int, ...] = parameter.shape[:1]
    stored = None
    if isinstance(owner, PackedWeight):
        rows, stored = owner.rows(leaf), owner.stored.get(leaf)
    for source, count in zip(sources, rows, strict=True):
        expected = (count, *parameter.shape[1:][-1:])  # experts lie one under the other
        shape = weights.shape(source)
        if shape != expected:
            raise BadModel(
                f"{source!r} has shape {list(shape)}, the config asks for {list(expected)}",
                hint="The checkpoint does not match its config",
            )
    kind = stored or dtype
    if not contents:
        return _zeros(parameter.shape, kind, device)
    whole = torch.empty(parameter.shape, dtype=kind, device=device)  # not before: a wrong config may ask for any size
    under = whole.view(sum(rows), *whole.shape[1:][-1:])
    start = 0
    for source, count in zip(sources, rows, strict=True):
        under[start : start + count] = _coded(source, weights.tensor(source), stored).to(device)
        start += count
    return whole


def _coded(source: str, tensor: Tensor, stored: torch.dtype | None) -> Tensor:
    """The tensor, if it is in FP8 where the config says so and nowhere else; values alone would be wrong by their scale."""
    wanted = stored if stored == torch.float8_e4m3fn else None
    if (tensor.dtype if tensor.dtype in _EIGHT_BITS else None) != wanted:
        said = "FP8 weights (e4m3)" if wanted else "plain weights"
        raise BadModel(
            f"{source!r} is {str(tensor.dtype).removeprefix('torch.')}, the config asks for {said}",
            hint="quantization_config must name the modules that are not FP8 in modules_to_not_convert, and no others",
        )
    return tensor


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in memory that takes no room until it is written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape.numel() * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a meta parameter."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _fingerprint(raw: dict[str, Any], files: list[Path]) -> str:
    """Digest of the config and of the weights: whole files up to _HASHED_WHOLE, else size, ends and even samples."""
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start, length in _extents(size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def _extents(size: int) -> Iterator[tuple[int, int]]:
    if size <= _HASHED_WHOLE:
        yield 0, size
        return
    pieces = _HASHED_WHOLE // _SAMPLE
    for piece in range(pieces):
        yield piece * (size - _SAMPLE) // (pieces - 1), _SAMPLE
