"""Train two small decoders with experts on four plays of Shakespeare: one with fusedops, one in plain torch.

    python examples/train_moe.py        # --help lists the options

The report shows the difference of the two losses, the load of each expert, the backend selected for each op, and the
time of each model. The losses and the loads are written to examples/out/, and drawn where matplotlib is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import torch
from moe import FUSED, PLAIN, Moe
from torch import Tensor
from train_gpt import BATCH, HERE, Plays, draw, title
from train_llama import Trainee, parse, report_backends, report_losses, report_times, train

SIZES = {"layers": 2, "width": 96, "heads": 6, "key_heads": 2, "experts": 8, "k": 2}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments, __doc__, HERE / "out")
    plays = Plays.read(HERE / "data", options.device, options.seed)
    fused, plain = (MoeTrainee(partial(Moe, ops=ops, **SIZES), plays, options.seed) for ops in (FUSED, PLAIN))
    size = sum(parameter.numel() for parameter in fused.model.parameters())
    print(f"Two decoders of {size:,} parameters, {SIZES['experts']} experts in each block, of which a token takes "
          f"{SIZES['k']}, on {plays.device}: {options.steps} steps of {BATCH} x {options.block}")  # fmt: skip
    train(fused, plain, plays, options)
    report_losses(fused, plain)
    print("The two round differently; where two experts are nearly equal for a token, they then take another one.")
    report_load(fused)
    write(fused, plain, options.out)
    report_backends(fused, plays, options.block)
    report_times(fused, plain, plays, options)


class MoeTrainee(Trainee):
    """A model in training, with the share of each expert of each block in the choices of each step."""

    model: Moe

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.loads: list[Tensor] = []

    def step(self, text: Tensor, following: Tensor, rate: float) -> None:
        super().step(text, following, rate)
        if rate:  # not while it is timed
            self.loads.append(torch.stack([mixture.load() for mixture in self.model.mixtures()]).cpu())


def report_load(trainee: MoeTrainee) -> None:
    title("The share of each expert in the choices, in per cent")
    last = torch.stack(trainee.loads[-20:]).mean(0)
    columns = "".join(f"{f'e{e}':>6}" for e in range(last.shape[1]))
    print(f"{'':24}{columns}")
    for name, loads in (("first step", trainee.loads[0]), ("last 20 steps", last)):
        for block, shares in enumerate(loads.tolist()):
            print(f"{f'{name}, block {block}':24}" + "".join(f"{100 * share:6.1f}" for share in shares))


def write(fused: MoeTrainee, plain: MoeTrainee, out: Path) -> None:
    """Write the losses and the loads, and draw them."""
    out.mkdir(parents=True, exist_ok=True)
    differences = [abs(ours - theirs) for ours, theirs in zip(fused.losses, plain.losses)]
    lines = [f"{step},{ours!r},{theirs!r}" for step, (ours, theirs) in enumerate(zip(fused.losses, plain.losses), 1)]
    (out / "moe.csv").write_text("\n".join(("step,fusedops,plain_torch", *lines, "")))
    loads = torch.stack(fused.loads)  # (steps, blocks, experts)
    names = [f"block{block}_expert{e}" for block in range(loads.shape[1]) for e in range(loads.shape[2])]
    rows = [",".join(map(repr, [step, *row])) for step, row in enumerate(loads.flatten(1).tolist(), 1)]
    (out / "moe_load.csv").write_text("\n".join((",".join(["step", *names]), *rows, "")))
    heading = "The same decoder with experts, seed and batches"
    pictures = draw_load(loads, out) + draw(fused.losses, plain.losses, differences, out / "moe.png", heading)
    print(f"Written: moe_load.csv, {pictures}moe.csv in {out}")


def draw_load(loads: Tensor, out: Path) -> str:
    """Draw the share of each expert over the steps, a picture for each block. Return the file's name for a list."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # draw has printed the fix
        return ""
    steps, blocks, experts = loads.shape
    figure = Figure(figsize=(8, 2.5 * blocks), layout="constrained")
    for block, axes in enumerate(figure.subplots(blocks, 1, sharex=True, squeeze=False).flatten()):
        axes.stackplot(range(1, steps + 1), 100 * loads[:, block].T.numpy(), labels=range(experts), alpha=0.8)
        axes.set(title=f"block {block}", ylabel="share of choices (%)", ylim=(0, 100), xlim=(1, max(2, steps)))
        for e in range(1, experts):  # where each expert has the same share
            axes.axhline(100 * e / experts, color="white", linewidth=0.6, linestyle=":")
    axes.set(xlabel="step")
    figure.legend(*axes.get_legend_handles_labels(), title="expert", loc="outside right upper", reverse=True)
    figure.savefig(out / "moe_load.png", dpi=120)
    return "moe_load.png, "


if __name__ == "__main__":
    main()
