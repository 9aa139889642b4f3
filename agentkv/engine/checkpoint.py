"""What lies at a model path: a Hugging Face directory, or one GGUF file."""

from __future__ import annotations

from pathlib import Path

from agentkv.errors import BadModel, UnknownModel


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that a path names, or that is alone in the directory it names; None for a Hugging Face directory.

    A directory with a config.json is a Hugging Face directory, whatever lies beside. UnknownModel where the path is neither a
    directory nor a .gguf file, BadModel where a directory holds several.
    """
    place = Path(path)
    if place.suffix.lower() == ".gguf" and place.is_file():
        return place
    if not place.is_dir():
        raise UnknownModel(f"no model directory or .gguf file at {str(path)!r}")
    if (place / "config.json").exists():
        return None
    found = sorted(each for each in place.iterdir() if each.suffix.lower() == ".gguf")
    if len(found) > 1:
        raise BadModel(
            f"{place} holds {len(found)} .gguf files", hint=f"Name one of them: {', '.join(each.name for each in found[:5])}"
        )
    return found[0] if found else None
