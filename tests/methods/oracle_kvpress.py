"""What kvpress keeps of a prompt, and by which scores. It is run by the environment that `make oracles` makes, never imported:

    .oracles/kvpress/bin/python tests/methods/oracle_kvpress.py MODEL REQUEST.json OUT

MODEL is a folder that transformers reads. The request is {"dtype": "float32", "runs": [...]}; a run has `press`, `tokens`
(ids), `capacity` (tokens kept per KV head; for kvzip and adakv the mean over heads) and `options` (by the press's names).
OUT receives `arrays.npz`, per run `kept_I` (bool) and `scores_I` (float32; NaN where the press asked for none), both
[num_layers, num_kv_heads, num_tokens], and `facts.json`: the versions, and per run what else the press was given or made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import AdaKVPress, KVzipPress, SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

Arrays = tuple[torch.Tensor, torch.Tensor]  # kept, scores


def removed_ratio(total: int, kept: int) -> float:
    """The share to remove for presses that round the removed count down: the middle of those that leave `kept` of `total`."""
    return 0.0 if kept == total else (total - kept + 0.5) / total


def scorer_ratio(total: int, kept: int) -> float:
    """The same for presses that round the kept count down."""
    return 0.0 if kept == total else 1 - (kept + 0.5) / total


def note_scores(press: Any, scores: torch.Tensor) -> None:
    """Copy what `press.score` returns into scores[layer]; the press may write into its own tensor afterwards."""
    score: Callable[..., torch.Tensor] = press.score

    def noted(module: Any, *rest: Any) -> torch.Tensor:
        result = score(module, *rest)
        scores[module.layer_idx] = result[0].float()
        return result

    press.score = noted


def note_pruned(press: Any, kept: torch.Tensor) -> None:
    """Let positions go through `press.compress` in the place of the values, which these presses move and do not read."""
    compress = press.compress

    def noted(module: Any, hidden: Any, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> Arrays:
        places = torch.arange(keys.shape[2]).view(1, 1, -1, 1).expand_as(values)
        keys, places = compress(module, hidden, keys, places, *rest)
        kept[module.layer_idx] = False
        kept[module.layer_idx].scatter_(1, places[0, :, :, 0], True)
        return keys, values.gather(2, places)

    press.compress = noted


def read_masked(model: Any, kept: torch.Tensor) -> None:
    """For presses that only mask: what they will hide from decoding is what they dropped."""
    for layer, block in enumerate(model.model.layers):
        masked = getattr(block.self_attn, "masked_key_indices", None)
        if masked is not None:
            kept[layer, masked[1], masked[2]] = False


def play(model: Any, run: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Prefill one prompt under its press; the facts beside the arrays are kvzip's prefix length and replayed ids."""
    config, tokens, options = model.config, run["tokens"], dict(run["options"])
    shape = (config.num_hidden_layers, config.num_key_value_heads, len(tokens))
    kept, scores = torch.ones(shape, dtype=torch.bool), torch.full(shape, torch.nan)
    facts: dict[str, Any] = {}
    name, ratio = run["press"], scorer_ratio(len(tokens), run["capacity"])
    press: Any
    if name == "kvzip":
        pairs = shape[0] * shape[1]
        press = KVzipPress(removed_ratio(pairs * len(tokens), pairs * run["capacity"]), **options)
        note_replay(press, scores, facts)
    elif name == "adakv":
        alpha = options.pop("alpha_safeguard")
        press = AdaKVPress(SnapKVPress(ratio, **options), alpha_safeguard=alpha)
        note_scores(press.press, scores)
    else:
        press = {"snapkv": SnapKVPress, "streamingllm": StreamingLLMPress}[name](ratio, **options)
        note_scores(press, scores)
        note_pruned(press, kept)
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([tokens]), past_key_values=DynamicCache())
    if name in ("kvzip", "adakv"):
        read_masked(model, kept)
    return (kept, scores), facts


def note_replay(press: Any, scores: torch.Tensor, facts: dict[str, Any]) -> None:
    """Note kvzip's prompts, and its scores before the sinks are set above them all."""
    prepare, compress = press.prepare, press.compress_post

    def prepared(*rest: Any) -> Any:
        pairs = prepare(*rest)
        facts["prefix"] = press.prefix_length
        facts["chunks"] = [chunk.shape[1] for chunk, _ in pairs]
        facts["replays"] = [replay[0].tolist() for _, replay in pairs]
        return pairs

    def compressed(model: Any) -> None:
        scores.copy_(press.score_val[:, 0])
        compress(model)

    press.prepare, press.compress_post = prepared, compressed


def main(folder: Path, request: Path, out: Path) -> None:
    """Play every run of the request with one loading of the model."""
    asked = json.loads(request.read_text())
    dtype = getattr(torch, asked["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    arrays: dict[str, np.ndarray] = {}
    facts: list[dict[str, Any]] = []
    for index, run in enumerate(asked["runs"]):
        (kept, scores), more = play(model, run)
        arrays |= {f"kept_{index}": kept.numpy(), f"scores_{index}": scores.numpy()}
        facts.append(more)
    np.savez(out / "arrays.npz", **arrays)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    (out / "facts.json").write_text(json.dumps({"versions": versions, "runs": facts}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
