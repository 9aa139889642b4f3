"""native.cpp, built with the compiler that is there: once for each source, compiler and CPU, then kept in the user's cache.

Where it cannot be built, or AGENTKV_NATIVE=0 says so, its callers do the same in torch: slower, never different in kind.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "AGENTKV_NATIVE"
SOURCE = Path(__file__).with_name("native.cpp")
_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""How native.cpp names its functions for a dtype; others are left to torch."""
_COMPILERS = ("g++", "clang++", "c++")
_COMMON = ("-O3", "-std=gnu++17", "-ffp-contract=fast", "-fPIC", "-shared")
_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
"""Tried in order; without -fopenmp one thread works."""
_LONGEST = 120  # seconds that a compiler may take


class Rows(ctypes.Structure):
    """`Rows` of native.cpp: the rows that attention reads, as addresses and counts of elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("entries", "lens", "starts", "rows", "firsts")),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_step", "q_step", "q_head_step", "num_kv_heads", "group")),
        *((name, ctypes.c_int64) for name in ("page_size", "dim", "page_step")),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Native:
    """The functions of the built library by name and dtype, none where there is no library, and what was done or why not."""

    functions: dict[tuple[str, torch.dtype], Callable[..., None]]
    note: str


@lru_cache(maxsize=1)
def native() -> Native:
    """The library of this process, built at the first call (seconds) unless the cache has it. Never raises."""
    if os.environ.get(SWITCH, "1") == "0":
        return Native({}, f"off: {SWITCH}=0")
    try:
        return _load()
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        return Native({}, f"off: {error}")


def compiled(name: str, *tensors: Tensor) -> Callable[..., None] | None:
    """The function for tensors like these, or None: no library, or they are not all on the CPU and of one dtype it knows."""
    kind = tensors[0].dtype
    function = native().functions.get((name, kind))
    for each in tensors:
        if each.dtype != kind or not each.is_cpu:
            return None
    return function


def find_compiler() -> str | None:
    """CXX, else the first C++ compiler on the path."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)


def library_path(compiler: str) -> Path:
    """Where the library that this compiler makes here is kept."""
    return _cache() / f"native-{_key(compiler)}.so"


def _load() -> Native:
    compiler = find_compiler()
    if compiler is None:
        return Native({}, f"off: no C++ compiler ({', '.join(_COMPILERS)})")
    path = library_path(compiler)
    if path.is_file():
        with contextlib.suppress(OSError):  # a damaged file is built again
            return Native(_open(path), f"built with {compiler}: {path}")
    why = "the compiler failed"
    for flags in _FLAGS:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_COMMON, *flags, str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
            if done.returncode == 0:
                made.replace(path)  # whole or not at all, whoever else builds
                return Native(_open(path), f"built with {compiler} {' '.join(flags)}: {path}")
            why = (done.stderr.strip().splitlines() or [why])[0]
    return Native({}, f"off: {compiler} cannot build {SOURCE.name}: {why}")


def _cache() -> Path:
    """The user's cache folder, or a fresh one of this process where that cannot be written."""
    from platformdirs import user_cache_path  # here, so that a GPU needs no more than torch

    folder = user_cache_path("agentkv") / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="agentkv-native-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="agentkv-native-"))


def _key(compiler: str) -> str:
    """What the library depends on: source, flags, compiler, and the CPU that it was built for."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_LONGEST, check=False).stdout
    parts = (SOURCE.read_bytes(), repr((_COMMON, _FLAGS)).encode(), compiler.encode(), version, _cpu())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _cpu() -> bytes:
    """What the CPU is and can do."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return b"\n".join(sorted({line for line in lines if line.split(b"\t")[0] in (b"model name", b"flags", b"Features")}))


_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "linear": (_P, _N, _P, _P, _P, _N, _N, _N, _I),
    "attend": (ctypes.POINTER(Rows), _P, _P, _P, _P, _I),
    "norm": (_P, _N, _P, _P, _N, _N, _F, _I),
    "turn": (_P, _N, _P, _P, _P, _P, _N, _N, _N, _F, _I),
    "gate": (_P, _P, _N, _N, _I),
    "put": (_P, _P, _P, _P, _N, _P, _N, _N, _N, _N, _N, _N),
}
"""What each function of native.cpp takes."""


def _open(path: Path) -> dict[tuple[str, torch.dtype], Callable[..., None]]:
    library = ctypes.CDLL(str(path))
    functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    for kind, suffix in _SUFFIX.items():
        for name, arguments in _ARGUMENTS.items():
            functions[name, kind] = function = library[f"{name}_{suffix}"]
            function.argtypes, function.restype = arguments, None
    functions["pin", torch.int32] = pin = library["pin"]
    pin.argtypes, pin.restype = (_P, _I, _P), None
    return functions
