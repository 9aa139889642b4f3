"""Train `micro`: `python -m agentkv.world.train --out DIR --minutes 16`.

`--resume` goes on from `DIR/state.pt`; `--init FOLDER` trains exported weights further; `--no-prune` trains the twin that
never saw a pruned body.

Writes `DIR/state.pt` (to resume), `DIR/log.jsonl`, `DIR/scores.json` and the best of the last
checkpoints as a Hugging Face folder, `DIR/best`.  Needs torch, numpy and safetensors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from agentkv.world import curriculum, score
from agentkv.world.backends import check_masked_attention, faster_attention
from agentkv.world.curriculum import KINDS, Batch, Stage
from agentkv.world.feed import Feed, Options
from agentkv.world.micro_model import Micro, describe, export, load, visible
from agentkv.world.muon import Muon
from agentkv.world.samples import Sample

GATE = 0.99
EVALUATE_AT = (0.45, 0.75, 0.88, 0.94, 0.98)
CHOOSING = 900_000  # evaluation seeds for choosing a checkpoint; reports use others


def learning_rate(fraction: float, step: int, decay: float = 0.35) -> float:
    """The factor on both learning rates: 100 steps up, then flat, down over the last `decay` of the run."""
    down = min(1.0, max(0.01, (1.0 - fraction) / decay))
    return min(1.0, (step + 1) / 100) * down


def loss_of(embedding: Tensor, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the next token, and which predictions are right."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    return (each * weights).sum() / weights.sum().clamp_min(1.0), logits.argmax(-1) == targets


class Trainer:
    """Model, optimisers and the clock of one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.feed = Feed(options, self._saved_fraction())  # before CUDA starts: the workers are forked
        torch.manual_seed(options.seed)
        self.model = Micro(options.model).to(options.device)
        if options.init is not None:
            self.model.load_state_dict(load(options.init, options.device).state_dict())
        self.loss = loss_of
        self.step = 0
        self.spent = 0.0
        self.best = (-1.0, -1.0)
        self.started_over = 0
        self.passed = options.init is not None  # exported weights have passed the gate
        self.recent = 0.0
        self.evaluated = 0.0
        self.choosing: list[list[Sample]] = []
        self.masks = True
        self._optimisers()
        self.options.out.mkdir(parents=True, exist_ok=True)
        if options.compile:
            self._compile()
            self.warm_up()

    def _saved_fraction(self) -> float:
        """How far the run to be resumed had come, so that the first batches are of the right stage."""
        saved = self.options.out / "state.pt"
        if not (self.options.resume and saved.exists()):
            return 0.0
        spent: float = torch.load(saved, map_location="cpu", weights_only=True, mmap=True)["spent"]
        return min(1.0, spent / (60 * self.options.minutes))

    def _compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.accumulated_recompile_limit = 1024
        faster_attention()
        check_masked_attention()
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.loss = torch.compile(loss_of, dynamic=False)

    def _optimisers(self) -> None:
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def fraction(self) -> float:
        """How much of the time is spent."""
        return min(1.0, self.spent / (60 * self.options.minutes))

    def warm_up(self) -> None:
        """Compile every shape of the schedule before the clock starts; a mask that does not run here is left out."""
        for length, masked in curriculum.shapes(self.options.stages):
            began = time.monotonic()
            stage = Stage(1.0, ((length, 1.0),), curriculum.MIXED, masked=float(masked))
            batch = curriculum.batch(random.Random(0), stage, self.options.batch_tokens)
            try:
                torch.autograd.backward(self.forward(batch)[0])
            except RuntimeError as error:
                if not masked:
                    raise
                self.masks = False
                self.log(masked="left out", error=str(error)[:300])
            self._zero()
            self.log(compiled=length, masked=masked, seconds=round(time.monotonic() - began, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, which predictions are right, and the weights."""
        device = self.options.device
        ids = torch.from_numpy(batch.ids.astype("int32")).to(device, non_blocking=True).long()
        weights = torch.from_numpy(batch.weights).to(device, non_blocking=True).float()
        positions = torch.from_numpy(batch.positions).to(device, non_blocking=True)
        seen = None if batch.gone is None else visible(torch.from_numpy(batch.gone).to(device, non_blocking=True))
        # Token i predicts token i + 1; the last place predicts nothing.
        targets = ids.roll(-1, dims=1)
        weights = weights.roll(-1, dims=1)
        weights[:, -1] = 0.0
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            hidden = self.model(ids, positions, seen)
            loss, right = self.loss(self.model.embed_tokens.weight, hidden, targets, weights)
        return loss, right, weights

    def _zero(self) -> None:
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)

    def update(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """One optimiser step; returns the loss, which predictions were right, and the weights."""
        loss, right, weights = self.forward(batch)
        torch.autograd.backward(loss)
        factor = learning_rate(self.fraction(), self.step, self.options.decay)
        for optimiser, base in ((self.muon, 0.02), (self.adam, 2e-3)):
            for group in optimiser.param_groups:
                group["lr"] = base * factor
            optimiser.step()
        self._zero()
        self.step += 1
        return loss.detach(), right, weights

    def save(self) -> None:
        """Write all that resuming needs, in one rename."""
        target = self.options.out / "state.pt"
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "spent": self.spent,
            "best": self.best,
            "evaluated": self.evaluated,
            "recent": self.recent,
            "passed": self.passed,
            "config": describe(self.options.model),
        }
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def restore(self) -> None:
        """Continue from `state.pt`."""
        state = torch.load(self.options.out / "state.pt", map_location=self.options.device, weights_only=True)
        if state["config"] != describe(self.options.model):
            raise ValueError("the saved state belongs to a model of other sizes")
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.spent, self.best = state["step"], state["spent"], tuple(state["best"])
        self.evaluated, self.recent, self.passed = state["evaluated"], state["recent"], state["passed"]

    def log(self, **fields: Any) -> None:
        """Print a line and keep it."""
        line = json.dumps({"step": self.step, "t": round(self.spent, 1), **fields})
        print(line, flush=True)
        with (self.options.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def gate(self) -> None:
        """Record/query must be learnt before anything else: else more time, else another seed."""
        first = gate_at(self.options.stages)
        if self.passed or self.fraction() < first:
            return
        if self.recent >= GATE or self.started_over or self.fraction() >= first + 0.05 and self.recent >= 0.9:
            self.passed = True
            self.log(gate="passed", accuracy=round(self.recent, 4))
        elif self.fraction() < first + 0.05:
            self.feed.progress.value = first - 1e-6  # a little more of the same
        else:
            self.started_over += 1
            self.log(gate="failed", accuracy=round(self.recent, 4))
            torch.manual_seed(self.options.seed + 1000)
            self.model.reset()
            self._optimisers()
            self.step, self.spent = 0, 0.0

    def evaluate(self, seeds: int) -> None:
        """Score the model of the moment; export it when it is the best so far."""
        chosen = score.cells(seeds, CHOOSING)
        if not self.choosing:
            self.choosing = list(self.feed.samples(chosen))
        table = self.scored(self.model, chosen, self.choosing)
        worth = score.lowest(table)
        worth = (worth[1], worth[0])
        if worth >= self.best:
            self.best = worth
            export(self.model, self.options.out / "best")

    def scored(self, model: Micro, chosen: list[score.Cell], filled: Iterable[list[Sample]]) -> dict[str, Any]:
        """Scores of `model` in some cells, logged."""
        began = time.monotonic()
        with torch.compiler.set_stance("force_eager"):
            table = score.score(model, chosen, filled)
        low, mean = score.lowest(table)
        self.log(eval=score.short(table), lowest=low, mean=round(mean, 4), seconds=round(time.monotonic() - began, 1))
        return table

    def finish(self) -> None:
        """Choose among the last checkpoints and score the chosen one, as exported, on fresh seeds."""
        self.save()
        self.evaluate(self.options.eval_seeds)
        chosen = load(self.options.out / "best", self.options.device)
        cells = score.cells(self.options.final_seeds, 0, score.REPORTED)
        table = self.scored(chosen, cells, self.feed.samples(cells))
        (self.options.out / "scores.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        self.log(finished=True)


def gate_at(stages: tuple[Stage, ...]) -> float:
    """The end of the last stage that has records and queries only."""
    return max((stage.until for stage in stages if stage.mix == curriculum.RAW), default=0.0)


def accuracies(batch: Batch, right: Tensor, weights: Tensor) -> dict[str, Any]:
    """By kind of row: share of copied bytes right, and of rows without any error."""
    copied = (weights == 4.0) | ((weights == 1.0) & _is_raw(batch, weights))
    spoken = weights >= 1.0
    found: dict[str, Any] = {}
    for index, kind in enumerate(KINDS):
        rows = torch.from_numpy(batch.kinds == index).to(right.device)
        if bool(rows.any()) and bool(copied[rows].any()):
            bytes_right = right[rows][copied[rows]].float().mean()
            whole = (right[rows] | ~spoken[rows]).all(-1).float().mean()
            found[kind] = [round(float(bytes_right), 4), round(float(whole), 3)]
    return found


def _is_raw(batch: Batch, weights: Tensor) -> Tensor:
    return torch.from_numpy(batch.kinds == KINDS.index("raw")).to(weights.device)[:, None]


def train(options: Options) -> Trainer:
    """The whole run."""
    trainer = Trainer(options)
    try:
        if options.resume and (options.out / "state.pt").exists():
            trainer.restore()
        _loop(trainer)
    finally:
        trainer.feed.close()
    return trainer


def _loop(trainer: Trainer) -> None:
    options, tokens, logged, saved = trainer.options, 0, trainer.spent, trainer.spent
    last = time.monotonic()
    for batch in trainer.feed:
        trainer.feed.progress.value = trainer.fraction()
        trainer.gate()
        if batch.gone is not None and not trainer.masks:
            continue
        loss, right, weights = trainer.update(batch)
        tokens += batch.ids.size
        if trainer.step % 10 == 0:
            seen = accuracies(batch, right, weights)
            if "raw" in seen:
                trainer.recent += 0.3 * (seen["raw"][0] - trainer.recent)
            now = time.monotonic()
            trainer.spent += now - last
            last = now
            if trainer.spent - logged >= 6:
                rate = int(tokens / (trainer.spent - logged))
                trainer.log(loss=round(float(loss), 4), rate=rate, length=batch.ids.shape[1], seen=seen)
                tokens, logged = 0, trainer.spent
            if trainer.spent - saved >= 60:
                trainer.save()
                saved = trainer.spent
        fraction = trainer.fraction()
        due = [at for at in EVALUATE_AT if trainer.evaluated < at <= fraction]
        if due and fraction < 1:
            trainer.evaluated = due[-1]
            trainer.evaluate(options.eval_seeds)
            last = time.monotonic()  # evaluation is not training time
        if fraction >= 1 or trainer.step >= options.max_steps:
            break
    trainer.finish()


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train micro, the bundled model of the agent world.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=16.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 3))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-prune", action="store_true", help="no pruned bodies in training: the twin")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--init", type=Path, help="start from an exported folder, in the last stage of the schedule")
    parser.add_argument("--eval-seeds", type=int, default=24)
    parser.add_argument("--final-seeds", type=int, default=100)
    parser.add_argument("--max-steps", type=int, default=10**9)
    args = vars(parser.parse_args(argv))
    skip, twin = args.pop("no_compile"), args.pop("no_prune")
    options = replace(Options(out=args["out"]), **args)
    if options.init is not None:
        options = replace(options, stages=curriculum.LATE, decay=0.75)
    if twin:
        options = replace(options, stages=curriculum.without_pruning(options.stages))
    train(replace(options, compile=options.device == "cuda" and not skip))


if __name__ == "__main__":
    main()
