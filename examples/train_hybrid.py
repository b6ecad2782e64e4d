"""Train two small decoders on four plays of Shakespeare: a hybrid, with three layers of gated DeltaNet to one of
attention, as Qwen3.5 has them, and one with attention alone.

    python examples/train_hybrid.py     # --help lists the options

The report shows both losses, the tokens per second of both as they generate, the backend selected for each op, and the
time that a layer of each kind takes for a token after texts of many lengths: the state of gated DeltaNet has one size,
and the keys and values of attention become more. The numbers are written to examples/out/, and drawn where matplotlib
is installed.
"""

from __future__ import annotations

import csv
import os
import statistics
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import torch
from llama import EPS, FUSED, GatedMLP, angles
from torch import Tensor, nn
from train_gpt import BATCH, HERE, Plays, learning_rate, title, wait_for
from train_llama import Trainee, parse, report_backends

import fusedops

WIDTH, HEADS = 96, 6
HYBRID, ATTENTION = "DDDA", "AAAA"  # the kinds of the layers: gated DeltaNet and attention
LENGTHS = (16, 64, 256, 1024, 4096, 16384)
TURNS = 100  # of the times of a token


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments, __doc__, HERE / "out")
    options.out.mkdir(parents=True, exist_ok=True)
    plays = Plays.read(HERE / "data", options.device, options.seed)
    hybrid, attention = (Trainee(partial(Decoder, kinds=kinds), plays, options.seed) for kinds in (HYBRID, ATTENTION))
    sizes = [sum(parameter.numel() for parameter in each.model.parameters()) for each in (hybrid, attention)]
    print(f"A hybrid of {sizes[0]:,} parameters and a decoder with attention alone of {sizes[1]:,}, on {plays.device}: "
          f"{options.steps} steps of {BATCH} x {options.block}")  # fmt: skip
    train(hybrid, attention, plays, options.steps, options.block)
    report_backends(hybrid, plays, options.block)
    report_text(hybrid.model, attention.model, plays)
    report_lengths(plays.device, options.out)


class Attention(nn.Module):
    """Causal attention with rotary positions: (B, S, W) -> (B, S, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, state: Any = None, *, return_state: bool = False) -> Any:
        """Compute the layer; the state is a buffer of keys and values, (2, B, heads, capacity, D), and their number."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        used = 0 if state is None else state[1]
        last = used + x.shape[1]
        cos, sin = (each[used:last] for each in angles(_space(last), WIDTH // HEADS // 2, x.device))
        q, k = fusedops.rotary_embedding(q, k, cos, sin)
        if return_state:
            buffer = _with_space(state, k, used, last)
            buffer[0, :, :, used:last], buffer[1, :, :, used:last] = k, v
            k, v, state = *buffer[..., :last, :], (buffer, last)
        y = self.out(fusedops.attention(q, k, v, causal="lower_right").transpose(1, 2).flatten(-2))
        return (y, state) if return_state else y


def _space(tokens: int) -> int:
    """Return the number of tokens for which there is space: a power of 2, so that it changes rarely."""
    return 1 << (tokens - 1).bit_length()


def _with_space(state: Any, k: Tensor, used: int, last: int) -> Tensor:
    """Return a buffer of keys and values with space for the last token, and with those of the state."""
    if state is not None and last <= state[0].shape[3]:
        return state[0]
    larger = k.new_empty(2, *k.shape[:2], _space(last), k.shape[3])
    if state is not None:
        larger[..., :used, :] = state[0][..., :used, :]
    return larger


def mixer(kind: str) -> nn.Module:
    """Return a layer that mixes tokens."""
    size = WIDTH // HEADS
    return Attention() if kind == "A" else fusedops.nn.GatedDeltaNet(WIDTH, heads=HEADS, key_size=size, value_size=size)


class Block(nn.Module):
    """A layer that mixes tokens, and a gated MLP; each is added to its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mixer, self.feed_forward = mixer(kind), GatedMLP(WIDTH)
        self.mixer_norm, self.feed_forward_norm = (fusedops.nn.RMSNorm(WIDTH, EPS) for _ in range(2))

    def forward(self, x: Tensor, state: Any = None, return_state: bool = False) -> tuple[Tensor, Any]:
        mixed = self.mixer(self.mixer_norm(x), state, return_state=return_state)
        mixed, state = mixed if return_state else (mixed, None)
        normed, x = self.feed_forward_norm(mixed, x)
        return x + self.feed_forward(normed, FUSED), state


class Decoder(nn.Module):
    """Compute the mean loss of predicting each next character: text and the next characters (B, S) int64 -> ().

    Args:
        vocabulary: number of different characters.
        kinds: a letter for each block.
    """

    def __init__(self, vocabulary: int, kinds: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.norm = fusedops.nn.RMSNorm(WIDTH, EPS)
        self.head = nn.Parameter(torch.empty(vocabulary, WIDTH))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.06)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x, _ = block(x)
        return fusedops.linear_cross_entropy(self.norm(x).flatten(0, 1), self.head, following.flatten())

    def next(self, text: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """Return the scores of the character after the text, (B, V), and the states of the blocks."""
        x, after = self.embedding(text), list[Any]()
        for block, state in zip(self.blocks, states):
            x, state = block(x, state, return_state=True)
            after.append(state)
        return self.norm(x[:, -1]) @ self.head.T, after


def train(hybrid: Trainee, attention: Trainee, plays: Plays, steps: int, block: int) -> None:
    """Train both on the same batches."""
    for step in range(steps):
        batch = plays.batch(plays.training, BATCH, block)
        for trainee in (hybrid, attention):
            trainee.step(*batch, learning_rate(step, steps))
        if (step + 1) % max(1, steps // 5) == 0:
            print(f"  step {step + 1}: loss {hybrid.losses[-1]:.4f}, with attention alone {attention.losses[-1]:.4f}")


def report_text(hybrid: Decoder, attention: Decoder, plays: Plays, length: int = 300) -> None:
    title("Generated text, starting with Hamlet's name")
    for name, model in (("the hybrid", hybrid), ("attention alone", attention)):
        text, rate = generate(model.eval(), plays, length)
        print(f"{name}: {rate:.0f} tokens per second\n{textwrap.indent(text, '  ')}\n")


@torch.no_grad()
def generate(model: Decoder, plays: Plays, length: int) -> tuple[str, float]:
    """Return text, and the tokens per second."""
    numbers = [plays.characters.index(character) for character in "Ham.\n"]
    random = torch.Generator().manual_seed(0)
    states: list[Any] = [None] * len(model.blocks)
    new, started = numbers, time.perf_counter()
    for _ in range(length):
        scores, states = model.next(torch.tensor([new], device=plays.device), states)
        new = torch.multinomial(torch.softmax(scores[0].cpu() / 0.7, -1), 1, generator=random).tolist()
        numbers = numbers + new
    return "".join(plays.characters[number] for number in numbers), length / (time.perf_counter() - started)


def report_lengths(device: torch.device, out: Path) -> None:
    """Show, write and draw the time of one token by the tokens before it."""
    title("Microseconds for a token in one layer, after a text of so many tokens: medians")
    found = microseconds(device)
    rows = [(length, found["D", length], found["A", length]) for length in LENGTHS]
    for length, linear, attention in rows:
        print(f"  {length:6}  gated DeltaNet {linear:8.0f}   attention {attention:8.0f}")
    with (out / "hybrid.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("length", "gated_deltanet_us", "attention_us"), *rows])
    print(f"Written: {draw(rows, out / 'hybrid.png')}hybrid.csv in {out}")


@torch.no_grad()
def microseconds(device: torch.device) -> dict[tuple[str, int], float]:
    """Return the time of a token by the kind of its layer and the tokens before it, measured in turns."""
    token = torch.randn(1, 1, WIDTH, device=device)
    layers: dict[tuple[str, int], tuple[nn.Module, Any]] = {}
    for kind in "DA":
        for length in LENGTHS:
            layer = mixer(kind).to(device)
            _, state = layer(torch.randn(1, length, WIDTH, device=device), return_state=True)
            _, state = layer(token, state, return_state=True)  # whose buffer has space for the next one
            layers[kind, length] = layer, state
    times: dict[tuple[str, int], list[float]] = {key: [] for key in layers}
    for _ in range(TURNS):
        for key, (layer, state) in layers.items():
            started = time.perf_counter()
            layer(token, state, return_state=True)
            wait_for(device)
            times[key].append(1e6 * (time.perf_counter() - started))
    return {key: statistics.median(each) for key, each in times.items()}


def draw(rows: Sequence[tuple[float, ...]], file: Path) -> str:
    """Draw the times. Return the file's name for a list; without matplotlib, print its fix."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"{file.name} is left out: matplotlib is not installed; to fix: pip install matplotlib")
        return ""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lengths, linear, attention = zip(*rows)
    axes.plot(lengths, attention, "o-", color="#f2a541", label="attention")
    axes.plot(lengths, linear, "o-", color="#1b4965", label="gated DeltaNet")
    axes.set(
        title="One token in one layer", xlabel="tokens before it", ylabel="microseconds", xscale="log", ylim=(0, None)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return f"{file.name} and "


if __name__ == "__main__":
    main()
