"""Which methods are to be checked: one by name, or all that a Python file defines."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from agentkv import methods
from agentkv.check.scene import LENGTH
from agentkv.engine.loader import LoadedModel
from agentkv.engine.preparation import Preparation
from agentkv.engine.sparse import SparseMethod
from agentkv.errors import BadRequest, UnknownOption


def subjects(target: str, options: Mapping[str, Any]) -> list[SparseMethod]:
    """The method of a name, or those of a file in their order, with `small` options where none are given.

    BadRequest: an unknown name or option, a value out of range, a file that defines no method or cannot be run.
    """
    if not target.endswith(".py"):
        return [configured(methods.resolve(target), target, options)]
    kinds = defined(run_file(Path(target)))
    if not kinds:
        raise BadRequest(f"{target} defines no subclass of SparseMethod", param="target")
    return [configured(kind, kind.__name__, options) for kind in kinds]


def configured(kind: type[SparseMethod], name: str, given: Mapping[str, Any]) -> SparseMethod:
    """A method at the size of the kit's prompts, but for what is given. BadRequest, UnknownOption: see `methods.configured`."""
    try:
        made = methods.configured(kind, name, **given)
    except UnknownOption:
        raise
    except BadRequest:  # what is given goes with other small options only, or not at all
        made = methods.configured(kind, name)
    return methods.configured(kind, name, **{**made.small(LENGTH), **given})


@contextmanager
def ready(method: SparseMethod, loaded: LoadedModel) -> Iterator[SparseMethod]:
    """The method; one that must be prepared for a model and has no file yet gets one, made by its module's `prepare` without
    options, which goes with the context. BadRequest where the preparation does not serve the model."""
    make = getattr(sys.modules[type(method).__module__], "prepare", None)
    if type(method).preparation is None or make is None or getattr(method, "prepared", None) != "":
        yield method
        return
    with TemporaryDirectory() as folder:
        try:
            make(Preparation(loaded), [], Path(folder) / "prepared")
        except ValueError as error:
            raise BadRequest(f"{type(method).__name__} cannot be prepared: {error}", param="target") from None
        yield replace(method, prepared=str(Path(folder) / "prepared"))  # type: ignore[call-arg]


def run_file(path: Path) -> ModuleType:
    """Import a Python file under a name of its own. BadRequest where it is not there or raises."""
    spec = spec_from_file_location(f"checked_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadRequest(f"{path}: no such Python file", param="target")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise BadRequest(f"{path} cannot be imported: {type(error).__name__}: {error}", param="target") from error
    return module


def defined(module: ModuleType) -> list[type[SparseMethod]]:
    """The methods that a module defines itself; names with an underscore in front are bases."""
    return [
        each
        for name, each in vars(module).items()
        if isinstance(each, type)
        and issubclass(each, SparseMethod)
        and each.__module__ == module.__name__
        and not name.startswith("_")
    ]


def parse_options(given: list[str]) -> dict[str, Any]:
    """'k=v' to a dict; values are Python literals, or else text. BadRequest without '='."""
    options: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise BadRequest(f"option {each!r}: like budget=64", param="option")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options
