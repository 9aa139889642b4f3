"""Servers beside the engine in its benchmark: any with OpenAI's /v1/completions, and vLLM, which is started and ended here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from agentkv.bench.peers import Run, Side, Transformers, twin
from agentkv.engine.loader import LoadedModel
from agentkv.errors import BadRequest

START_SECONDS = 1200  # that a server may take until it answers: vLLM compiles its model first
STOP_SECONDS = 30
_SHOWN = 600  # characters of a log's end


class Server:
    """A server with OpenAI's /v1/completions that takes token ids and streams; prompts are sent at once.

    gives_ids: it says which tokens it made (vLLM's `return_token_ids`), known after the first run. busy: processor seconds that
    it has taken so far, where that can be told.
    """

    together = True

    def __init__(self, url: str, name: str | None = None, busy: Callable[[], float] | None = None) -> None:
        self._busy = busy
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = name or self.url
        self.gives_ids = False
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
                self.model = json.load(answer)["data"][0]["id"]
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise BadRequest(
                f"peer {url}: GET /v1/models failed: {error}", hint="A running server's base URL", param="peer"
            ) from None

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Run:
        """See Side. An event counts as the tokens that it names, else as one; prefill ends when every prompt has its first."""
        first: dict[float, float] = {}  # when a prompt got its first token: processor seconds by then
        begun, busy = time.perf_counter(), self._seconds()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self._stream(prompt, new, first), prompts))
        filled, ended = max(each[0][0] for each in answers), max(each[-1][0] for each in answers)
        decoded = sum(moment > filled for each in answers for moment, _ in each)
        tokens = [[token for _, token in each] for each in answers]
        self.gives_ids = all(token >= 0 for each in tokens for token in each)
        cpu_s = (first[filled] - busy, self._seconds() - first[filled]) if self._busy else None
        return Run(sum(map(len, prompts)), filled - begun, ended - filled, decoded, ended - begun, tokens, cpu_s)

    def _seconds(self) -> float:
        return self._busy() if self._busy else 0.0

    def _stream(self, prompt: Sequence[int], new: int, first: dict[float, float]) -> list[tuple[float, int]]:
        """When each token came, and which it is; -1 where that is not told. Its first moment is noted in `first`."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                events = []
                for line in answer:
                    if line.startswith(b"data: {"):
                        events.append((time.perf_counter(), line))
                        if len(events) == 1:
                            first[events[0][0]] = self._seconds()
        except OSError as error:
            raise BadRequest(
                f"peer {self.url}: {error}", hint="It must stream /v1/completions of token ids", param="peer"
            ) from None
        told = [(moment, json.loads(line[6:]).get("choices")) for moment, line in events]
        tokens = [(moment, token) for moment, choices in told if choices for token in choices[0].get("token_ids") or [-1]]
        if len(tokens) < 2:
            raise BadRequest(f"peer {self.url} streamed {len(tokens)} tokens of {new}", param="peer")
        return tokens


@contextmanager
def open_peer(name: str, loaded: LoadedModel, rows: int, most_tokens: int) -> Iterator[Side]:
    """The peer of that name: transformers, vllm (started here and stopped at the end) or a server's URL.

    rows, most_tokens: sequences at once, and tokens of each, that it must have room for. BadRequest where it cannot be had.
    """
    if name == "transformers":
        yield Transformers(loaded)
    elif name.startswith(("http://", "https://")):
        yield Server(name)
    elif name == "vllm":
        with _vllm(loaded, rows, most_tokens) as server:
            yield server
    else:
        raise BadRequest(f"unknown peer {name!r}", hint="transformers, vllm or a server's URL", param="peer")


@contextmanager
def _vllm(loaded: LoadedModel, rows: int, most_tokens: int) -> Iterator[Server]:
    """`vllm serve` on a free port of the loopback interface, of the same weights, dtype and number of threads.

    Its prefix cache is off, as nothing is cached from run to run on our side. It gets a process group of its own, which is
    ended whole.
    """
    program = shutil.which("vllm", path=".peers/vllm/bin") or shutil.which("vllm")
    if program is None:
        hint = "make peers, or put the `vllm` command of its environment on the PATH, or start a server and give its URL"
        raise BadRequest("peer vllm: there is no vllm here", hint=hint, param="peer")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = loaded.path
        if path.is_file():  # a GGUF file, which vllm does not read
            path = Path(folder) / "model"
            twin(loaded).save_pretrained(path)
        dtype = str(loaded.dtype).removeprefix("torch.")
        options = ["--dtype", dtype, "--max-model-len", str(most_tokens), "--max-num-seqs", str(max(rows, 1))]
        plain = ["--skip-tokenizer-init", "--no-enable-prefix-caching", "--disable-log-stats"]
        command = [program, "serve", str(path), "--host", "127.0.0.1", "--port", str(port), *options, *plain]
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=_environment(program, loaded, rows * most_tokens), stdout=out, stderr=out, start_new_session=True
            )
        try:
            _await(f"http://127.0.0.1:{port}/health", process, log)
            yield Server(f"http://127.0.0.1:{port}", "vllm", _clock(process.pid))
        finally:
            _end(process)


def _environment(program: str, loaded: LoadedModel, tokens: int) -> dict[str, str]:
    """Of a vllm process: as many threads as we have, on the first of our cores; room for so many tokens' KV; no network."""
    threads = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(threads))
    room = 1.2 * tokens * sum(group.token_bytes for group in loaded.groups(1))
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    openmp = Path(program).resolve().parents[1] / "lib" / "libiomp5.so"  # what its manual asks for on these CPUs
    return {
        **ours,
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:threads])) if threads <= len(cores) else "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(1 + int(room) // 2**30),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _clock(group: int) -> Callable[[], float] | None:
    """Tells the processor seconds of the processes of a group, by the system's tables; None where it has no such tables."""
    if not Path("/proc/self/stat").exists():
        return None
    tick = os.sysconf("SC_CLK_TCK")

    def seconds() -> float:
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the state on: the name may hold anything
                total += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == group)
        return total / tick

    return seconds


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the address answers; BadRequest, with the log's end, where the server ended or took too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    said = log.read_text(errors="replace").strip()[-_SHOWN:]
    hint = "Run `vllm serve` on the model by hand"
    raise BadRequest(f"peer vllm did not start (exit code {process.poll()}): {said}", hint=hint, param="peer")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
