"""Files of a preparation: whole and of this model, or refused before a step; and the command that makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentkv import methods
from agentkv.check.models import TINY, tiny
from agentkv.check.scene import Scene
from agentkv.engine.forms import model_shape
from agentkv.engine.loader import LoadedModel
from agentkv.engine.preparation import Preparation
from agentkv.errors import AgentkvError, BadRequest, UnknownOption
from agentkv.kernels.low_rank_factors import write_prepared
from agentkv.methods.palu import prepare
from agentkv.runtime_prepare import prepare as made

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def qwen3() -> LoadedModel:
    return tiny(TINY[0])


@pytest.fixture
def file(qwen3: LoadedModel, tmp_path: Path) -> Path:
    assert prepare(Preparation(qwen3), [], tmp_path / "whole")["groups"] == 1  # both heads: 4 do not divide them
    return tmp_path / "whole"


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, "pt") as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}, opened.metadata()  # noqa: SIM118


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "half the layers": lambda all_: {n: t[:1] if t.dim() > 1 else t for n, t in all_.items()},
    "half the rank": lambda all_: {n: t[:, :, : t.shape[2] // 2] if n.endswith("up") else t for n, t in all_.items()},
    "a short frequency": lambda all_: {**all_, "frequency": all_["frequency"][:3]},
    "a narrow model": lambda all_: {**all_, "k.down": all_["k.down"][..., :8]},
    "too many heads": lambda all_: {**all_, "v.up": all_["v.up"].repeat(1, 2, 1, 1)},
    "something else": lambda all_: {**all_, "q.down": all_["k.down"].clone()},
    **{f"no {name}": lambda all_, name=name: {n: t for n, t in all_.items() if n != name} for name in (  # type: ignore[misc]
        "k.norm", "v.up", "v.down", "frequency")},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_were_changed_are_refused_when_the_method_is_made(change: str, file: Path, tmp_path: Path) -> None:
    tensors, said = read(file)
    save_file({name: each.contiguous() for name, each in CHANGES[change](tensors).items()}, tmp_path / "changed", metadata=said)
    with pytest.raises(BadRequest, match="was changed or cut since it was written"):
        methods.get("palu", prepared=str(tmp_path / "changed"))


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_of_another_model_are_refused_when_the_engine_opens(
    change: str, qwen3: LoadedModel, file: Path, tmp_path: Path
) -> None:
    """Written whole, with this model's fingerprint: only their shapes are wrong."""
    tensors, _ = read(file)
    write_prepared(tmp_path / "other", CHANGES[change](tensors), qwen3.fingerprint, 64, 1e-6)
    method = methods.get("palu", prepared=str(tmp_path / "other"))
    with pytest.raises(BadRequest, match="does not fit it"):
        Scene(qwen3, [method])


def test_what_is_said_of_the_tensors_and_their_values_are_in_the_digest(file: Path, tmp_path: Path) -> None:
    tensors, said = read(file)
    inside = json.loads(said["low_rank"])
    for key, other in (("eps", 0.5), ("num_groups", 2), ("rank", 10**6), ("model", "x"), ("digest", "0")):
        save_file(tensors, tmp_path / "changed", metadata={"low_rank": json.dumps(inside | {key: other})})
        with pytest.raises(BadRequest, match="was changed or cut"):
            methods.get("palu", prepared=str(tmp_path / "changed"))
    save_file({**tensors, "v.up": tensors["v.up"] * 0}, tmp_path / "changed", metadata=said)
    with pytest.raises(BadRequest, match="was changed or cut"):
        methods.get("palu", prepared=str(tmp_path / "changed"))
    (tmp_path / "changed").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadRequest, match="no file of factors"):
        methods.get("palu", prepared=str(tmp_path / "changed"))


def test_a_file_that_changes_later_changes_nothing(qwen3: LoadedModel, file: Path) -> None:
    first, second = (methods.get("palu", prepared=str(file)) for _ in range(2))
    wanted = Scene(qwen3, [first]).turn(list(range(40)))
    tensors, said = read(file)
    file.write_bytes(b"")
    assert Scene(qwen3, [second]).turn(list(range(40))) == wanted
    other = {name: each * 1.5 if name == "v.up" else each for name, each in tensors.items()}
    write_prepared(file, other, qwen3.fingerprint, 64, 1e-6)
    third = methods.get("palu", prepared=str(file))
    assert third.fingerprint != first.fingerprint
    assert Scene(qwen3, [third]).turn(list(range(40))).logprobs != wanted.logprobs
    assert said["low_rank"]


def test_keys_of_a_model_without_a_norm_have_none(file: Path, tmp_path: Path) -> None:
    llama = tiny(TINY[1])
    assert not model_shape(llama, 16).key_norm
    tensors, _ = read(file)
    write_prepared(tmp_path / "other", tensors, llama.fingerprint, 64, 1e-6)
    assert "does not fit it" in str(methods.get("palu", prepared=str(tmp_path / "other")).unserved(model_shape(llama, 16)))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("palu", {"group_size": 2.0}, "group_size=2.0: Expected `int"),
        ("palu", {"groups": 2}, "the preparation of 'palu' has no option 'groups'"),
        ("palu", {"group_size": 10**30}, "whole numbers are at most"),
        ("omnikv", {"tokens": 10_000_000}, "tokens=10000000: 32 or more"),
        ("omnikv", {"share": "much"}, "share='much': Expected"),
        ("omnikv", {"share": 1}, "between 0.0 and 1.0"),
        ("omnikv", {"full": 10_000}, "full=10000: 1 to"),
        ("omnikv", {"texts": []}, "no option 'texts'"),
    ],
)
def test_options_of_a_preparation_are_checked(name: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        made(name, "micro", tmp_path / "out", None, **options)
    assert isinstance(refused.value, UnknownOption) is ("no option" in why)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["palu", "omnikv"])
def test_what_cannot_be_written_or_read_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("agentkv.runtime_prepare.load_model", never)
    (tmp_path / "text").write_text(" \n")
    for out, text in ((tmp_path / "no" / "o", None), (tmp_path, None), (tmp_path / "o", tmp_path / "text")):
        with pytest.raises(BadRequest, match=r"cannot be written|is empty"):
            made(name, "micro", out, text)


def test_the_defaults_of_a_preparation_serve_micro(tmp_path: Path) -> None:
    assert made("palu", "micro", tmp_path / "out", None) == {
        "out": str(tmp_path / "out"), "groups": 1, "rank": 128, "calibrated": False
    }  # fmt: skip
    assert issubclass(BadRequest, AgentkvError)
    assert torch.isfinite(read(tmp_path / "out")[0]["k.up"]).all()
