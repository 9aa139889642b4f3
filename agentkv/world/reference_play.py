"""Play a task with transformers' own model and `generate`: an oracle for any other engine.

It uses nothing of agentkv but the world, so equal verdicts are independent evidence.
"""

from __future__ import annotations

import json
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from agentkv.world.dialect import NATIVE, Dialect
from agentkv.world.env import World
from agentkv.world.task import make_task

_CALL = re.compile(r"<tool_call>\n(\{.*\})\n</tool_call>", re.DOTALL)


@lru_cache(maxsize=2)
def _load(model_dir: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=dtype)
    return tokenizer, model.to(device).eval()


def play_with_transformers(
    model_dir: str | Path,
    seed: int,
    max_bytes: int = 8192,
    max_turns: int = 24,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    family: str | None = None,
    followups: bool = False,
    dialect: Dialect = NATIVE,
    drawn: list[list[int]] | None = None,
) -> bool:
    """The world's verdict after the model's own greedy commands on one evaluation seed.

    With `followups`, every follow-up question must be answered rightly as well. `drawn` takes the token ids of each turn.
    """
    tokenizer, model = _load(str(model_dir), device, dtype)
    task = make_task(seed, family, max_bytes, dialect=dialect)
    with World(task, dialect) as world:
        talk = _Talk(tokenizer, model, world, [] if drawn is None else drawn)
        talk.user(world.prompt)
        for _ in range(max_turns):
            body = answer_of(talk.turn(), world)
            if body is None:
                break
            talk.result(body)
        good = world.verdict()
        for item in task.followups if followups else ():
            talk.user(item.question)
            good = good and world.check_followup(item.question, talk.turn())
        return good


def call_of(text: str) -> tuple[str, dict[str, str]] | None:
    """Tool and arguments of a turn's call; None when the turn has none that can be read."""
    found = _CALL.search(text)
    try:
        made = json.loads(found[1]) if found else {}
        name, arguments = made["name"], dict(made["arguments"])
    except (ValueError, KeyError, TypeError):
        return None
    return (name, arguments) if all(isinstance(value, str) for value in arguments.values()) else None


def answer_of(text: str, world: World) -> str | None:
    """What a turn's tool call gives in the world; None when there is no call that it can run."""
    made = call_of(text)
    tools = {tool.name: tool.function for tool in world.tools}
    run = tools.get(made[0]) if made else None
    try:
        return str(run(**made[1])) if run and made else None
    except TypeError:
        return None


class _Talk:
    """One conversation: template text in, greedy turns out, with transformers' own cache."""

    def __init__(self, tokenizer: Any, model: Any, world: World, drawn: list[list[int]]) -> None:
        from transformers import DynamicCache

        self.tokenizer, self.model, self.drawn = tokenizer, model, drawn
        self.tools = list(world.dialect.tools)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": world.dialect.system}]
        self.cache = DynamicCache(config=model.config)
        self.end = tokenizer.eos_token_id

    def user(self, text: str) -> None:
        """Add a user message."""
        self.messages.append({"role": "user", "content": text})

    def result(self, body: str) -> None:
        """Add a tool result."""
        self.messages.append({"role": "tool", "content": body})

    def turn(self) -> str:
        """Generate one assistant turn and add it to the conversation as it was generated."""
        prompt = self.tokenizer.apply_chat_template(self.messages, tools=self.tools, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(self.model.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the argument's name differs between releases
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                max_new_tokens=200,
                do_sample=False,
                pad_token_id=self.end,
            )
        made = out[0, ids.shape[1] :].tolist()
        self.drawn.append(made)
        text = str(self.tokenizer.decode([i for i in made if i != self.end]))
        self.messages.append({"role": "assistant", "content": text})
        return text
