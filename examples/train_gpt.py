"""Train two small GPTs on four plays of Shakespeare: one with fusedops, one in plain torch.

    python examples/train_gpt.py        # 90 seconds at most; --help lists the options

The report shows the backend selected for the attention and the reasons, the difference of the two losses, the time of
each model, and text that the first model generates. The losses are written to examples/out/, and drawn where matplotlib
is installed. Training has a limit of time: a slow machine takes fewer steps. With --attention softmax both models have
the scores of all queries and keys in memory, and the softmax is the fused op.

    torchrun --nproc-per-node 2 examples/train_gpt.py

trains one model over two processes and an unsharded one in each process, and compares these.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

# Set before torch is imported. By default, torch's threads wait for each other in busy loops; on two cores with other
# programs, training took 8 times as long with these loops.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from gpt import FUSED, FUSED_SOFTMAX, GPT, PLAIN, PLAIN_SOFTMAX, Ops
from parallel import parallelize
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F

import fusedops

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # the losses are printed instead, as without a terminal
    tqdm = None

HERE = Path(__file__).parent
SIZES = {"layers": 2, "width": 96, "heads": 6}
BATCH = 8
LEARNING_RATE = 4e-3
WARM_UP = 20  # steps
PROBED_STEPS = 10  # after which the number of steps is set, where the machine is slow
TIMED_STEPS = 60  # after training, for the comparison of times
REFUSED_LENGTH = 100  # the softmax of Ascend supports multiples of 32, from 32 to 4096
FORMS = {"attention": (FUSED, PLAIN), "softmax": (FUSED_SOFTMAX, PLAIN_SOFTMAX)}


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = parse(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        train_in_parallel(options)
        return
    plays = Plays.read(HERE / "data", options.device, options.seed)
    fused, plain = (Trainee(ops, plays, options.seed) for ops in FORMS[options.attention])

    q, k, v = train(fused, plain, plays, options)

    report_backends()
    report_training_call(Call.of(options.attention, q, k, v))
    report_other_devices(Call.of(options.attention, q, k, v))
    report_fallback(q)
    report_losses(fused, plain, plays, options)
    report_times(fused, plain, plays, options, (q, k, v))
    report_text(fused.model, plays, options.block)
    report_next(options.out)
    print(f"{time.perf_counter() - started:.0f} s in all.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600, help="training steps of each model, at most (%(default)s)")
    add("--seconds", type=float, default=50, help="training time of both, about: fewer steps if need be (%(default)s)")
    add("--block", type=int, default=128, help="context length, in characters (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights, the batches and the text (%(default)s)")
    add("--attention", choices=[*FORMS], default="attention", help="the op, or the softmax of its scores (%(default)s)")
    add("--device", type=torch.device, default=best_device(), help="where to train (here: %(default)s)")
    add("--out", type=Path, default=HERE / "out", help="folder for loss.png and loss.csv (examples/out)")
    add("--sequence-parallel", action="store_true", help="under torchrun: also shard the tensors between the layers")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.block < 1:
        parser.error("--steps and --block must be at least 1")
    if not options.seconds > 0:
        parser.error("--seconds must be above 0")
    return options


def best_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None and accelerator.type in ("cuda", "npu") else torch.device("cpu")


@dataclass
class Plays:
    """The text as numbers. The last tenth is for validation."""

    characters: list[str]
    training: Tensor
    validation: Tensor
    device: torch.device
    random: torch.Generator  # on the CPU, so that every device sees the same batches

    @staticmethod
    def read(folder: Path, device: torch.device, seed: int) -> Plays:
        text = "\n\n\n".join(file.read_text(encoding="ascii") for file in sorted(folder.glob("*.txt")))
        characters = sorted(set(text))
        number = {character: position for position, character in enumerate(characters)}
        numbers = torch.tensor([number[character] for character in text])
        split = len(numbers) * 9 // 10
        return Plays(characters, numbers[:split], numbers[split:], device, torch.Generator().manual_seed(seed))

    def batch(self, text: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Return ``size`` random pieces of ``length`` characters, and the next character of each character."""
        starts = torch.randint(len(text) - length, (size, 1), generator=self.random)
        pieces = text[starts + torch.arange(length + 1)].to(self.device)
        return pieces[:, :-1], pieces[:, 1:]


class Trainee:
    """A model in training, with its loss and time of each step. With a mesh, it is sharded over the processes."""

    def __init__(
        self, ops: Ops, plays: Plays, seed: int, mesh: DeviceMesh | None = None, *, sequence: bool = False
    ) -> None:
        torch.manual_seed(seed)  # both start from the same weights
        self.model = GPT(len(plays.characters), ops, **SIZES).to(plays.device)
        self.sharded = mesh is not None
        if mesh is not None:
            parallelize(self.model, mesh, sequence=sequence)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, text: Tensor, following: Tensor, rate: float, seed: int | None) -> None:
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with implicit_replication() if self.sharded else nullcontext():
            loss = loss_of(self.model, text, following, seed)
            self.optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        wait_for(text.device)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())


def loss_of(model: GPT, text: Tensor, following: Tensor, seed: int | None = None) -> Tensor:
    return F.cross_entropy(model(text, seed).flatten(0, 1), following.flatten())


def wait_for(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()  # does nothing on a CPU


def train(fused: Trainee, plain: Trainee, plays: Plays, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Train both on the same batches. Return q, k and v of one attention of the training."""
    size = sum(parameter.numel() for parameter in fused.model.parameters())
    print(f"Two GPTs of {size:,} parameters, on {plays.device}: {options.steps} steps of {BATCH} x {options.block}")
    # None: only on a terminal
    bar = tqdm(total=options.steps, unit="step", ncols=80, nrows=24, disable=None) if tqdm is not None else None
    step, steps = 0, options.steps
    while step < steps:
        if step == PROBED_STEPS:
            steps = steps_within(options.seconds, fused, plain, options.steps)
            if bar is not None:
                bar.total = steps
        text, following = plays.batch(plays.training, BATCH, options.block)
        if step == 0:
            call = attention_call(fused.model, text)
        rate = learning_rate(step, steps)
        # the order alternates, so that other programs on the machine slow both models equally
        for trainee in (fused, plain) if step % 2 else (plain, fused):
            trainee.step(text, following, rate, seed=1000 * step)  # one seed, so that both drop the same elements
        losses = f"loss {fused.losses[-1]:.2f}, plain torch {plain.losses[-1]:.2f}"
        step += 1
        if bar is not None and not bar.disable:
            bar.set_postfix_str(losses, refresh=False)
            bar.update()
        elif step % max(1, steps // 5) == 0:
            print(f"  step {step}: {losses}", flush=True)
    if bar is not None:
        bar.close()
    return call


def steps_within(seconds: float, fused: Trainee, plain: Trainee, steps: int) -> int:
    """Return how many steps of both models take ``seconds``, from the first ones, and at most ``steps``."""
    each = sum(statistics.median(trainee.seconds) for trainee in (fused, plain))
    fitting = max(2 * PROBED_STEPS, int(seconds / each))
    if fitting < steps:
        print(f"A step of both takes {each:.2f} s here: {fitting} steps in {seconds:.0f} s, instead of {steps}")
    return min(steps, fitting)


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: it rises for WARM_UP steps, and follows a cosine down to a twentieth."""
    return LEARNING_RATE * min(1, (step + 1) / WARM_UP) * (0.525 + 0.475 * math.cos(math.pi * step / steps))


def train_in_parallel(options: argparse.Namespace) -> None:
    """Train a GPT over all processes and an unsharded one in each, on the same batches and dropout seeds."""
    distributed.init_process_group()
    try:
        processes, first = distributed.get_world_size(), distributed.get_rank() == 0
        torch.get_device_module(options.device).set_device(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(options.device.type, (processes,))
        plays = Plays.read(HERE / "data", options.device, options.seed)
        ops, _ = FORMS[options.attention]
        spread = Trainee(ops, plays, options.seed, mesh, sequence=options.sequence_parallel)
        whole = Trainee(ops, plays, options.seed)
        if first:
            print(f"A GPT over {processes} processes on {options.device}, and a whole one: {options.steps} steps")
        for step in range(options.steps):
            batch = plays.batch(plays.training, BATCH, options.block)
            for trainee in (spread, whole):
                trainee.step(*batch, learning_rate(step, options.steps), seed=1000 * step)
            if first and (step + 1) % max(1, options.steps // 5) == 0:
                print(f"  step {step + 1}: loss {spread.losses[-1]:.6f}, whole {whole.losses[-1]:.6f}", flush=True)
        if first:
            differences = [abs(ours - theirs) for ours, theirs in zip(spread.losses, whole.losses)]
            print(f"Largest difference of a step's loss: {max(differences):.1e}")
            options.out.mkdir(parents=True, exist_ok=True)
            rows = enumerate(zip(spread.losses, whole.losses), 1)
            lines = [f"{step},{ours!r},{theirs!r}" for step, (ours, theirs) in rows]
            (options.out / "parallel.csv").write_text("\n".join(("step,parallel,whole", *lines, "")))
            print(f"Written: parallel.csv in {options.out}")
    finally:
        distributed.destroy_process_group()


def attention_call(model: GPT, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the first block's attention for ``text``."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    ops = model.ops

    def record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((q.detach(), k.detach(), v.detach()))
        return ops.attention(q, k, v)

    model.ops = replace(ops, attention=record)
    model(text)
    model.ops = ops
    return calls[0]


class Call(NamedTuple):
    """The fused op of an attention, and its arguments, for explain. A causal mask comes with it."""

    op: str
    args: tuple[fusedops.TensorSpec | float | None, ...]

    @staticmethod
    def of(form: str, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if form == "attention":
            return Call("attention", tuple(map(fusedops.TensorSpec.of, (q, k, v))))
        scores = fusedops.TensorSpec.of(q).replace(shape=(*q.shape[:3], k.shape[2]))
        return Call("scaled_masked_softmax", (scores, None, q.shape[-1] ** -0.5))

    def on(self, device: str, capability: tuple[int, int] | None) -> Call:
        """Return the same call with its tensors on another device."""
        spec = fusedops.TensorSpec
        moved = (x.replace(device=device, capability=capability) if isinstance(x, spec) else x for x in self.args)
        return Call(self.op, tuple(moved))

    def explain(self) -> fusedops.Decision:
        return fusedops.explain(self.op, *self.args, causal=True)


def report_backends() -> None:
    title("1. The backends of this machine")
    show("backend     state        devices      reason and fix")
    for info in fusedops.backends():
        devices = ", ".join(info.device_types).replace("*", "any device")
        show(f"{info.name:10}  {info.state:11}  {devices:10}   {'; '.join(filter(None, (info.why, info.fix))) or '-'}")


def report_training_call(call: Call) -> None:
    title("2. The backends selected in training")
    show(call.explain())
    q = call.args[0]
    assert isinstance(q, fusedops.TensorSpec)
    x = q.replace(shape=(BATCH, q.shape[2], SIZES["width"]))
    bias = x.replace(shape=(SIZES["width"],))
    for decision in (fusedops.explain("bias_gelu", x, bias), fusedops.explain("bias_dropout_add", x, bias, x, 0.1)):
        print(str(decision).partition("\n")[0])


def report_other_devices(call: Call) -> None:
    title("3. The same call on an H200 and on an Ascend 910B")
    print("NVIDIA H200:")
    show(call.on("cuda", (9, 0)).explain())
    print("\nAscend 910B:")
    show(call.on("npu", None).explain())


def report_fallback(q: Tensor) -> None:
    title(f"4. Fallbacks: the softmax of a text of {REFUSED_LENGTH} characters, which Ascend refuses")
    short = torch.randn(*q.shape[:2], REFUSED_LENGTH, q.shape[3], device=q.device)
    call = Call.of("softmax", short, short, short)
    print("Ascend 910B:")
    show(call.on("npu", None).explain())

    scores = torch.randn(*q.shape[:2], REFUSED_LENGTH, REFUSED_LENGTH, device=q.device)
    preferred = "triton" if q.device.type == "npu" else "npu"  # a backend that refuses the call on this machine
    print(f'\nThis machine, with fusedops.use("{preferred}"): another backend is selected, with the warning')
    with warnings.catch_warnings(record=True) as caught, fusedops.use(preferred, fallback="warn"):
        warnings.simplefilter("always")
        fusedops.scaled_masked_softmax(scores, None, causal=True)
    for warning in caught:
        show(f"  {warning.category.__name__}: {warning.message}")

    print(f'\nThis machine, with fusedops.use("{preferred}", fallback="raise"): no backend is selected, with the error')
    try:
        with fusedops.use(preferred, fallback="raise"):
            fusedops.scaled_masked_softmax(scores, None, causal=True)
    except fusedops.NoBackendError as error:
        show(textwrap.indent(f"NoBackendError: {error}", "  "))


def report_losses(fused: Trainee, plain: Trainee, plays: Plays, options: argparse.Namespace) -> None:
    title("5. Loss of fusedops and plain torch: same seed, same batches")
    print(f"{'':24}{'fusedops':>9} {'plain torch':>12} {'difference':>11}")

    def row(name: str, ours: float, theirs: float) -> None:
        print(f"{name:24}{ours:9.4f} {theirs:12.4f} {abs(ours - theirs):11.1e}")

    steps = len(fused.losses)
    for step in sorted({1, max(1, steps // 2), steps}):
        row(f"step {step}", fused.losses[step - 1], plain.losses[step - 1])
    for trainee in (fused, plain):
        trainee.model.eval()
    for length in (options.block, REFUSED_LENGTH):
        batches = [plays.batch(plays.validation, 16, length) for _ in range(4)]
        with torch.no_grad():
            ours, theirs = (statistics.fmean(loss_of(t.model, *b).item() for b in batches) for t in (fused, plain))
        row(f"unseen text, length {length}", ours, theirs)

    for trainee in (fused, plain):
        trainee.model.train()
    differences = [abs(ours - theirs) for ours, theirs in zip(fused.losses, plain.losses)]
    largest = max(differences)
    if largest:
        print(f"Largest difference of a training step: {largest:.1e}, at step {differences.index(largest) + 1}.")
        show("The two models round differently in the 7th digit, and the difference grows in training.")
    else:
        print("Largest difference of a training step: 0; every loss agrees to the last bit.")

    options.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{step},{ours!r},{theirs!r}" for step, (ours, theirs) in enumerate(zip(fused.losses, plain.losses), 1)]
    (options.out / "loss.csv").write_text("\n".join(("step,fusedops,plain_torch", *lines, "")))
    written = draw(fused.losses, plain.losses, differences, options.out / "loss.png")
    print(f"Written: {written}loss.csv in {options.out}")


def draw(
    fused: list[float],
    plain: list[float],
    differences: list[float],
    file: Path,
    heading: str = "The same GPT, seed and batches",
    unit: str = "nats per character",
    other: str = "plain torch",
) -> str:
    """Draw the losses and their differences. Return the file's name for a list; without matplotlib, print its fix."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"{file.name} is left out: matplotlib is not installed; to fix: pip install matplotlib")
        return ""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(fused) + 1)
    above.plot(steps, plain, color="#f2a541", linewidth=4, label=other)  # wide, visible below the other line
    above.plot(steps, fused, color="#1b4965", linewidth=1, label="fusedops")
    above.set(title=heading, ylabel=f"training loss ({unit})")
    above.legend()
    below.plot(steps, differences, ".", color="#1b4965", markersize=3)
    below.set_yscale("symlog", linthresh=1e-7)  # logarithmic, linear near 0; 1e-7 is the last digit of float32
    below.set(xlabel="step", ylabel="difference", ylim=(-2e-8, max(1e-6, 2 * max(differences))))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return f"{file.name} and "


def report_times(
    fused: Trainee, plain: Trainee, plays: Plays, options: argparse.Namespace, call: tuple[Tensor, Tensor, Tensor]
) -> None:
    title("6. Time: medians, measured in turns; dropout with different random numbers")
    print(f"{'':28}{'fusedops':>9} {'plain torch':>12} {'plain / fusedops':>17}")

    def row(name: str, *seconds: list[float]) -> None:
        ours, theirs = (1000 * statistics.median(s[len(s) // 10 :]) for s in seconds)  # the first tenth is warm-up
        print(f"{name:28}{ours:6.2f} ms {theirs:9.2f} ms {theirs / ours:17.2f}")

    steps = min(TIMED_STEPS, max(PROBED_STEPS, len(fused.losses) // 10), options.steps)  # fewer on a slow machine
    for trainee in (fused, plain):
        trainee.seconds.clear()
    for step in range(steps):
        batch = plays.batch(plays.training, BATCH, options.block)
        for trainee in (fused, plain) if step % 2 else (plain, fused):
            trainee.step(*batch, rate=0.0, seed=None)
    row("a training step", fused.seconds, plain.seconds)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(50):
        for ops, seconds in zip(FORMS[options.attention], times):
            seconds.append(attention_seconds(ops, *call))
    row("attention, both directions", *times)


def attention_seconds(ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> float:
    q, k, v = (each.clone().requires_grad_() for each in (q, k, v))
    wait_for(q.device)
    started = time.perf_counter()
    ops.attention(q, k, v).backward(v.detach())  # the values of the gradient do not matter
    wait_for(q.device)
    return time.perf_counter() - started


def report_text(model: GPT, plays: Plays, block: int, length: int = 400) -> None:
    title("7. Generated text, starting with Hamlet's name")
    model.eval()
    text = torch.tensor([[plays.characters.index(character) for character in "Ham.\n"]])
    with torch.no_grad():
        for _ in range(length):
            scores = model(text[:, -block:].to(plays.device))[:, -1].cpu()
            next_character = torch.multinomial(torch.softmax(scores / 0.7, dim=-1), 1, generator=plays.random)
            text = torch.cat((text, next_character), dim=1)
    show(textwrap.indent("".join(plays.characters[number] for number in text[0].tolist()), "  "))


def report_next(out: Path) -> None:
    title("8. What to try next")
    beside = os.path.relpath(sys.executable)
    python = "python" if beside.startswith(os.pardir) else beside  # .venv/bin/python, of `make demo`
    if (out / "loss.png").exists():
        print(f"The plot of the losses        {out / 'loss.png'}")
    print(f"A Llama: norms, rope, SwiGLU  {python} examples/train_llama.py")
    print(f"Experts with a router         {python} examples/train_moe.py")
    print("A pretrained chat model       make chat")
    print(f"Who serves a call of yours    {python} -m fusedops explain rms_norm --x 8,512,4096@cuda")
    print(f"Problems of this machine      {python} -m fusedops doctor")
    print(f"The speed of each op          {python} -m fusedops bench")
    print("In your program               docs/start.md, docs/transformers.md, docs/megatron.md")


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def show(text: object) -> None:
    """Print each line, wrapped to the terminal. Wrapped parts are indented to the last column of the line."""
    width = min(shutil.get_terminal_size((96, 24)).columns, 100)
    for line in str(text).splitlines():
        column = max((gap.end() for gap in re.finditer(r"^ *|\S  +", line)), default=0)
        print(textwrap.fill(line, width, subsequent_indent=" " * column, break_on_hyphens=False))


if __name__ == "__main__":
    main()
