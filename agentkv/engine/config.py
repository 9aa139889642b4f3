"""A Hugging Face config, in any of its spellings, as ours. BadModel says what is missing, contradictory or not served."""

from __future__ import annotations

from typing import Any

from agentkv.engine import models
from agentkv.engine.block_fp8 import read_blocks
from agentkv.engine.layers import ACTIVATIONS, Decoder, ExpertConfig, ModelConfig, RopeConfig
from agentkv.errors import BadModel

_RESTORE = "Restore config.json from the model's publisher"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LOCAL = "rope_local_base_freq"
"""Where a family has this key, layers that slide have rotary settings of their own."""


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """A Hugging Face config as ours; BadModel names what is missing or not served."""
    architecture = _architecture(raw)
    family = models.resolve(architecture)
    raw = {**family.defaults, **raw}
    _refuse_unserved(raw, architecture)
    try:
        heads = int(raw["num_attention_heads"])
        config = ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            inner_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw, _FULL, "rope_theta"),
            window=int(raw["max_position_embeddings"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            activation=_activation(raw),
            attention_scale=_attention_scale(raw),
            sliding=_read_sliding(raw, family),
            local_rope=_read_rope(raw, _SLIDING, _LOCAL) if _LOCAL in raw else None,
            experts=_read_experts(raw) if "num_experts" in family.defaults else None,
            blocks=read_blocks(raw),
        )
    except KeyError as error:
        raise BadModel(f"config.json lacks {error.args[0]!r}", hint=_RESTORE) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise BadModel(f"config.json has a value of the wrong kind: {error}") from None
    _check_shape(config)
    return config


def _check_shape(config: ModelConfig) -> None:
    sizes = (config.vocab_size, config.hidden_size, config.inner_size, config.num_layers, config.num_heads)
    if min(*sizes, config.num_kv_heads, config.head_dim, config.window) < 1:
        raise BadModel("config.json has a size below 1")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise BadModel(
            f"config.json: {config.num_heads} attention heads over {config.num_kv_heads} KV heads of {config.head_dim}",
            hint="Heads must divide evenly, and head_dim must be even",
        )
    if config.activation not in ACTIVATIONS:
        served = ", ".join(ACTIVATIONS)
        raise BadModel(f"activation {config.activation!r} is not served for {config.architecture}", hint=f"Served: {served}")
    if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
        raise BadModel(f"{len(config.rope.factors)} rotary factors for heads of {config.head_dim}")


def _architecture(raw: dict[str, Any]) -> str:
    known = ", ".join(models.ARCHITECTURES)
    named = raw.get("architectures") or []
    for name in named:
        if name in models.ARCHITECTURES:
            return str(name)
    what = f"architecture {named[0]!r} is not served" if named else "config.json names no architecture"
    raise BadModel(what, hint=f"Served: {known}")


def _refuse_unserved(raw: dict[str, Any], architecture: str) -> None:
    """Refuse what would be computed wrongly rather than served wrongly."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise BadModel(f"{name} is not served for {architecture}", hint="Use a causal checkpoint without soft caps")


def _activation(raw: dict[str, Any]) -> str:
    return str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")


def _attention_scale(raw: dict[str, Any]) -> float | None:
    """None where head_dim says it."""
    scalar = raw.get("query_pre_attn_scalar")
    if scalar is None:
        return None
    if not float(scalar) > 0:
        raise BadModel(f"config.json: query_pre_attn_scalar is {scalar}", hint=_RESTORE)
    return float(float(scalar) ** -0.5)


def _read_sliding(raw: dict[str, Any], family: type[Decoder]) -> tuple[int | None, ...]:
    """By layer, the tokens that a query sees, None for all of them; () where no layer slides."""
    if int(raw["num_hidden_layers"]) < 1:
        return ()
    kinds = _layer_kinds(raw)
    if len(kinds) != int(raw["num_hidden_layers"]) or not set(kinds) <= {_FULL, _SLIDING}:
        raise BadModel(
            f"config.json: layer_types names {len(kinds)} layers of the kinds {', '.join(sorted(set(map(str, kinds))))}, "
            f"num_hidden_layers is {raw['num_hidden_layers']}",
            hint=f"One of {_FULL}, {_SLIDING} for each layer",
        )
    if _SLIDING not in kinds:
        return ()
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if not family.slides:
        raise BadModel(f"sliding window layers are not served for {raw['architectures'][0]}", hint="Use full_attention")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise BadModel(
            f"config.json has sliding_attention layers, and sliding_window is {window!r}",
            hint="It must be the number of tokens that such a layer sees, and use_sliding_window, where there is one, true",
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _read_experts(raw: dict[str, Any]) -> ExpertConfig | None:
    """Experts and the layers that have them, None where no layer does. Configs name their number in two ways."""
    every, plain = int(raw["decoder_sparse_step"]), set(raw["mlp_only_layers"] or ())
    if every < 1:
        raise BadModel(f"config.json: decoder_sparse_step is {every}", hint="Every n-th layer has experts: n is at least 1")
    experts = ExpertConfig(
        count=int(raw.get("num_local_experts", raw["num_experts"])),
        active=int(raw["num_experts_per_tok"]),
        inner_size=int(raw["moe_intermediate_size"]),
        normed=bool(raw["norm_topk_prob"]),
        layers=tuple(each for each in range(int(raw["num_hidden_layers"])) if each not in plain and (each + 1) % every == 0),
    )
    if experts.count < 1 or not experts.layers:
        return None
    if experts.inner_size < 1 or not 1 <= experts.active <= experts.count:
        raise BadModel(
            f"config.json: {experts.active} active of {experts.count} experts with {experts.inner_size} inner units",
            hint=_RESTORE,
        )
    return experts


def _layer_kinds(raw: dict[str, Any]) -> list[str]:
    """layer_types, or what older configs say in its place: every n-th layer is full, or layers slide from one on.

    Qwen's configs also name a window that is off, or that begins past the last layer.
    """
    count = int(raw["num_hidden_layers"])
    if raw.get("layer_types"):
        return list(raw["layer_types"])
    if "sliding_window_pattern" in raw:
        every = int(raw["sliding_window_pattern"])
        if every < 1:
            raise BadModel(f"config.json: sliding_window_pattern is {every}", hint="Every n-th layer is full: n is at least 1")
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(count)]
    slides = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
    first = int(raw.get("max_window_layers", 0)) if slides else count
    return [_SLIDING if layer >= first else _FULL for layer in range(count)]


def _read_rope(raw: dict[str, Any], layers: str, base: str) -> RopeConfig:
    """Rotary settings of the layers of a kind, in either spelling: `rope_parameters`, of all layers or by their kind, or
    the key `base` for theta, beside `rope_scaling` for the layers that see everything."""
    parameters = raw.get("rope_parameters") or {}
    by_kind = parameters.keys() & {_FULL, _SLIDING}
    if parameters and bool(by_kind) != (_LOCAL in raw):
        said = "are by layer type" if by_kind else "are not by layer type"
        raise BadModel(f"config.json: rope_parameters {said}, unlike those of {raw['architectures'][0]}", hint=_RESTORE)
    given = {"rope_theta": raw.get(base, 10000.0)}
    given |= (raw.get("rope_scaling") or {}) if layers == _FULL else {}
    given |= (parameters.get(layers) or {}) if by_kind else parameters
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ("default", "linear", "llama3", "factors"):
        raise BadModel(f"rope scaling {kind!r} is not served", hint="Served: default, linear, llama3")
    if float(given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadModel("a partial rotary embedding is not served")
    theta = float(given["rope_theta"])
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(given["factor"]))
    if kind == "factors":
        return RopeConfig(theta, kind, factors=tuple(float(each) for each in given["factors"]))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_window=int(given.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )
