"""Factors of low rank of linear maps: cut from a model's weights, written to a file, read for a rank (arXiv 2407.21118)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Prepared:
    """A file of factors, in memory. digest: of all that is in it; model: fingerprint of the model they were cut from.
    group_dim: dims of a group of heads; rank: of the factors, the most there is. eps: of the norm of keys. tensors: as in
    `write_prepared`."""

    path: str = field(repr=False, compare=False)
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    digest: str
    model: str
    group_dim: int
    num_groups: int
    rank: int
    eps: float


@dataclass(frozen=True, eq=False)
class Factors:
    """down: `[num_layers, num_groups * (rank_k + rank_v), hidden_size]`, in each group keys before values. k_factor, v_factor:
    `[num_layers, num_kv_heads, rank, head_dim]`. extras: by name in `LowRankPages`, `[num_layers, num_kv_heads, head_dim]` or
    None."""

    down: Tensor
    k_factor: Tensor
    v_factor: Tensor
    frequency: Tensor
    extras: dict[str, Tensor | None]
    eps: float

    def of_layer(self, layer: int) -> dict[str, Any]:
        """What `LowRankPages` takes beside latents."""
        extras = {name: None if each is None else each[layer] for name, each in self.extras.items()}
        known = {"frequency": self.frequency, "eps": self.eps, **extras}
        return {"k_factor": self.k_factor[layer], "v_factor": self.v_factor[layer], **known}


def decompose(weight: Tensor, group_dim: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """(up `[num_groups, rank, group_dim]`, down `[num_groups, rank, in_size]`), float32, of a map's weight `[out_size,
    in_size]`: of each group of rows, up.T @ down is the group, and its leading r of rank are the best of rank r.

    moment: `[in_size, in_size]`, sum of x x^T over inputs x; best is then what errs least on these, else on the weights.
    """
    groups = torch.unflatten(weight.double(), 0, (-1, group_dim))
    root = torch.eye(weight.shape[1], dtype=torch.float64) if moment is None else _root(moment.double().cpu())
    u, s, vt = torch.linalg.svd(groups @ root, full_matrices=False)
    half = s.sqrt().unsqueeze(2)
    down = torch.linalg.solve_triangular(root, half * vt, upper=False, left=False)
    return (half * u.transpose(1, 2)).float(), down.float()


def _root(moment: Tensor) -> Tensor:
    """Lower S with S S^T = moment, which is lifted until it is positive definite."""
    least = float(torch.linalg.eigvalsh(moment)[0])
    floor = 1e-6 * float(moment.diagonal().mean())
    lift = max(0.0, floor - least)
    root: Tensor = torch.linalg.cholesky(moment + lift * torch.eye(len(moment), dtype=moment.dtype))
    return root


def write_prepared(path: Path, tensors: dict[str, Tensor], model: str, group_dim: int, eps: float) -> Prepared:
    """tensors: k.down, v.down `[num_layers, num_groups, rank, hidden_size]`, k.up, v.up `[num_layers, num_kv_heads, rank,
    head_dim]`, frequency `[head_dim / 2]`, and what there is of k.bias, v.bias, k.norm `[num_layers, num_kv_heads, head_dim]`.
    ValueError where the file cannot be written."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    _, num_groups, rank, _ = tensors["k.down"].shape
    said = {"model": model, "group_dim": group_dim, "num_groups": num_groups, "rank": rank, "eps": eps}
    try:
        save_file(tensors, path, metadata={"low_rank": json.dumps(said | {"digest": _digest(tensors, said)})})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    return read_prepared(path)


def read_prepared(path: Path) -> Prepared:
    """The whole file. ValueError where it is none, or not as it was written."""
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {})["low_rank"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
        found = Prepared(str(path), tensors, **said)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"prepared={str(path)!r}: no file of factors ({type(error).__name__})") from None
    if _digest(tensors, {name: each for name, each in said.items() if name != "digest"}) != found.digest:
        raise ValueError(f"prepared={str(path)!r}: the file was changed or cut since it was written; prepare it again")
    return found


def misfit(
    prepared: Prepared, *, num_layers: int, num_kv_heads: int, head_dim: int, hidden_size: int, key_norm: bool
) -> str | None:
    """Why factors are not of a model of these sizes; None where they are. key_norm: are its keys normed?"""
    groups, rank, by_head = prepared.num_groups, prepared.rank, (num_layers, num_kv_heads, head_dim)
    wanted: dict[str, tuple[int, ...]] = {"frequency": (head_dim // 2,)}
    for side in "kv":
        wanted |= {f"{side}.down": (num_layers, groups, rank, hidden_size), f"{side}.up": (*by_head[:2], rank, head_dim)}
    extras = {"k.bias", "v.bias", "k.norm"} & prepared.tensors.keys()
    wanted |= dict.fromkeys(extras | ({"k.norm"} if key_norm else set()), by_head)
    if groups * prepared.group_dim != num_kv_heads * head_dim or ("k.norm" in extras and not key_norm):
        return f"its {groups} groups of {prepared.group_dim} dims are not those of {num_kv_heads} heads of {head_dim}"
    found = {name: tuple(tensor.shape) for name, tensor in prepared.tensors.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return f"{wrong[0]} is {found.get(wrong[0])}, not {wanted.get(wrong[0])}" if wrong else None


def _digest(tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> str:
    """Of names, shapes, dtypes and bytes, and of what is said of them."""
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@lru_cache(maxsize=8)
def factors(prepared: Prepared, ranks: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Factors:
    """The leading ranks of keys and values, on a device."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype).contiguous()

    tensors, of_sides = prepared.tensors, tuple(zip("kv", ranks, strict=True))
    downs, ups = ([tensors[f"{side}.{name}"][:, :, :rank] for side, rank in of_sides] for name in ("down", "up"))
    extras = {name: tensors.get(name.replace("_", ".")) for name in ("k_bias", "v_bias", "k_norm")}
    held = {name: None if each is None else there(each) for name, each in extras.items()}
    down = there(torch.cat(downs, 2).flatten(1, 2))
    return Factors(down, there(ups[0]), there(ups[1]), tensors["frequency"].to(device), held, prepared.eps)
