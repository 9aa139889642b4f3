"""Model families by the architecture that config.json names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentkv.engine.layers import Decoder

ARCHITECTURES: dict[str, str] = {
    "Gemma3ForCausalLM": "agentkv.engine.models.gemma3:Gemma3",
    "LlamaForCausalLM": "agentkv.engine.models.llama:Llama",
    "Qwen2ForCausalLM": "agentkv.engine.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "agentkv.engine.models.qwen3:Qwen3",
}
"""Architecture -> "module:Class"."""


def resolve(architecture: str) -> type[Decoder]:
    """The class of an architecture; KeyError where it is not served."""
    module, _, attribute = ARCHITECTURES[architecture].partition(":")
    found: type[Decoder] = getattr(import_module(module), attribute)
    return found
