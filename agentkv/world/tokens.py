"""The byte tokenizer of `micro`: one token a byte, then six named tokens.

Token ids 0 to 255 are the bytes themselves.  The named tokens stand for chat and tool
frames.  Text that comes from tools or users is always `plain`, so that a file which holds
the text of a named token can never forge a frame.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMED = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
IDS = {name: 256 + i for i, name in enumerate(NAMED)}
IM_START, IM_END, CALL, END_CALL, RESPONSE, END_RESPONSE = range(256, 262)
USED = 262
VOCAB = 272
CONTEXT = 65_536


def plain(text: str) -> list[int]:
    """Ids of `text` as bytes; the text of a named token stays text."""
    return list(text.encode("utf-8"))


def decode(ids: list[int]) -> str:
    """Text of `ids`; bytes that are not UTF-8 are replaced."""
    out = bytearray()
    for i in ids:
        if 0 <= i < 256:
            out.append(i)
        elif i < USED:
            out.extend(NAMED[i - 256].encode())
        else:
            raise ValueError(f"token id {i} is not used by this vocabulary")
    return out.decode("utf-8", errors="replace")


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    chars: list[str] = []
    moved = 0
    for byte in range(256):
        if byte in kept:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + moved))
            moved += 1
    return chars


def tokenizer_json() -> dict[str, Any]:
    """The same tokenizer in the format of the `tokenizers` library."""
    added = [
        {
            "id": IDS[name],
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            # Tool marks survive decoding without special tokens, so that parsers see them.
            "special": name.startswith("<|"),
        }
        for name in NAMED
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(_byte_chars())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """What `AutoTokenizer` needs beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    for name, body in (("tokenizer.json", tokenizer_json()), ("tokenizer_config.json", tokenizer_config())):
        text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
