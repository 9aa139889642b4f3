"""A GGUF file is the directory of its dequantised weights; damaged and unserved files fail at load with what to do."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import read_by_transformers, tiny, write_gguf

from agentkv.engine.loader import load_model
from agentkv.errors import BadModel, UnknownModel

FAMILIES = ["llama", "llama-tied", "llama-linear", "qwen2", "qwen2-tied", "qwen3", "gemma3"]
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


def words_of_a_vocabulary(writer: Any) -> None:
    writer.add_array("tokenizer.ggml.tokens", [f"word{index}" for index in range(96)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 96)


def refused(path: Path, *words: str) -> BadModel:
    with pytest.raises(BadModel) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return tiny("qwen3")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_equals_its_dequantised_directory(family: str, kind: Kind, host: Any, tmp_path: Path) -> None:
    twin = tiny(family)
    state = write_gguf(tmp_path / "model.gguf", twin, kind)
    twin.load_state_dict(state, strict=not twin.config.tie_word_embeddings)
    twin.save_pretrained(tmp_path / "folder")

    ours, theirs = load_model(tmp_path / "model.gguf"), load_model(tmp_path / "folder")
    assert ours.config.window == theirs.config.window == 512
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.allclose(ours.model.rotary.frequency, theirs.model.rotary.frequency, rtol=1e-6)

    tokens = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in TOLERANCE.items():
        if family == "llama" and dtype == "float64":
            continue  # the file has its rotary factors in float32
        with torch.inference_mode():
            want = twin.to(getattr(torch, dtype))(tokens[None]).logits[0]
        assert want.std() > 0.2
        mine = host(load_model(tmp_path / "model.gguf", dtype=dtype), 16)
        assert (mine.chunked(0, tokens.tolist(), [31, 1, 80]) - want).abs().max() <= tolerance


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "gemma3"])
def test_a_file_equals_transformers_reading_of_it(family: str, host: Any, tmp_path: Path) -> None:
    written = tiny(family)
    write_gguf(tmp_path / "model.gguf", written, Kind.Q8_0, tokenizer=words_of_a_vocabulary)
    twin = read_by_transformers(tmp_path / "model.gguf", written.config)
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = twin(tokens[None]).logits[0]
    got = host(load_model(tmp_path), 16).logits(0, tokens.tolist())
    assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_kinds_that_the_package_knows(kind: Kind, qwen3: Any, tmp_path: Path) -> None:
    state = write_gguf(tmp_path / "model.gguf", qwen3, kind)
    ours = load_model(tmp_path / "model.gguf").model
    assert torch.equal(ours.embed_tokens.weight, state["model.embed_tokens.weight"])
    assert torch.equal(ours.layers[1].mlp.down_proj.weight, state["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(ours.layers[1].self_attn.qkv_proj.weight[:128], state["model.layers.1.self_attn.q_proj.weight"])


def test_a_kind_that_the_package_does_not_know(qwen3: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", qwen3, tensors={"output_norm.weight": np.ones(64)})
    refused(tmp_path / "model.gguf", "F64", "output_norm.weight")


def test_where_a_file_may_lie(qwen3: Any, checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        load_model(tmp_path / "model.gguf")
    write_gguf(tmp_path / "model.gguf", qwen3)
    loaded = load_model(tmp_path)
    assert loaded.path == tmp_path / "model.gguf"
    assert loaded.fingerprint == load_model(tmp_path / "model.gguf").fingerprint
    write_gguf(tmp_path / "other.gguf", qwen3, Kind.Q8_0)
    assert "other.gguf" in refused(tmp_path, "2 .gguf files").hint
    assert loaded.fingerprint != load_model(tmp_path / "other.gguf").fingerprint
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "config.json")  # then it is a Hugging Face directory


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_count": 8}, ["experts"]),
        ({"attention.sliding_window": 128}, ["sliding"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, ["yarn"]),
        ({"rope.dimension_count": 16}, ["rotated"]),
        ({"attention.head_count": 3}, ["attn_q"]),
        ({"attention.head_count_kv": 4}, ["k_proj"]),
        ({"embedding_length": 1 << 31}, ["token_embd"]),
        ({"feed_forward_length": 1 << 31}, ["gate_proj"]),
        ({"block_count": 3}, ["blk.2.attn_norm.weight"]),
        ({"block_count": 1 << 30}, ["attn_norm"]),
        ({"block_count": 1}, ["blk.1", "does not use"]),
        ({"block_count": 0}, ["blk.-1"]),
        ({"context_length": None}, ["qwen3.context_length"]),
        ({"attention.layer_norm_rms_epsilon": None}, ["layer_norm_rms_epsilon"]),
        ({"attention.head_count": "many"}, ["head_count"]),
        ({"attention.head_count": 2.5}, ["head_count"]),
    ],
)
def test_metadata_that_is_not_served(change: dict[str, Any], words: list[str], qwen3: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", qwen3, change=change)
    refused(tmp_path / "model.gguf", *words)


def test_what_a_gemma_file_says_of_its_layers(tmp_path: Path) -> None:
    """Read from the file where it says so, else what the format has for all of the architecture."""
    twin, path = tiny("gemma3"), tmp_path / "model.gguf"
    write_gguf(path, twin)
    plain = load_model(path).config
    twin.save_pretrained(tmp_path / "folder")
    assert replace(plain, norm_eps=1e-5) == load_model(tmp_path / "folder").config
    write_gguf(path, twin, change={"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 77.0})
    config = load_model(path).config
    assert config.sliding == (24, None, 24, None, 24, None, 24)
    assert config.local_rope.theta == 77.0
    write_gguf(path, twin, change={"attention.sliding_window": None})
    refused(path, "lacks gemma3.attention.sliding_window")
    write_gguf(path, twin, change={"final_logit_softcapping": 30.0})
    refused(path, "final_logit_softcapping")


def test_a_window_past_the_context_is_none(qwen3: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", qwen3, change={"attention.sliding_window": 512})
    assert load_model(tmp_path / "model.gguf").window == 512


def test_defaults_of_what_a_file_may_leave_out(tmp_path: Path) -> None:
    twin = tiny("qwen2")
    gone = ["attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"]
    write_gguf(tmp_path / "model.gguf", twin, change=dict.fromkeys(gone))
    config = load_model(tmp_path / "model.gguf").config
    assert (config.head_dim, config.rope.theta, config.tied, config.norm_eps) == (16, 10000.0, False, pytest.approx(1e-5))


def test_tensors_that_are_missing_or_too_many(qwen3: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen3, tensors={"blk.1.ffn_up.weight": None})
    refused(path, "lacks 'blk.1.ffn_up.weight'")
    write_gguf(path, qwen3, tensors={"blk.1.attn_q.bias": np.ones(128, dtype=np.float32)})
    refused(path, "blk.1.attn_q.bias", "does not use")
    write_gguf(path, qwen3, tensors={"blk.1.ffn_up.weight": np.ones((96, 32), dtype=np.float32)})
    refused(path, "up_proj", "shape")


def test_an_unknown_architecture_names_the_served_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "qwen3" in refused(tmp_path / "model.gguf", "mamba").hint


def test_truncated_files(qwen3: Any, tmp_path: Path) -> None:
    """Wherever it is cut: in the counts, a key, a string array, the table of tensors, the last tensor."""
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen3, tokenizer=words_of_a_vocabulary)
    load_model(path)
    whole = path.read_bytes()
    table = whole.index(b"blk.0")
    random.seed(5)
    for size in [0, 3, 10, 25, table - 2, table + 10, len(whole) - 40, *random.sample(range(len(whole)), 40)]:
        path.write_bytes(whole[:size])
        refused(path, "model.gguf", "truncated")
    path.write_bytes(b"no GGUF at all" * 9)
    assert "again" in refused(path, "no GGUF file").hint


def test_damaged_headers_are_refused_in_no_time(qwen3: Any, tmp_path: Path) -> None:
    """One to four random bytes of the header: the file loads, or is a BadModel; nothing hangs or takes the memory."""
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen3, tokenizer=words_of_a_vocabulary)
    whole = path.read_bytes()
    header = whole.rindex(b"output_norm") + 60
    generator = random.Random(7)
    start = time.perf_counter()
    hints: list[str] = []
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            raw[generator.randrange(header)] = generator.choice([0, 1, 127, 255, generator.randrange(256)])
        path.write_bytes(raw)
        try:
            load_model(path)
        except BadModel as error:
            hints.append(error.hint)
    assert len(hints) > 30
    assert all(hints)
    assert time.perf_counter() - start < 60
