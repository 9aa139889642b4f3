"""Factors of low rank of linear maps: cut from a model's weights, written to a file, read for a rank (arXiv 2407.21118)."""

from __future__ import annotations

import hashlib
import json
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
    """A file of factors. digest: of its tensors; model: fingerprint of the model they were cut from. group_dim: dims of a
    group of heads; rank: of the factors, the most there is. eps: of the norm of keys."""

    path: str = field(repr=False, compare=False)
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
    """tensors: k.down, k.up, v.down, v.up `[num_layers, ...]`, frequency `[rotated / 2]`, and what there is of k.bias, v.bias,
    k.norm `[num_layers, num_kv_heads, head_dim]`. ValueError where the file cannot be written."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in sorted(tensors.items())}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    _, num_groups, rank, _ = tensors["k.down"].shape
    said = {"digest": digest.hexdigest(), "model": model, "group_dim": group_dim, "num_groups": num_groups}
    said |= {"rank": rank, "eps": eps}
    try:
        save_file(tensors, path, metadata={"low_rank": json.dumps(said)})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    return read_prepared(path)


def read_prepared(path: Path) -> Prepared:
    """What the file is. ValueError where it is none."""
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {})["low_rank"])
        return Prepared(str(path), **said)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"prepared={str(path)!r}: no file of factors ({type(error).__name__})") from None


@lru_cache(maxsize=8)
def factors(prepared: Prepared, ranks: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Factors:
    """The leading ranks of keys and values, on a device."""
    with safe_open(prepared.path, "pt") as file:
        names = set(file.keys())

        def read(name: str) -> Tensor | None:
            return file.get_tensor(name) if name in names else None

        downs = [file.get_tensor(f"{side}.down")[:, :, :rank] for side, rank in zip("kv", ranks, strict=True)]
        ups = [file.get_tensor(f"{side}.up")[:, :, :rank] for side, rank in zip("kv", ranks, strict=True)]
        frequency = file.get_tensor("frequency").to(device)
        extras = {"k_bias": read("k.bias"), "v_bias": read("v.bias"), "k_norm": read("k.norm")}

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype).contiguous()

    down = there(torch.cat(downs, 2).flatten(1, 2))
    held = {name: None if each is None else there(each) for name, each in extras.items()}
    return Factors(down, there(ups[0]), there(ups[1]), frequency, held, prepared.eps)
