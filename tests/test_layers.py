"""The import DAG of docs/design.md section 2, read from the syntax trees: left may import right, nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package -> the agentkv packages it may import, itself included. `types` stands for types, errors, dialogue and constraint.
ALLOWED = {
    "__init__": {"types", "runtime", "client"},
    "__main__": {"cli"},
    "types": {"types"},
    "errors": {"types"},
    "dialogue": {"types"},
    "constraint": {"types"},
    "aio": {"types"},
    "kernels": {"kernels"},
    "tools": {"types"},
    "check": {"engine", "methods", "kernels", "types"},
    "memory": {"types"},
    "engine": {"kernels", "types"},
    "methods": {"engine", "kernels", "types"},
    "runtime": {"engine", "methods", "memory", "tools", "types", "aio"},
    "client": {"types", "tools", "aio"},
    "server": {"runtime", "tools", "types"},
    "world": {"runtime", "client", "tools", "types"},
    "bench": {"world", "engine", "kernels", "methods", "runtime", "client", "tools", "types"},
    "cli": {"server", "check", "bench", "world", "runtime", "client", "tools", "types"},
    "integrations": {"runtime", "client", "types"},
}
ENGINE_PARTS_FOR_METHODS = {
    "core",
    "form",
    "sparse",
    "observing",
    "choosing",
    "view",
    "tables",
    "sealed",
    "cache",
    "preparation",
}
LEAVES = {"types", "errors", "dialogue", "constraint"}

# third-party package -> the only places that may import it
DOORS = {
    "sqlalchemy": {"memory/store", "memory/migrations", "memory/tables"},
    "alembic": {"memory/store", "memory/migrations"},
    "fastapi": {"server"},
    "uvicorn": {"server", "cli"},
    "httpx": {"client"},
    "transformers": {"engine/loader", "engine/tokenizer", "world", "bench"},
    "matplotlib": {"bench"},
    "gguf": {"engine/gguf"},
    "llguidance": {"engine/grammar"},
    "flashinfer": {"engine/attention", "bench"},
    "torch": {"engine", "kernels", "methods", "check", "world", "bench"},
    "triton": {"kernels"},
    "typer": {"cli"},
    "prometheus_client": {"server"},
}


def sources() -> list[tuple[str, Path]]:
    """(dotted path under agentkv with slashes, real file) of every module of the package."""
    found = []
    for folder, prefix in (
        (ROOT / "agentkv", ""),
        *((ROOT / name, name + "/") for name in ("kernels", "methods", "integrations")),
    ):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if prefix == "" and relative.parts[0] in ("kernels", "methods", "integrations"):
                continue  # the links: each file once, under its real path
            found.append((prefix + str(relative.with_suffix("")), path))
    return found


def owner(module: str) -> str:
    """The DAG node a module belongs to."""
    head = module.split("/")[0]
    head = head.split(".")[0]
    for prefix in ("client", "runtime", "cli"):
        if head.startswith(prefix + "_"):
            return prefix
    return "types" if head in LEAVES else head


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(absolute module, line, top level?) of every import in a file, those inside functions included."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            rows += [(alias.name, node.lineno, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            rows.append((node.module or "", node.lineno, id(node) in top))
            if node.module == "agentkv":
                rows += [(f"agentkv.{alias.name}", node.lineno, id(node) in top) for alias in node.names]
    return rows


def violations() -> list[str]:
    bad = []
    for module, path in sources():
        me = owner(module)
        for name, line, _ in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if name.split(".")[0] in ("kernels", "methods", "integrations"):
                bad.append(f"{where}: bare {name}")
            if name.startswith("agentkv."):
                target = name.split(".")[1]
                target = "types" if target in LEAVES else owner(target)
                if target != me and target not in ALLOWED[me]:
                    bad.append(f"{where}: {me} imports {name}")
                if (
                    me == "methods"
                    and target == "engine"
                    and name.split(".")[2:3]
                    and name.split(".")[2] not in ENGINE_PARTS_FOR_METHODS
                ):
                    bad.append(f"{where}: a method imports {name}")
            door = DOORS.get(name.split(".")[0])
            if door is not None and not any(module == place or module.startswith((place + "/", place + "_")) for place in door):
                bad.append(f"{where}: {name} has its door in {sorted(door)}")
    return bad


def test_imports_follow_the_dag() -> None:
    assert violations() == []


def test_a_planted_violation_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from agentkv.engine import llm\nimport sqlalchemy\n")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    monkeypatch.setattr(f"{__name__}.sources", lambda: [("memory/planted", planted)])
    assert len(violations()) == 2


def test_one_method_never_imports_another() -> None:
    for module, path in sources():
        if module.startswith("methods/") and not module.endswith("__init__"):
            assert not [name for name, _, _ in imports(path) if name.startswith("agentkv.methods")]


def test_no_file_of_the_package_is_over_500_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for _, path in sources() if (n := len(path.read_text().splitlines())) > 500}
    assert long == {}


def test_the_package_links_are_relative_and_kernels_is_no_package() -> None:
    for name in ("kernels", "methods", "integrations"):
        assert str((ROOT / "agentkv" / name).readlink()) == f"../{name}"
    assert not (ROOT / "kernels" / "__init__.py").exists()
