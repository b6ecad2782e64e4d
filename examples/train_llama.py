"""Train two small Llama-like decoders on four plays of Shakespeare: one with fusedops, one in plain torch.

    python examples/train_llama.py      # --help lists the options

The report shows the backend selected for each op, the largest difference of the two losses, and the time of each model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import torch
from llama import FUSED, PLAIN, Llama
from torch import Tensor, nn
from train_gpt import BATCH, HERE, TIMED_STEPS, Plays, best_device, learning_rate, title, wait_for

import fusedops

SIZES = {"layers": 2, "width": 96, "heads": 6, "key_heads": 2}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    plays = Plays.read(HERE / "data", options.device, options.seed)
    fused, plain = (Trainee(partial(Llama, ops=ops, **SIZES), plays, options.seed) for ops in (FUSED, PLAIN))
    size = sum(parameter.numel() for parameter in fused.model.parameters())
    print(f"Two decoders of {size:,} parameters, on {plays.device}: {options.steps} steps of {BATCH} x {options.block}")
    train(fused, plain, plays, options)
    report_losses(fused, plain)
    report_backends(fused, plays, options.block)
    report_times(fused, plain, plays, options)


def parse(
    arguments: Sequence[str] | None, description: str | None = __doc__, out: Path | None = None
) -> argparse.Namespace:
    """Return the options, with ``out``, a folder for files, where an example writes some."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="training steps of each model (%(default)s)")
    add("--block", type=int, default=128, help="context length, in characters (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the batches (%(default)s)")
    add("--device", type=torch.device, default=best_device(), help="where to train (here: %(default)s)")
    if out is not None:
        add("--out", type=Path, default=out, help="folder for the files that are written (examples/out)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.block < 1:
        parser.error("--steps and --block must be at least 1")
    return options


class Trainee:
    """A model in training, with its loss and time of each step. ``make`` takes the number of characters."""

    def __init__(self, make: Callable[[int], nn.Module], plays: Plays, seed: int) -> None:
        torch.manual_seed(seed)  # both start from the same weights
        self.model = make(len(plays.characters)).to(plays.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, text: Tensor, following: Tensor, rate: float) -> None:
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model(text, following)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        wait_for(text.device)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())


def train(fused: Trainee, plain: Trainee, plays: Plays, options: argparse.Namespace) -> None:
    """Train both on the same batches."""
    for step in range(options.steps):
        batch = plays.batch(plays.training, BATCH, options.block)
        # the order alternates, so that other programs on the machine slow both models equally
        for trainee in (fused, plain) if step % 2 else (plain, fused):
            trainee.step(*batch, learning_rate(step, options.steps))
        if (step + 1) % max(1, options.steps // 5) == 0:
            print(f"  step {step + 1}: loss {fused.losses[-1]:.4f}, plain torch {plain.losses[-1]:.4f}", flush=True)


def report_losses(fused: Trainee, plain: Trainee) -> None:
    differences = [abs(ours - theirs) for ours, theirs in zip(fused.losses, plain.losses)]
    print(f"Largest difference of a step's loss: {max(differences):.1e}")


def report_backends(fused: Trainee, plays: Plays, block: int) -> None:
    title("The backends of one step")
    fusedops.reset_stats()
    fused.step(*plays.batch(plays.training, BATCH, block), rate=0.0)
    print(fusedops.stats())


def report_times(fused: Trainee, plain: Trainee, plays: Plays, options: argparse.Namespace) -> None:
    title("Time of a training step: medians, measured in turns")
    for trainee in (fused, plain):
        trainee.seconds.clear()
    for step in range(min(TIMED_STEPS, options.steps)):
        batch = plays.batch(plays.training, BATCH, options.block)
        for trainee in (fused, plain) if step % 2 else (plain, fused):
            trainee.step(*batch, rate=0.0)
    ours, theirs = (1000 * statistics.median(t.seconds[len(t.seconds) // 10 :]) for t in (fused, plain))
    print(f"fusedops {ours:.1f} ms, plain torch {theirs:.1f} ms, plain / fusedops {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
