"""A tokenizer and chat template out of a GGUF file are those of the directory that it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_files import tiny, write_gguf

from agentkv.engine.tokenizer import Tokenizer
from agentkv.errors import BadModel

MARKERS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "def f(x):\n    5 + x  # 1234",
    "der Bär isst  süße\tÄpfel\r\n\n",
    "日本語 🙂",
    "I'm 12345.67, you'll see",
    "   42\n 7",
]
# What publishers put into tokenizer.json, written out by hand: the oracle for the name of a split in a file.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def publisher(split: str) -> Any:
    """A byte-level BPE trained with a split, as a `tokenizers` object."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != "qwen2")
    first = {
        "qwen2": [pre_tokenizers.Split(Regex(QWEN), behavior="isolated")],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
    }[split]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKERS, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS, "     \n    2 x", "<tool_call>"] * 20, trainer)
    return backend


def written(folder: Path, split: str, **change: Any) -> tuple[Path, Any]:
    """A GGUF file with a publisher's vocabulary, and the publisher's tokenizer. change: keys of tokenizer.* to replace."""
    backend = publisher(split)
    spec = json.loads(backend.to_str())["model"]
    names = sorted(spec["vocab"], key=spec["vocab"].get)

    def add(writer: Any) -> None:
        said = {"ggml.model": "gpt2", "ggml.pre": split, "chat_template": TEMPLATE} | change
        for key, value in said.items():
            if value is not None:
                writer.add_string(f"tokenizer.{key}", value)
        writer.add_array("tokenizer.ggml.tokens", [*names, "<tool_call>"])
        writer.add_array("tokenizer.ggml.token_type", [3 if name in MARKERS else 1 for name in names] + [4])
        writer.add_array("tokenizer.ggml.merges", [" ".join(pair) for pair in spec["merges"]])
        writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 0)

    write_gguf(folder / "model.gguf", tiny("qwen2"), tokenizer=add)
    backend.add_tokens(["<tool_call>"])
    return folder / "model.gguf", backend


@pytest.mark.parametrize("split", ["qwen2", "smollm", "gpt-2"])
def test_ids_equal_the_publishers(split: str, tmp_path: Path) -> None:
    path, backend = written(tmp_path, split)
    tokenizer = Tokenizer.load(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {0, 1}
    assert tokenizer.vocab_size == backend.get_vocab_size(with_added_tokens=True)
    marked = "<|im_start|>x<tool_call><|im_end|>"
    assert tokenizer.encode(marked, special=True) == backend.encode(marked).ids
    assert {0, 1, tokenizer.vocab_size - 1}.isdisjoint(tokenizer.encode(marked))


def test_the_chat_template_of_a_file(tmp_path: Path) -> None:
    written(tmp_path, "qwen2")
    tokenizer = Tokenizer.load(tmp_path)  # the directory that holds it
    rendered = tokenizer.apply_template([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.end_of_turn_id == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ggml.pre": "unheard-of"}, "unheard-of"),
        ({"ggml.pre": None}, "splits text"),
        ({"ggml.model": "plamo2"}, "plamo2"),
        ({"ggml.model": None}, "cannot be read"),
        ({"chat_template": None}, "no chat template"),
        ({"chat_template": "{% for %}"}, "does not parse"),
    ],
)
def test_a_vocabulary_that_would_be_read_wrongly(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path, "qwen2", **change)
    with pytest.raises(BadModel, match=word) as caught:
        Tokenizer.load(path)
    assert caught.value.hint


def test_a_tokenizer_json_beside_the_file_wins(tmp_path: Path, micro_path: Path) -> None:
    path, _ = written(tmp_path, "qwen2", **{"ggml.pre": "unheard-of", "chat_template": None})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(micro_path / name, tmp_path / name)
    theirs, ours = Tokenizer.load(micro_path), Tokenizer.load(path)
    assert ours.encode("hé") == theirs.encode("hé")
    assert ours.template == theirs.template
    assert ours.eos_ids == {0, 1} | ({theirs._inner.eos_token_id} - {None})


def test_a_truncated_file(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "qwen2")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BadModel, match=r"model\.gguf") as caught:
        Tokenizer.load(path)
    assert caught.value.hint
