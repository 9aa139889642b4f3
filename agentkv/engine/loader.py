"""Hugging Face directories and GGUF files to a model ready to run. The only place that reads a model's config and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentkv.engine import models
from agentkv.engine.checkpoint import find_gguf
from agentkv.engine.core import KVLayout
from agentkv.engine.layers import Decoder, ModelConfig, PackedLinear, RopeConfig
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

    def layout(self, page_size: int) -> KVLayout:
        """Shape of the model's KV in pages of that many tokens."""
        c = self.config
        return KVLayout(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype.itemsize, page_size)


def load_model(path: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto") -> LoadedModel:
    """Load a Hugging Face directory, a .gguf file or a directory that holds one.

    dtype: auto (float32 on the CPU, bfloat16 on CUDA) or a name in DTYPES; a GGUF's tensors are dequantised to it.
    UnknownModel where nothing is there, BadModel where it cannot be served.
    """
    target = torch.device(device)
    kind = resolve_dtype(dtype, target)
    file = find_gguf(path)
    folder = Path(path)
    gguf = _open(file) if file else None
    raw = gguf.config() if gguf else read_json(folder / "config.json")
    config = read_config(raw)
    with torch.device("meta"):
        model = models.resolve(config.architecture)(config)
    weights: Weights = gguf or _Shards(folder)
    for name, parameter in list(model.named_parameters()):
        _assign(model, name, _read(weights, model, name, parameter, target, kind))
    weights.finish()
    model.requires_grad_(False).eval()
    model.prepare()
    return LoadedModel(model, config, file or folder, target, kind, _fingerprint(raw, weights.files))


class Weights(Protocol):
    """Where a model's tensors come from. files: what they lie in."""

    files: list[Path]

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, on the CPU. BadModel where it is missing or damaged."""

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


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """A Hugging Face config as ours; BadModel names what is missing or not served."""
    architecture = _architecture(raw)
    _refuse_unserved(raw, architecture)
    try:
        heads = int(raw["num_attention_heads"])
        config = ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            inner_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw),
            window=int(raw["max_position_embeddings"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )
    except KeyError as error:
        raise BadModel(f"config.json lacks {error.args[0]!r}", hint="Restore config.json from the model's publisher") from None
    except (TypeError, ValueError) as error:
        raise BadModel(f"config.json has a value of the wrong kind: {error}") from None
    _check_shape(config)
    return config


def _check_shape(config: ModelConfig) -> None:
    sizes = (config.vocab_size, config.hidden_size, config.inner_size, config.num_layers, config.num_heads)
    if min(*sizes, config.num_kv_heads, config.head_dim, config.window) < 1:
        raise BadModel("config.json has a size below 1")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise BadModel(
            f"config.json: {config.num_heads} attention heads over {config.num_kv_heads} KV heads of {config.head_dim}",
            hint="Heads must divide evenly, and head_dim must be even",
        )
    if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
        raise BadModel(f"{len(config.rope.factors)} rotary factors for heads of {config.head_dim}")


def _architecture(raw: dict[str, Any]) -> str:
    known = ", ".join(models.ARCHITECTURES)
    named = raw.get("architectures") or []
    for name in named:
        if name in models.ARCHITECTURES:
            return str(name)
    what = f"architecture {named[0]!r} is not served" if named else "config.json names no architecture"
    raise BadModel(what, hint=f"Served: {known}")


def _refuse_unserved(raw: dict[str, Any], architecture: str) -> None:
    """Refuse what would be computed wrongly rather than served wrongly."""
    if raw.get("quantization_config"):
        raise BadModel("quantized checkpoints are not served", hint="Use the bf16 checkpoint of the model")
    if raw.get("hidden_act", "silu") != "silu":
        raise BadModel(f"activation {raw['hidden_act']!r} is not served for {architecture}", hint="Served: silu")
    if _slides(raw):
        raise BadModel("sliding window layers are not served yet", hint="Use a checkpoint with full attention")


def _slides(raw: dict[str, Any]) -> bool:
    """Whether a layer really has a sliding window: Qwen's configs also name one that is off, or that begins past the end."""
    if raw.get("layer_types"):
        return "sliding_attention" in raw["layer_types"]
    if not raw.get("use_sliding_window") or raw.get("sliding_window", 0) is None:
        return False
    first, count = raw.get("max_window_layers"), raw.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(count, int) and first >= count)


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Rotary settings in either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    given = {"rope_theta": raw.get("rope_theta", 10000.0)}
    given |= raw.get("rope_scaling") or {}
    given |= raw.get("rope_parameters") or {}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ("default", "linear", "llama3", "factors"):
        raise BadModel(f"rope scaling {kind!r} is not served", hint="Served: default, linear, llama3")
    if float(given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadModel("a partial rotary embedding is not served")
    theta = float(given["rope_theta"])
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(given["factor"]))
    if kind == "factors":
        return RopeConfig(theta, kind, factors=tuple(float(each) for each in given["factors"]))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_window=int(given.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )


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
        path = self.where.get(name)
        if path is None:
            raise BadModel(f"the weights in {self.folder} lack {name!r}", hint="The checkpoint does not match its config.json")
        try:
            found: Tensor = self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise BadModel(f"weight shard {path.name} does not hold {name!r}: {error}", hint=_AGAIN) from None
        return found


def _read(weights: Weights, model: Decoder, name: str, parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """One of our parameters, packed from its sources, each of the expected shape."""
    sources = model.source_names(name)
    owner = model.get_submodule(name.rpartition(".")[0])
    sizes = owner.sizes if isinstance(owner, PackedLinear) else (parameter.shape[0],)
    found = []
    for source, size in zip(sources, sizes, strict=True):
        found.append(weights.tensor(source))
        expected = (size, *parameter.shape[1:])
        if tuple(found[-1].shape) != expected:
            raise BadModel(
                f"{source!r} has shape {list(found[-1].shape)}, the config asks for {list(expected)}",
                hint="The checkpoint does not match its config",
            )
    whole = torch.empty(parameter.shape, dtype=dtype, device=device)  # not before: a wrong config may ask for any size
    start = 0
    for tensor in found:
        whole[start : start + len(tensor)] = tensor.to(device)
        start += len(tensor)
    return whole


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
