"""Drawn models of the shapes that are served, and skewed batches of given tokens played on them by any method.

Used by tests, which compare what devices and dtypes say, and by the run under a memory checker. Needs the engine alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from agentkv import methods
from agentkv.engine import models
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.forms import model_shape
from agentkv.engine.layers import ModelConfig, RopeConfig
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.preparation import Preparation
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import Kept, SparseMethod
from agentkv.engine.tables import HeadTable, RowTable
from agentkv.engine.view import DeviceBatch, Selection
from agentkv.types import Sampling

PAGE = 16
VOCAB = 20
"""As many tokens as an answer can have log-probabilities of, so that those of a draw are its logits but for a constant."""
_SHARED: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 256, "inner_size": 512, "norm_eps": 1e-6, "window": 2048}
_ROPE = RopeConfig(10_000.0)


def _config(architecture: str, num_heads: int, num_kv_heads: int, head_dim: int, **more: Any) -> ModelConfig:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return ModelConfig(architecture=architecture, **_SHARED, **heads, **{"num_layers": 3, "rope": _ROPE, "tied": False} | more)


SHAPES: dict[str, ModelConfig] = {
    "llama-64-1": _config("LlamaForCausalLM", 4, 4, 64),
    "qwen2-64-4": _config("Qwen2ForCausalLM", 8, 2, 64),
    "qwen3-128-4": _config("Qwen3ForCausalLM", 8, 2, 128),
    "llama-128-8": _config("LlamaForCausalLM", 8, 1, 128),
    "qwen3-256-4": _config("Qwen3ForCausalLM", 8, 2, 256),
    "gemma3-256-4": _config("Gemma3ForCausalLM", 4, 1, 256, sliding=(48, None, 48), activation="gelu_pytorch_tanh"),
}
"""Architecture, head_dim, query heads of a KV head."""

HALVED = 256
"""Of a prompt of so many tokens, methods with a budget read half (`SparseMethod.small`)."""
_FILES = TemporaryDirectory()


def drawn(name: str, device: str, dtype: torch.dtype, moved: float = 0.0) -> LoadedModel:
    """The shape with drawn weights that bfloat16 has exactly, the same on every device and in every dtype.

    Weights are wide enough that a token which is read, or is not, changes what comes next. moved: each weight is moved by up to
    that share of itself.
    """
    config = SHAPES[name]
    draw, noise = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    model = models.resolve(config.architecture)(config).to(torch.float64).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(0.0 if "gemma" in name else 1.0, 0.2, generator=draw)
        else:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=draw)
        parameter.copy_(parameter.bfloat16())
        if moved:
            parameter.mul_(1 + moved * (2 * torch.rand(parameter.shape, generator=noise, dtype=torch.float64) - 1))
    model = model.to(dtype).to(device)
    model.prepare()
    return LoadedModel(model, config, Path(), torch.device(device), dtype, f"drawn {name}")


def method_of(name: str, loaded: LoadedModel) -> SparseMethod | None:
    """The method with options at which the prompts below show what it does; None where it does not serve the model."""
    options: dict[str, Any] = {}
    if methods.resolve(name).preparation is not None and not loaded.config.sliding:
        options["prepared"] = _prepared(name, loaded.fingerprint.removeprefix("drawn "))
    made = methods.get(name, **options)
    made = methods.get(name, **{**made.small(HALVED), **options})
    return None if made.unserved(model_shape(loaded, PAGE)) else made


@cache
def _prepared(name: str, shape: str) -> str:
    """The file that the method reads for a shape."""
    path = Path(_FILES.name) / f"{name}-{shape}"
    module = import_module(methods.NAMES[name].partition(":")[0])
    module.prepare(Preparation(drawn(shape, "cpu", torch.float64)), [], path, group_size=1)
    return str(path)


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    found: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


PROMPTS = (400, 33, 16, 5, 260, 131)
"""Tokens of the first turns that run together."""
ANSWERS = (6, 3, 8, 1, 5, 4)
LATER = (37, 110, 1, 20, 64, 3)
"""Tokens that the second turns bring."""


def engine(loaded: LoadedModel, served: Sequence[SparseMethod], **sizes: Any) -> LLM:
    """An engine with chunks shorter than the longest prompt."""
    config = EngineConfig(**{"memory": 96 << 20, "window": 2048, "page_size": PAGE, "max_rows": 8, "step_tokens": 160} | sizes)
    reuse = "radix" if all(method.reuse == "radix" for method in served) else "chain"
    return LLM(config, ModelRunner(loaded, config, served), reuse=reuse)


def play(llm: LLM, forms: Sequence[int] = (0,) * len(PROMPTS), scale: float = 1.0) -> Tensor:
    """Two turns of rows of very different lengths at once, their answers given: log-probabilities of all tokens at each draw,
    float64 `[num_draws, VOCAB]`. forms: by row the engine's form. scale: of the prompts' lengths."""
    histories = [tokens(row, max(1, int(count * scale))) for row, count in enumerate(PROMPTS[: len(forms)])]
    found: list[Tensor] = []
    for turn in range(2):
        seqs, draws = [], dict[int, list[Tensor]]()
        for row, form in enumerate(forms):
            answer = tokens(100 + 10 * turn + row, ANSWERS[row])
            sampling = Sampling(max_tokens=len(answer), logprobs=True, top_logprobs=VOCAB)
            seqs.append(llm.add(Request(list(histories[row]), sampling, chain_id=f"row {row}", mask=_only(answer), form=form)))
            draws[seqs[-1].seq_id] = []
        while llm.has_work:
            for output in llm.step():
                assert output.seq.fault is None, output.seq.fault.__cause__ or output.seq.fault
                draws[output.seq.seq_id] += [_logprobs(score.top) for score in output.scores]
        for row, seq in enumerate(seqs):
            made = list(seq.token_ids[seq.num_prompt_tokens :])
            llm.commit(seq, made)
            histories[row] = [*seq.token_ids, *tokens(200 + row, LATER[row])]
            found += draws[seq.seq_id]
    return torch.stack(found)


def _only(answer: list[int]) -> Any:
    """A mask that leaves the answer's next token."""
    return lambda made: bytes(token == answer[len(made)] for token in range(VOCAB))


def _logprobs(top: Sequence[tuple[int, float]]) -> Tensor:
    line = torch.empty(VOCAB, dtype=torch.float64)
    for token, logprob in top:
        line[token] = logprob
    return line


def distances(got: Tensor, want: Tensor) -> Tensor:
    """By draw, how far its logits are apart, as a share of their size; what all of them have in common is no difference."""
    got, want = (each - each.mean(1, keepdim=True) for each in (got, want))
    return (got - want).norm(dim=1) / want.norm(dim=1).mean()


@dataclass(frozen=True)
class Coded:
    """What tokens became: bytes of a seal's new pages, or of a step's slots in one layer, uint8."""

    codes: Tensor


class Choices:
    """What one run's methods chose, in order: what a decode step reads (`Selection`), what a seal keeps (`Kept`), the codes and
    their scales that seals and steps write (`Coded`). A run that follows them makes its own, which are counted, and reads what
    the first run chose: so a near tie, or a number on the edge of a code, that rounding decides otherwise is told apart from a
    wrong result.

    differ: of `total` chosen slots and written bytes those that a follower would not have chosen.
    """

    def __init__(self) -> None:
        self.made: list[Selection | Kept | Coded | None] = []
        self.differ = self.total = 0

    def noting(self, method: SparseMethod) -> SparseMethod:
        """The method, whose choices are noted here."""
        return _with(method, lambda made: self.made.append(_moved(made, "cpu")) or made)

    def followed_by(self, method: SparseMethod) -> tuple[SparseMethod, Choices]:
        """The method, which is given these choices, and where its own are counted."""
        count, ahead = Choices(), iter(self.made)

        def follow(own: Any) -> Any:
            theirs = next(ahead)
            if isinstance(own, Coded):
                count.total += own.codes.numel()
                count.differ += int((own.codes.cpu() != theirs.codes).sum())
            for mine, given in zip(_sets(own), _sets(theirs), strict=True):
                count.total += len(given)
                count.differ += len(given - mine)
            return _moved(theirs, own)

        return _with(method, follow), count


def _with(method: SparseMethod, choose: Any) -> SparseMethod:
    """The method, whose choices go through a function."""
    kind = type(method)

    def select(self: Any, layer: int, q: Tensor, q_raw: Tensor, batch: DeviceBatch) -> Any:
        own = kind.select(self, layer, q, q_raw, batch)
        chosen = choose(own)
        if chosen is own or own.table is None:
            return chosen
        return _placed(chosen, own.table, batch.table_of(layer))

    def seal(self: Any, job: Any) -> Any:
        kept = kind.seal(self, job)
        if kept is not None:
            return choose(kept)
        for spec in self.states(job.shape):
            if spec.scope == "page" and spec.part == "sealed":
                units, pages = job.new(spec.name)
                written = pages[job.work.held.slots // spec.page_size :]
                units[written] = choose(Coded(units[written])).codes
        return None

    def store(self: Any, layer: int, k_raw: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> None:
        kind.store(self, layer, k_raw, k, v, batch)
        for units, places in (batch.state(name) for name in batch.states):
            if units.dtype == torch.uint8:  # codes by slot, or the bytes of their scales
                units, at = units[:, layer], (places.entries, slice(None), slice(None), places.offsets)
                units[at] = choose(Coded(units[at])).codes

    hooks = {"select": select, "seal": seal} | ({} if kind.stores else {"store": store})
    changed = type(kind.__name__, (kind,), {**hooks, "graph_safe": False})
    made: SparseMethod = changed(**{each.name: getattr(method, each.name) for each in fields(method)})
    return made


def _moved(made: Any, where: Any) -> Any:
    """The choice on a device, or where another is; without the places of its slots, which are one run's own."""
    if made is None:
        return None
    if isinstance(made, Selection):
        made = replace(made, table=None)
    tensors = {each.name: value for each in fields(made) if isinstance(value := getattr(made, each.name), Tensor)}
    device = where if isinstance(where, str) else getattr(where, next(iter(tensors))).device
    return replace(made, **{name: tensor.to(device) for name, tensor in tensors.items()})


def _placed(given: Selection, own: HeadTable, table: RowTable) -> Selection:
    """What is given, read as the run reads its own choice: by a table that names the given slots in this run's pages."""
    pages = given.slots if given.pages else given.slots // table.page_size
    lines = table.entries[table.rows].to(torch.int64)
    names = lines.gather(1, pages.flatten(1).to(torch.int64).clamp(max=lines.shape[1] - 1)).view(pages.shape)
    if own.by_slot:
        names = names * table.page_size + given.slots % table.page_size
    entries = names.to(own.entries.dtype).view_as(own.entries)
    return replace(given, table=replace(own, entries=entries))


def _sets(made: Any) -> list[set[int]]:
    """By row and head, or layer and head, what was chosen."""
    if made is None or isinstance(made, Coded):
        return []
    slots, lens = (made.slots, made.lens) if isinstance(made, Selection) else (made.indices, made.counts)
    lines, counts = slots.flatten(0, -2).tolist(), lens.expand(slots.shape[:-1]).flatten().tolist()
    return [set(line[:count]) for line, count in zip(lines, counts, strict=True)]
