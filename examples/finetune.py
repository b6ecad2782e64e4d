"""Fine-tune SmolLM2, a model of 135 million parameters, on four plays of Shakespeare: plain and with fusedops.

    python examples/finetune.py         # `make finetune` installs what it needs; --help lists the options

Two copies of the model see the same batches, in turns: one in plain transformers, one after `apply`. The report shows
their losses, the time of a step and the memory that a step needs. The losses are written to examples/out/.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import torch
from smollm2 import load
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from train_gpt import HERE, draw, title, wait_for

import fusedops
from fusedops.integrations.transformers import apply

LEARNING_RATE = 1e-4
WARM_UP = 6  # steps
NAMES = ("fusedops", "transformers")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    tokenizer, model = load(options.device)
    training, unseen = read(tokenizer, options)
    plain, fused = Trainee(model), Trainee(copy.deepcopy(model))
    print(apply(fused.model))
    size = sum(weight.numel() for weight in model.parameters())
    print(f"\nTwo models of {size:,} parameters: {options.steps} steps of {options.batch} x {options.length} tokens")
    train(fused, plain, training, unseen, options)
    report_losses(fused, plain, options.out)
    batch = training[: options.batch]
    report_costs(fused, plain, batch)
    report_backends(fused, batch)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=60, help="training steps of each model (%(default)s)")
    add("--length", type=int, default=96, help="tokens of a piece of text (%(default)s)")
    add("--batch", type=int, default=2, help="pieces of a step (%(default)s)")
    add("--seed", type=int, default=1, help="of the order of the pieces (%(default)s)")
    add("--device", type=torch.device, default="cpu", help="where to train (%(default)s)")
    add("--out", type=Path, default=HERE / "out", help="folder for finetune.png and finetune.csv (examples/out)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.length < 2 or options.batch < 1:
        parser.error("--steps and --batch must be at least 1, --length at least 2")
    return options


def read(tokenizer: Any, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return pieces of the plays as tokens, in random order: those to train on, and as many as 4 steps take beside."""
    plays = [file.read_text(encoding="ascii") for file in sorted((HERE / "data").glob("*.txt"))]
    tokens = torch.tensor([token for play in plays for token in tokenizer(play)["input_ids"]])
    pieces = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(options.seed))
    pieces, unseen = pieces[order].to(options.device), 4 * options.batch
    return pieces[unseen:], pieces[:unseen]


class Trainee:
    """A model in training, with its loss and time of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, ids: Tensor, rate: float) -> None:
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.backward(ids)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        wait_for(ids.device)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def backward(self, ids: Tensor) -> Tensor:
        """Return the loss, and add its gradients."""
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    def loss_of(self, pieces: Tensor, batch: int) -> float:
        """Return the mean loss of pieces, without training."""
        with torch.no_grad():
            return statistics.fmean(self.model(input_ids=ids, labels=ids).loss.item() for ids in pieces.split(batch))


def train(fused: Trainee, plain: Trainee, training: Tensor, unseen: Tensor, options: argparse.Namespace) -> None:
    """Train both on the same batches, and print the losses beside each other."""
    print(f"{'':24}{NAMES[0]:>12} {NAMES[1]:>12} {'difference':>11}")

    def row(name: str, ours: float, theirs: float) -> None:
        print(f"{name:24}{ours:12.5f} {theirs:12.5f} {abs(ours - theirs):11.1e}", flush=True)

    row("unseen text, before", *(each.loss_of(unseen, options.batch) for each in (fused, plain)))
    for step in range(options.steps):
        start = step * options.batch % (len(training) - options.batch + 1)
        ids, rate = training[start : start + options.batch], LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        # the order alternates, so that other programs on the machine slow both models equally
        for trainee in (fused, plain) if step % 2 else (plain, fused):
            trainee.step(ids, rate)
        if step == 0 or (step + 1) % max(1, options.steps // 6) == 0:
            row(f"step {step + 1}", fused.losses[-1], plain.losses[-1])
    row("unseen text, after", *(each.loss_of(unseen, options.batch) for each in (fused, plain)))


def report_losses(fused: Trainee, plain: Trainee, out: Path) -> None:
    differences = [abs(ours - theirs) for ours, theirs in zip(fused.losses, plain.losses)]
    print(f"Largest difference of a step's loss: {max(differences):.1e}")
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{step},{ours!r},{theirs!r}" for step, (ours, theirs) in enumerate(zip(fused.losses, plain.losses), 1)]
    (out / "finetune.csv").write_text("\n".join((f"step,{NAMES[0]},{NAMES[1]}", *lines, "")))
    file, heading = out / "finetune.png", "SmolLM2 on Shakespeare: the same weights and batches"
    written = draw(fused.losses, plain.losses, differences, file, heading, "nats per token", NAMES[1])
    print(f"Written: {written}finetune.csv in {out}")


def report_costs(fused: Trainee, plain: Trainee, ids: Tensor) -> None:
    title("Time and memory of a training step; the times are medians of the training, in turns")
    late = [each.seconds[len(each.seconds) // 10 :] for each in (fused, plain)]  # the first tenth is warm-up
    seconds = [statistics.median(each) for each in late]
    print(f"{'':40}{NAMES[0]:>12} {NAMES[1]:>12} {f'{NAMES[0]} / {NAMES[1]}':>24}")
    print(f"{'time':40}{seconds[0]:10.2f} s {seconds[1]:10.2f} s {seconds[0] / seconds[1]:24.2f}")
    for what, run in (
        ("peak of the loss without gradients", lambda each: each.loss_of(ids, len(ids))),
        ("peak of forward and backward", lambda each: each.backward(ids)),
        ("peak of a step", lambda each: each.step(ids, rate=0.0)),
    ):
        peaks = []
        for trainee in (fused, plain):
            trainee.optimizer.zero_grad()
            peaks.append(peak_bytes(lambda run=run, trainee=trainee: run(trainee), ids.device) / 2**20)
        print(f"{what:40}{peaks[0]:8.0f} MiB {peaks[1]:8.0f} MiB {peaks[0] / peaks[1]:24.2f}")
    print("Peaks are beside the weights and AdamW's state. That of a step is AdamW's, where the batch is small.")


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of the memory that torch allocates in a call, without what was there before."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        step()
        return torch.accelerator.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def report_backends(fused: Trainee, ids: Tensor) -> None:
    title("The backends of one step")
    fusedops.reset_stats()
    fused.step(ids, rate=0.0)
    print(fusedops.stats())


if __name__ == "__main__":
    main()
