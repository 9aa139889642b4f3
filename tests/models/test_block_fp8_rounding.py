"""Logits of block-FP8 checkpoints in bfloat16: as far from those of float64 as rounding carries, no further.

How far that is, float64 says itself. It runs a second time with what products are given rounded as it is on a GPU: in a chunk
of more than 128 tokens to e4m3 by groups of 128 numbers, the published scheme, which alone moves logits by a tenth; and, like
all weights that are no codes, moved at random by up to one rounding of bfloat16. Experts are those that the exact run chose:
one of two that are nearly equal, taken for the other, would be worth more than all rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import write_pair
from torch import Tensor

from agentkv.engine import block_fp8, experts
from agentkv.engine.loader import LoadedModel, load_model

ROUNDING = 2.0**-8
SPARE, WORST = 2.0, 3.0
"""How many times as far as the rounded float64 run: in the mean over tokens, and for the worst token."""
FEW, MANY = [100, 100, *[1] * 29], [200]
Seen = Callable[[Tensor], Tensor]


def in_e4m3(x: Tensor) -> Tensor:
    """Each 128 numbers with a scale of their own, its largest at 448."""
    grouped = x.unflatten(-1, (-1, 128))
    scale = (grouped.abs().amax(-1, keepdim=True) / 448).float().to(x.dtype)
    codes = (grouped / scale.masked_fill(scale == 0, 1)).float().to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).flatten(-2)


class Play:
    """Runs of one checkpoint over the same tokens. routes: by call of a router, which experts the first run chose."""

    def __init__(self, path: Path, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.host, self.patch = path, host, monkeypatch
        self.tokens = torch.randint(0, 97, (230,), generator=torch.Generator().manual_seed(3)).tolist()
        self.noise = torch.Generator()
        self.routes: list[Tensor] = []

    def exact(self, chunks: list[int]) -> Tensor:
        """Logits `[num_tokens, vocab_size]` in float64; experts are noted."""
        self.routes = []
        loaded = load_model(self.path, dtype="float64")

        def note(router: Any, given: Any, logits: Tensor) -> None:
            self.routes.append(logits.topk(2, -1).indices)

        return self._logits(loaded, chunks, note)

    def rounded(self, chunks: list[int]) -> Tensor:
        """The same, with what products are given rounded."""
        self.noise.manual_seed(9)
        loaded = load_model(self.path, dtype="float64")
        for parameter in loaded.model.parameters():
            if parameter.dtype == torch.float64:
                parameter.copy_(self._moved(parameter))

        def of_map(x: Tensor) -> Tensor:
            return in_e4m3(self._moved(x)) if len(x) > 128 else self._moved(x)

        with self.patch.context() as patch:
            for module, name, seen in ((block_fp8, "block_linear", of_map), (experts, "expert_mlp", self._moved)):
                patch.setattr(module, name, _given(getattr(module, name), seen))
            return self._logits(loaded, chunks, self._follower())

    def served(self, loaded: LoadedModel, chunks: list[int]) -> Tensor:
        """What a loaded model says of them."""
        return self._logits(loaded, chunks, self._follower()).cpu().double()

    def _moved(self, x: Tensor) -> Tensor:
        return x * (1 + ROUNDING * (2 * torch.rand(x.shape, generator=self.noise, dtype=x.dtype) - 1))

    def _follower(self) -> Callable[..., Tensor]:
        routes: Iterator[Tensor] = iter(self.routes)

        def follow(router: Any, given: Any, logits: Tensor) -> Tensor:
            chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, next(routes), True)
            return logits.masked_fill(~chosen.to(logits.device), -torch.inf)

        return follow

    def _logits(self, loaded: LoadedModel, chunks: list[int], hook: Callable[..., Tensor | None]) -> Tensor:
        routers = [module for module in loaded.model.modules() if isinstance(module, experts.Router)]
        hooks = [router.register_forward_hook(hook) for router in routers]
        found: Tensor = self.host(loaded, 16).chunked(0, self.tokens, chunks)
        for each in hooks:
            each.remove()
        return found


def _given(function: Callable[..., Tensor], seen: Seen) -> Callable[..., Tensor]:
    """The function, given another first argument."""
    return lambda x, *rest: function(seen(x), *rest)


def apart(got: Tensor, want: Tensor) -> tuple[float, float]:
    """In the mean, and of the worst token: how far logits are apart as a share of their size."""
    by_token = (got - want).norm(dim=1) / want.norm(dim=1).mean()
    return float(by_token.square().mean().sqrt()), float(by_token.max())


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def play(request: pytest.FixtureRequest, tmp_path: Path, host: Any, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(write_pair(tmp_path, request.param, hidden_size=256)[0], host, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_off_by_rounding_alone(play: Play, device: str) -> None:
    """Decodes, chunks of few tokens, and one of more than 128. A CPU gives all of them activations as they are."""
    loaded = load_model(play.path, device=device, dtype="bfloat16")
    for chunks in (FEW, MANY):
        want = play.exact(chunks)
        (mean, worst), (most, limit) = apart(play.served(loaded, chunks), want), apart(play.rounded(chunks), want)
        print(f"{len(chunks)} chunks: off by {mean:.4f}, at worst {worst:.4f}; rounding alone {most:.4f}, {limit:.4f}")
        assert mean <= SPARE * most
        assert worst <= WORST * limit


def test_one_wrong_scale_would_be_seen(play: Play) -> None:
    """What the bounds are for: of one block of one map, a quarter too large."""
    want = play.exact(FEW)
    loaded = load_model(play.path, dtype="float64")
    scales = dict(loaded.model.named_parameters())["layers.1.self_attn.o_proj.weight_scale_inv"]
    scales[0, 1] *= 1.25
    mean, _ = apart(play.served(loaded, FEW), want)
    assert mean > SPARE * apart(play.rounded(FEW), want)[0]
