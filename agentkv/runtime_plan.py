"""The memory plan of a model on this machine, by method, before anything is started: no weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentkv import methods as known
from agentkv.dialogue import Message
from agentkv.engine.core import EngineConfig, Group, KVGroup
from agentkv.engine.devices import usable_device, usable_memory
from agentkv.engine.forms import serve
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sizing import gib, graph_bytes, library_bytes, plan_memory
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.survey import longest_session, session_bytes, survey_model, try_step
from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import BadModel, BadRequest
from agentkv.runtime_attention import choose
from agentkv.runtime_crossover import crossover
from agentkv.runtime_engine import engine_sizes, model_path
from agentkv.runtime_findings import Findings
from agentkv.tools.render import Renderer

_SMALLER = "Take a smaller model or dtype, or a device with more memory"


def plan_model(
    model: str | Path,
    found: Findings,
    *,
    device: str = "auto",
    dtype: str = "auto",
    memory: int | str | None = None,
    window: int | None = None,
    page_size: int | None = None,
    warm_memory: int | str | None = None,
    methods: Iterable[str] = ("dense",),
    attention: str = "auto",
) -> dict[str, Any]:
    """What `Runtime` with these options would have: facts of the model and, under `methods`, a row for each of these; bytes.

    What would not work goes to `found`, and leaves out what depends on it. Damage inside weights is not seen.
    """
    report: dict[str, Any] = {"name": str(model)}
    with found.looking_at("device"):
        report["device"] = usable_device(device)
    with found.looking_at("model"):
        path = model_path(model)
        tokenizer = _tokenizer(path, found)
        if "device" not in report:
            return report
        loaded = survey_model(path, device=report["device"], dtype=dtype)
        report |= _facts(loaded)
        if tokenizer is not None:
            with found.looking_at("tokenizer"):
                tokenizer.check_fits(loaded.config.vocab_size)
        config = engine_sizes(loaded, memory, window, page_size, warm_memory)
        report |= {"window": config.window, "page_size": config.page_size, "warm_bytes": config.warm_memory}
        with found.looking_at("attention"):
            choice = choose(attention, loaded, config.page_size, str(model))
            report["attention"] = choice._asdict()
            config = replace(config, attention=choice.backend)
        report["methods"] = _by_method(loaded, config, methods, found)
    return report


def _tokenizer(path: Path, found: Findings) -> Tokenizer | None:
    tokenizer = None
    with found.looking_at("tokenizer"):
        tokenizer = Tokenizer.load(path)
        _try_template(tokenizer, found)
    return tokenizer


def _try_template(tokenizer: Tokenizer, found: Findings) -> None:
    """Render a first message as a session would, without and with a tool."""
    renderer, hello = Renderer(tokenizer), [Message(role="user", content="hello")]
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    try:
        renderer.render(hello, first=True, closed=True, system=None, tools=[], template_args={})
    except BadRequest as error:
        return found.problem("tokenizer", error.message, error.hint)
    try:
        renderer.render(hello, first=True, closed=True, system=None, tools=[tool], template_args={})
    except BadRequest as error:
        text = f"sessions with tools will be refused: {error.message}"
        found.advise("tokenizer", text, "Use a chat template that renders tools, or describe them in the system prompt")


def _facts(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "architecture": loaded.config.architecture,
        "format": "gguf" if loaded.path.is_file() else "safetensors",
        "parameters": sum(each.numel() for name, each in loaded.model.named_parameters() if "scale" not in name),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weight_bytes": loaded.weight_bytes,
        "usable_bytes": usable_memory(loaded.device),
    }


def _by_method(loaded: LoadedModel, config: EngineConfig, methods: Iterable[str], found: Findings) -> list[dict[str, Any]]:
    usable, weights = usable_memory(loaded.device), loaded.weight_bytes
    if weights >= usable:
        raise BadModel(f"the weights take {gib(weights)}, {loaded.device} has {gib(usable)}", hint=_SMALLER)
    rows = []
    step = try_step(loaded, config, SparseMethod())
    for name in methods:
        with found.looking_at(f"method {name}"):
            rows.append({"method": name, **_row(loaded, config, name, step, found)})
    return rows


def _row(loaded: LoadedModel, config: EngineConfig, name: str, step: int | None, found: Findings) -> dict[str, Any]:
    """step: bytes of the largest steps with full attention, None where that was not tried. tokens_that_fit: in any number of
    sessions, if every group holds every one of them."""
    method, part = known.parse(name), f"method {name}"
    groups, (served,) = serve(loaded, config, (method,))
    form = served.form
    whole = session_bytes(groups, config, config.window, (form,))
    row: dict[str, Any] = {
        "exactness": method.exactness,
        "reuse": method.reuse,
        "groups": [_group(group) for group in groups],
        "kv_bytes_per_token": sum(groups[index].token_bytes for index in form.groups),
        "step_bytes": step,
        "session_bytes": whole,
        "crossover": crossover(name),
    }
    if step is None and not config.memory:
        found.advise(part, "the arena is not known before the start: a trial of the largest steps would take minutes")
        return row
    arena = config.memory or plan_memory(loaded, config, method, step).arena
    taken = step + graph_bytes(loaded, config, step) if step is not None else 0
    left = usable_memory(loaded.device) - loaded.weight_bytes - taken - library_bytes(config)
    if arena > left:
        raise BadModel(
            f"an arena of {gib(arena)}, weights of {gib(loaded.weight_bytes)} and a step of {gib(taken)} are more than the "
            f"{gib(usable_memory(loaded.device))} of {loaded.device}",
            hint=f"memory={left} or less" if left > 0 else _SMALLER,
        )
    longest = longest_session(groups, config, arena, (form,))
    if longest < config.window:
        found.problem(
            part,
            f"a session of the whole window of {config.window:,} tokens takes {gib(whole)}, the arena has "
            f"{gib(arena)}: requests past {longest:,} tokens will be refused",
            f"Open it with memory={whole} or more" + (f", or with window={longest}" if longest else ""),
        )
    stripe = sum(groups[index].stripe_bytes for index in form.groups)
    return row | {
        "arena_bytes": arena,
        "tokens_that_fit": arena // stripe * config.page_size,
        "longest_session": longest,
        "whole_windows": arena // whole,
    }


def _group(group: Group) -> dict[str, Any]:
    """A KV group, or a method's state. window: tokens back that its layers see, None for all."""
    kind = {"kv_heads": group.num_kv_heads, "head_dim": group.head_dim} if isinstance(group, KVGroup) else {"state": group.name}
    return {
        "layers": len(group.layers),
        "window": group.window,
        **kind,
        "token_bytes": group.token_bytes,
        "page_bytes": group.stripe_bytes,
    }
