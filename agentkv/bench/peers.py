"""Who generates the same tokens in an engine's benchmark, in this process: this engine, or transformers.

Each side takes prompts of token ids and answers with greedy tokens, and with when they came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentkv import methods
from agentkv.engine.checkpoint import find_gguf
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.errors import BadRequest
from agentkv.types import Sampling


@dataclass(slots=True)
class Run:
    """One measured run. prefill_s, decode_s: seconds in which prompts were read, and in which only new tokens were made.

    decoded: tokens made in decode_s. seconds: the whole. tokens: of each answer. cpu_s: their maker's processor time in
    prefill_s and decode_s, None for a server elsewhere.
    """

    prompt_tokens: int
    prefill_s: float
    decode_s: float
    decoded: int
    seconds: float
    tokens: list[list[int]] = field(repr=False)
    cpu_s: tuple[float, float] | None = None

    def rates(self) -> dict[str, float]:
        """Tokens a second: prompt tokens while prefilling, new tokens while decoding, new tokens over the whole run; and the
        first two by second of processor time, which a busy machine's other work hardly touches."""
        made = sum(map(len, self.tokens))
        rates = {
            "prefill": self.prompt_tokens / self.prefill_s,
            "decode": self.decoded / self.decode_s,
            "end_to_end": made / self.seconds,
        }
        if self.cpu_s is not None:
            prefill, decode = self.cpu_s
            rates |= {"prefill_cpu": self.prompt_tokens / prefill, "decode_cpu": self.decoded / decode}
        return rates


class Side(Protocol):
    """One side of the comparison. together: whether prompts run at once or one after another. gives_ids: are tokens known?"""

    name: str
    together: bool
    gives_ids: bool

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Run:
        """`new` greedy tokens after each prompt; an end-of-text token ends nothing."""
        ...


class Ours:
    """This engine, in this process, prompts in one batch; nothing is cached from run to run."""

    name, together, gives_ids = "agentkv", True, True

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.llm = LLM(config, ModelRunner(loaded, config, methods.get("dense")))
        self._runs = 0

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Run:
        """See Side."""
        self._runs += 1
        begun, busy = time.perf_counter(), time.process_time()
        sampling = Sampling(temperature=0, max_tokens=new)
        seqs = [self.llm.add(Request(list(prompt), sampling, salt=str(self._runs))) for prompt in prompts]
        while any(seq.num_generated == 0 for seq in seqs):
            self.llm.step()
        filled, filling = time.perf_counter(), time.process_time() - busy
        before = sum(seq.num_generated for seq in seqs)
        while self.llm.has_work:
            self.llm.step()
        ended, decoding = time.perf_counter(), time.process_time() - busy - filling
        tokens = [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]
        for seq in seqs:
            self.llm.abort(seq)
        decoded = sum(map(len, tokens)) - before
        cpu_s = (filling, decoding)
        return Run(sum(map(len, prompts)), filled - begun, ended - filled, decoded, ended - begun, tokens, cpu_s)


class Transformers:
    """transformers' generate with its own KV cache and sdpa, in this process, prompts one after another."""

    name, together, gives_ids = "transformers", False, True

    def __init__(self, loaded: LoadedModel) -> None:
        self.model: Any = twin(loaded)
        self.model.eval()

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Run:
        """See Side."""
        clock = _Clock()
        begun = time.perf_counter()
        prefill = decode = filling = decoding = 0.0
        tokens: list[list[int]] = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            clock.times, clock.busy = [time.perf_counter()], [time.process_time()]
            options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            made: Tensor = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, eos_token_id=None, **options
            )
            answer: list[int] = made[0, len(prompt) :].tolist()
            tokens.append(answer)
            prefill += clock.times[2] - clock.times[0]  # the streamer gets the prompt first
            decode += clock.times[-1] - clock.times[2]
            filling += clock.busy[2] - clock.busy[0]
            decoding += clock.busy[-1] - clock.busy[2]
        ended = time.perf_counter()
        decoded = sum(len(each) - 1 for each in tokens)
        return Run(sum(map(len, prompts)), prefill, decode, decoded, ended - begun, tokens, (filling, decoding))


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.busy: list[float] = []

    def put(self, value: Any) -> None:
        """Tokens came."""
        self.times.append(time.perf_counter())
        self.busy.append(time.process_time())

    def end(self) -> None:
        """No more come."""


def twin(loaded: LoadedModel) -> Any:
    """transformers' model of the same weights: its own reading of a directory, or of a GGUF file what we dequantised."""
    file = find_gguf(loaded.path)
    if file is not None:
        return _from_gguf(loaded, file)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.dtype, attn_implementation="sdpa")


def _from_gguf(loaded: LoadedModel, file: Path) -> Any:
    """transformers' model of the file's architecture with the weights that we dequantised (its own reader needs accelerate)."""
    import transformers

    from agentkv.engine.gguf import GGUFFile

    kind = getattr(transformers, loaded.config.architecture)
    with torch.device("meta"):
        model = kind(kind.config_class(**GGUFFile(file).config(), attn_implementation="sdpa"))
    model = model.to_empty(device="cpu").to(loaded.dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are in no state dict
    missing, unexpected = model.load_state_dict(unpacked_weights(loaded), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise BadRequest(f"transformers' model has other weights: {[*missing, *unexpected][:3]}", param="peer")
    model.tie_weights()
    return model


def unpacked_weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """A model's weights under the names of its checkpoint, copied."""
    modules = dict(loaded.model.named_modules())
    weights: dict[str, Tensor] = {}
    for name, parameter in loaded.model.named_parameters():
        names = loaded.model.source_names(name)
        module: Any = modules[name.rpartition(".")[0]]
        sizes: list[int] = list(module.sizes) if len(names) > 1 else [len(parameter)]
        weights |= {each: part.clone() for each, part in zip(names, torch.split(parameter, sizes), strict=True)}
    return weights
