"""What a training run is told, and the processes that make its batches and the samples to score."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentkv.world import curriculum, score
from agentkv.world.curriculum import STAGES, Batch, Stage
from agentkv.world.micro_model import MicroConfig
from agentkv.world.samples import Sample


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    out: Path
    minutes: float = 16.0
    device: str = "cpu"
    seed: int = 1
    batch_tokens: int = 131_072
    workers: int = 0
    compile: bool = False
    resume: bool = False
    init: Path | None = None
    eval_seeds: int = 24
    final_seeds: int = 100
    max_steps: int = 10**9
    decay: float = 0.35
    model: MicroConfig = field(default_factory=MicroConfig)
    stages: tuple[Stage, ...] = STAGES


def _produce(queue: Any, progress: Any, options: Options, worker: int) -> None:
    """A worker process: batches for the stage of the moment, for ever."""
    with suppress(OSError):
        os.nice(10)
    rng = random.Random(f"{options.seed}/{worker}/{time.time_ns()}")
    while True:
        try:
            queue.put(curriculum.batch(rng, curriculum.stage_at(progress.value, options.stages), options.batch_tokens))
        except ValueError:  # one task in very many asks for more names than there are
            traceback.print_exc()


class Feed:
    """Batches from worker processes, or made in place without workers; a second set of processes makes samples to score."""

    def __init__(self, options: Options, fraction: float = 0.0) -> None:
        self.options = options
        context = mp.get_context("fork")
        self.progress = context.Value("d", fraction, lock=False)
        self.rng = random.Random(options.seed)
        self.queue: Any = context.Queue(maxsize=24)
        self.processes = [
            context.Process(target=_produce, args=(self.queue, self.progress, options, i), daemon=True)
            for i in range(options.workers)
        ]
        for process in self.processes:
            process.start()
        self.pool = context.Pool(options.workers) if options.workers else None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self.processes:
                yield self.queue.get(timeout=120)
            else:
                stage = curriculum.stage_at(self.progress.value, self.options.stages)
                yield curriculum.batch(self.rng, stage, self.options.batch_tokens)

    def samples(self, chosen: list[score.Cell]) -> Iterator[list[Sample]]:
        """The samples of each cell, in order."""
        return iter(self.pool.imap(score.samples, chosen)) if self.pool else map(score.samples, chosen)

    def close(self) -> None:
        """Stop the workers."""
        for process in self.processes:
            process.terminate()
        if self.pool:
            self.pool.terminate()
