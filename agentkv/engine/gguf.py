"""The only door to the gguf package: a GGUF file as a Hugging Face config and dequantised tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGUFValueType
from torch import Tensor

from agentkv.errors import BadModel

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` -> the architecture of the same decoder in a config.json."""

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FACTORS = "rope_freqs.weight"  # what the rotary frequencies are divided by: Llama 3's scaling, worked out
_DERIVED = ".attn_rot_embd.weight"  # old files' rotary frequencies, which follow from the metadata
_AGAIN = "Copy or download the file again"
_OTHER = f"Use a file of one of the architectures {', '.join(ARCHITECTURES)}, or the model's Hugging Face directory"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the files of an architecture differ from most. inner: names of the modules in a layer. slides: layers have a window,
    by a pattern. less_one: checkpoints hold a norm's weight less one, files hold what is multiplied with."""

    inner: Mapping[str, str]
    slides: bool = False
    less_one: bool = False


_PLAIN = _Kind(_INNER)
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KINDS = {"gemma3": _Kind(_INNER | _AROUND, slides=True, less_one=True)}


class _Reader(gguf.GGUFReader):
    """The package's reader, with bounds checked and arrays stepped over.

    As it comes it reads past the end as if nothing were there, and makes objects of each of a vocabulary's strings: seconds.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"{len(self.data):,} bytes, at least {end:,} expected")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = at = orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            at += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        elif kind == GGUFValueType.STRING:
            for _ in range(count):
                at += 8 + int.from_bytes(self.data[at : at + 8].tobytes(), "little")
                if at > len(self.data):
                    break
        else:
            raise ValueError(f"an array of {kind.name}")
        self._get(start, np.uint8, at - start)
        return at - orig_offs, [np.array([count])], [0], [GGUFValueType.ARRAY]


class GGUFFile:
    """An open GGUF file of a served architecture. BadModel where it is damaged or would be computed wrongly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        try:
            reader = _Reader(path)
        except Exception as error:  # noqa: BLE001 - damage shows as ValueError, KeyError, OverflowError, MemoryError and more
            raise BadModel(f"{path.name} is damaged or truncated, or no GGUF file: {error}", hint=_AGAIN) from None
        if reader.byte_order != "I":
            raise BadModel(f"{path.name} is in the other byte order", hint="Use the file made for this kind of machine")
        self._reader = reader
        self._read: set[str] = set()
        self._tensors = {each.name: each for each in reader.tensors}
        name = self.meta("general.architecture")
        if name not in ARCHITECTURES:
            raise BadModel(f"{path.name}: architecture {name!r} is not served", hint=_OTHER)
        self.architecture = str(name)
        self._kind = _KINDS.get(self.architecture, _PLAIN)
        self._refuse_unserved()

    def meta(self, key: str, default: Any = None) -> Any:
        """A scalar or string of the metadata; the default where there is none, or an array."""
        field = self._reader.get_field(key)
        if field is None or field.types[0] == GGUFValueType.ARRAY:
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise BadModel(f"{self.path.name}: {key} is not text: {error}", hint=_AGAIN) from None

    def count(self, key: str) -> int:
        """Entries of an array of the metadata, 0 where there is none."""
        field = self._reader.get_field(key)
        return 0 if field is None or field.types[0] != GGUFValueType.ARRAY else int(field.parts[-1][0])

    def config(self) -> dict[str, Any]:
        """The metadata in the spelling of a config.json. BadModel names the key that is missing."""
        heads = self._whole("attention.head_count")
        hidden = self._whole("embedding_length")
        layers = self._whole("block_count")
        head_dim = self._whole("attention.key_length", hidden // max(heads, 1))
        turned = self._whole("rope.dimension_count", head_dim)
        if turned != head_dim or self._whole("attention.value_length", head_dim) != head_dim:
            raise BadModel(f"{self.path.name}: heads of {head_dim}, of which {turned} are rotated, are not served", hint=_OTHER)
        vocab = self._sizes("token_embd.weight")[0]
        for name, sizes in (
            ("token_embd.weight", (vocab, hidden)),
            ("blk.0.attn_q.weight", (heads * head_dim, hidden)),
            (f"blk.{layers - 1}.attn_norm.weight", (hidden,)),
        ):  # before anything is built that large
            if self._sizes(name) != sizes:
                raise BadModel(f"{self.path.name}: {name!r} is {self._sizes(name)}, the metadata says {sizes}", hint=_AGAIN)
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._whole("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": self.architecture != "qwen2" and "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "rope_parameters": self._rope(),
            **(self._windows(layers, hidden // heads, head_dim) if self._kind.slides else {}),
        }

    def _windows(self, layers: int, share: int, head_dim: int) -> dict[str, Any]:
        """Which layers slide, with what angles, and the scale of scores, which files leave to their readers.

        share: hidden states over heads, by which the 27B model alone (62 layers) scales, though its heads are of another size.
        """
        near = {"rope_type": "default", "rope_theta": self._number("rope.freq_base_swa", 10000.0)}
        return {
            "sliding_window": self._whole("attention.sliding_window"),
            "sliding_window_pattern": self._whole("attention.sliding_window_pattern", 6),
            "rope_parameters": {"full_attention": self._rope(), "sliding_attention": near},
            "query_pre_attn_scalar": share if layers == 62 else head_dim,
            "final_logit_softcapping": self._number("final_logit_softcapping", 0.0),
            "attn_logit_softcapping": self._number("attn_logit_softcapping", 0.0),
        }

    def end_ids(self) -> list[int]:
        """Token ids that end a text or a turn."""
        found = [self.meta(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return [each for each in found if isinstance(each, int)]

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, dequantised, on the CPU in float32."""
        own = spelled(name, self._kind.inner)
        whole = self._values(own)
        if self._kind.less_one and own.endswith("norm.weight"):
            return whole - 1
        if self.architecture == "llama" and ".attn_q." in own:
            return self._halves(whole, self._whole("attention.head_count"))
        if self.architecture == "llama" and ".attn_k." in own:
            return self._halves(whole, self._whole("attention.head_count_kv", self._whole("attention.head_count")))
        return whole

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes, rows first, by its Hugging Face name. BadModel where it is missing."""
        own = spelled(name, self._kind.inner)
        self._read.add(own)
        return self._sizes(own)

    def finish(self) -> None:
        """Refuse the file where a tensor was never asked for: the decoder would compute something else than it."""
        left = sorted(name for name in self._tensors.keys() - self._read if not name.endswith(_DERIVED))
        if left:
            raise BadModel(
                f"{self.path.name} holds {left[0]!r}, which {ARCHITECTURES[self.architecture]} does not use", hint=_OTHER
            )

    def _values(self, name: str) -> Tensor:
        """A tensor by its name in the file, in float32, rows first."""
        found = self._find(name)
        self._read.add(name)
        kind = found.tensor_type
        try:
            values = gguf.quants.dequantize(found.data, kind)
        except NotImplementedError:
            raise BadModel(
                f"{self.path.name}: {name!r} is stored as {kind.name}, which the gguf package cannot dequantise",
                hint="Use another quantisation of the model, like Q8_0 or Q4_K_M",
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _halves(self, weight: Tensor, heads: int) -> Tensor:
        """Rows `[heads * head_dim, ...]` of a llama file, whose pairs (2i, 2i + 1) are rotated together, as (i, i + half)."""
        if heads < 1 or weight.shape[0] % (2 * heads):
            raise BadModel(f"{self.path.name}: {weight.shape[0]} rows do not divide over {heads} heads", hint=_AGAIN)
        pairs = weight.view(heads, -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    def _rope(self) -> dict[str, Any]:
        theta = self._number("rope.freq_base", 10000.0)
        scaling = str(self._own("rope.scaling.type", "none"))
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if _FACTORS in self._tensors:
            if scaling != "none":
                raise BadModel(f"{self.path.name}: rotary factors and scaling {scaling!r} at once", hint=_OTHER)
            return {"rope_type": "factors", "rope_theta": theta, "factors": self._values(_FACTORS).flatten().tolist()}
        if factor == 1.0 and scaling in ("none", "linear"):
            return {"rope_type": "default", "rope_theta": theta}
        kind = "linear" if scaling == "none" else scaling
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}

    def _own(self, key: str, default: Any = None) -> Any:
        return self.meta(f"{self.architecture}.{key}", default)

    def _number(self, key: str, default: float | None = None) -> float:
        """A number under the architecture's prefix."""
        value = self._own(key, default)
        if isinstance(value, (int, float)):
            return float(value)
        said = "lacks" if value is None else "has no number in"
        raise BadModel(f"{self.path.name} {said} {self.architecture}.{key}", hint="Convert or download the model again")

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not value.is_integer():
            raise BadModel(f"{self.path.name}: {self.architecture}.{key} is {value}", hint=_AGAIN)
        return int(value)

    def _find(self, name: str) -> gguf.ReaderTensor:
        if name not in self._tensors:
            raise BadModel(f"{self.path.name} lacks {name!r}", hint="The file does not match its metadata: use a whole file")
        return self._tensors[name]

    def _sizes(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor, rows first."""
        return tuple(int(size) for size in reversed(self._find(name).shape)) or (0,)

    def _refuse_unserved(self) -> None:
        """Refuse what would be computed wrongly rather than served wrongly; `finish` does the rest."""
        name = self.path.name
        if self.meta("split.count", 1) not in (0, 1):
            raise BadModel(f"{name} is one part of a split file", hint="Join the parts: llama-gguf-split --merge")
        if self._whole("expert_count", 0):
            raise BadModel(f"{name}: experts are not served", hint=_OTHER)
        window = 0 if self._kind.slides else self._whole("attention.sliding_window", 0)
        if 0 < window < self._whole("context_length"):
            raise BadModel(
                f"{name}: sliding window layers are not served for {self.architecture}", hint="Use its Hugging Face directory"
            )


def spelled(name: str, known: Mapping[str, str]) -> str:
    """GGUF's name of a tensor that is named in the Hugging Face way; an unknown one stays. known: modules in layers."""
    module, _, leaf = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{leaf}"
    layers, _, rest = module.partition("layers.")
    block, _, inner = rest.partition(".")
    return f"blk.{block}.{known[inner]}.{leaf}" if layers == "model." and inner in known else name
