"""Tiny random checkpoints, their transformers twins, and a host side that lays pages out by hand."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.engine.core import GRANULE, Batch, EngineConfig, Reach, RowWork
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.types import Sampling

sys.path.insert(0, str(Path(__file__).parent))  # lets the tests of this folder import their helper by name

DTYPES = {"float32": torch.float32, "float64": torch.float64}
VOCAB = 97


@dataclass
class Host:
    """Rows with pages in shuffled order, over a runner whose arena starts as NaN bytes."""

    loaded: LoadedModel
    page_size: int
    method: Any = None
    pages_a_row: int = 24
    max_rows: int = 4
    runner: ModelRunner = field(init=False)
    lengths: dict[int, list[int]] = field(init=False)  # row -> [logical, physical]
    holes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # row -> pruned logical intervals

    def __post_init__(self) -> None:
        groups = self.loaded.groups(self.page_size)
        count = self.pages_a_row * self.max_rows
        config = EngineConfig(
            memory=(count + 1) * sum(group.stripe_bytes for group in groups),
            window=self.pages_a_row * self.page_size,
            page_size=self.page_size,
            max_rows=self.max_rows,
        )
        self.runner = ModelRunner(self.loaded, config, self.method or methods.get("dense"))
        self.runner.pages.arena.fill_(0xFF)
        self.group_units: list[dict[int, list[int]]] = []  # by group: row -> its pages
        base = 1  # one granule off, so that no stripe is aligned to another
        for group in groups:
            stride = group.stripe_bytes // GRANULE
            units = [base + stride * index for index in range(count)]
            base += stride * count
            random.Random(self.page_size).shuffle(units)
            per = self.pages_a_row
            self.group_units.append({row: units[row * per : (row + 1) * per] for row in range(self.max_rows)})
        self.units = self.group_units[0]
        self.given: set[int] = set()
        self.lengths = {row: [0, 0] for row in range(self.max_rows)}

    def batch(self, work: dict[int, list[int]], sample: bool = False) -> Batch:
        """A batch that appends tokens to rows, in the order of `work`."""
        updates = [
            TableUpdate(row, 0, units[row], group)
            for group, units in enumerate(self.group_units)
            for row in work
            if row not in self.given
        ]
        self.given |= set(work)
        rows = []
        for row, tokens in work.items():
            logical, physical = self.lengths[row]
            reaches = tuple(self.reach(row, len(tokens), group.window) for group in self.runner.groups)
            rows.append(RowWork(row, tokens, logical, physical, sample, Sampling(), 0, 0, reaches=reaches))
            self.lengths[row] = [logical + len(tokens), physical + len(tokens)]
        return Batch(rows, updates)

    def reach(self, row: int, count: int, window: int | None) -> Reach | None:
        """What the next tokens of the row see, counted over every position; every group holds all that was not pruned."""
        if window is None:
            return None
        logical, physical = self.lengths[row]
        holes = self.holes.get(row, [])
        kept = [p for p in range(logical + count) if not any(low <= p < high for low, high in holes)]
        first = (sum(p <= query - window for p in kept) for query in range(logical, logical + count))
        return Reach(physical, tuple(first))

    def prune(self, row: int, start: int, end: int) -> None:
        """Remove the logical interval [start, end), which has no hole yet, in place."""
        logical, physical = self.lengths[row]
        first = start - sum(max(0, min(high, start) - low) for low, high in self.holes.get(row, []))
        for group, units in enumerate(self.group_units):
            place = [(unit, slot) for unit in units[row] for slot in range(self.page_size)]
            source, target = place[first + end - start : physical], place[first : physical - (end - start)]
            self.runner.move_slots(source, target, group)
        self.lengths[row] = [logical, physical - (end - start)]
        self.holes.setdefault(row, []).append((start, end))

    def logits(self, row: int, tokens: list[int]) -> torch.Tensor:
        return self.runner.logits(self.batch({row: tokens}))

    def chunked(self, row: int, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits of all tokens, forwarded in chunks of the given sizes (the last one takes the rest)."""
        outs, start = [], 0
        for size in [*chunks, len(tokens)]:
            piece = tokens[start : start + size]
            if piece:
                outs.append(self.logits(row, piece))
            start += len(piece)
        return torch.cat(outs)

    def greedy(self, row: int, prompt: list[int], count: int) -> list[int]:
        made: list[int] = []
        tokens = prompt
        for _ in range(count):
            (token,) = self.runner.execute(self.batch({row: tokens}, sample=True))
            assert token is not None
            made.append(token)
            tokens = [token]
        return made


def _hf_config(family: str) -> Any:
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": None,
    }
    if family == "gemma3":  # two layers slide, over a window shorter than a page of 16; nothing is left at its default
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        }
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(
            **shared, rope_parameters=ropes, layer_types=kinds, sliding_window=7, query_pre_attn_scalar=20, rms_norm_eps=1e-5
        )
    if family == "qwen3":
        return Qwen3Config(**shared, tie_word_embeddings=True)
    if family.startswith("qwen3-moe"):  # one layer without experts, by either setting
        experts = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        plain = {"norm_topk_prob": True, "mlp_only_layers": [1]} if family == "qwen3-moe" else {"decoder_sparse_step": 2}
        return Qwen3MoeConfig(**shared, **experts, **plain, tie_word_embeddings=family == "qwen3-moe")
    if family == "qwen3-sliding":
        slides = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        return Qwen3Config(**shared, **slides, tie_word_embeddings=True)
    if family.startswith("qwen2"):
        del shared["head_dim"]  # Qwen2 has no such field: hidden_size / heads
        return Qwen2Config(**shared, tie_word_embeddings=family == "qwen2-tied")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    biased = family == "llama-biased"
    kind = {} if biased else {"rope_parameters": rope}
    return LlamaConfig(**shared, **kind, tie_word_embeddings=False, attention_bias=biased, mlp_bias=biased)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> directory of a tiny random checkpoint (made once)."""
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(_hf_config(family))
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a mix-up
                    near_one = "norm" in name and family != "gemma3"  # which stores a norm's weight less one
                    torch.nn.init.normal_(parameter, mean=1.0 if near_one else 0.0, std=0.2)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family], max_shard_size="60KB")
        return made[family]

    return get


@pytest.fixture(scope="session")
def micro_path() -> Path:
    import agentkv

    return Path(agentkv.__file__).parent / "data" / "micro"


@pytest.fixture(scope="session")
def model(checkpoint: Any, micro_path: Path) -> Any:
    """(family, dtype name) -> our loaded model."""
    made: dict[tuple[str, str], LoadedModel] = {}

    def get(family: str, dtype: str) -> LoadedModel:
        if (family, dtype) not in made:
            made[family, dtype] = load_model(micro_path if family == "micro" else checkpoint(family), dtype=dtype)
        return made[family, dtype]

    return get


@pytest.fixture(scope="session")
def twin(checkpoint: Any, micro_path: Path) -> Any:
    """(family, dtype name) -> transformers' model."""
    from transformers import AutoModelForCausalLM

    made: dict[tuple[str, str], Any] = {}

    def get(family: str, dtype: str) -> Any:
        if (family, dtype) not in made:
            path = micro_path if family == "micro" else checkpoint(family)
            loop = {"experts_implementation": "eager"} if "moe" in family else {}  # the default has no float64
            made[family, dtype] = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **loop).eval()
        return made[family, dtype]

    return get


@pytest.fixture(scope="session")
def host() -> type[Host]:
    return Host
