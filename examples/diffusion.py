"""Train a small diffusion transformer on pictures of shapes for two minutes: plain and with fusedops.

    python examples/diffusion.py         # --help lists the options; needs the package diffusers

Two copies of a DiT see the same pictures, in turns: one in plain diffusers, one after `apply`. The report shows their
losses and the time of a step, then a step of a block of Flux at its real width. Samples are written to examples/out/.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import diffusers
import torch
from torch import Tensor
from train_gpt import HERE, title

from fusedops.integrations.diffusers import apply

SIDE = 16  # pixels
CLASSES = ("disc", "square", "ring", "cross")
NAMES = ("diffusers", "fusedops")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    plain = dit(options)
    fused = copy.deepcopy(plain)
    print(apply(fused))
    models = dict(zip(NAMES, (plain, fused)))
    losses, times = train(models, options)
    title("Losses")
    for name, values in losses.items():
        first, last = statistics.mean(values[:10]), statistics.mean(values[-10:])
        print(f"{name:10} {first:.4f} in the first steps, {last:.4f} in the last of {len(values)}")
    apart = max(abs(a - b) for a, b in zip(*losses.values()))
    print(f"the largest difference of a step's loss: {apart:.1e}")
    title("Time of a step")
    report({name: values[2:] for name, values in times.items()})
    if options.out is not None:
        draw({name: sample(model, options) for name, model in models.items()}, options.out)
    if options.width:
        title(f"A step of a block of Flux, width {options.width}, {options.tokens} tokens of the picture")
        report(flux(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="of training, of both models together (%(default)s)")
    add("--batch", type=int, default=16, help="pictures of a step (%(default)s)")
    add("--layers", type=int, default=4, help="of the DiT (%(default)s)")
    add("--steps", type=int, default=20, help="of a sample (%(default)s)")
    add("--width", type=int, default=3072, help="of the block of Flux; 0: leave it out (%(default)s)")
    add("--tokens", type=int, default=128, help="of the block of Flux (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the pictures (%(default)s)")
    add("--out", type=Path, default=HERE / "out", help="folder for diffusion.png (examples/out)")
    return parser.parse_args(arguments)


def dit(options: argparse.Namespace) -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=1,
        num_layers=options.layers,
        sample_size=SIDE,
        num_embeds_ada_norm=1000,
    )


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures of shapes, (count, 1, SIDE, SIDE) from -1 to 1, and their classes."""
    kinds = torch.randint(len(CLASSES), (count,), generator=generator)
    centre = SIDE / 2 + 2 * torch.randn(2, count, 1, 1, generator=generator)
    size = 3 + 2 * torch.rand(count, 1, 1, generator=generator)
    at = torch.arange(SIDE) + 0.5
    x, y = (at[None, None, :] - centre[0]).abs(), (at[None, :, None] - centre[1]).abs()
    distance = (x**2 + y**2).sqrt()
    shapes = [distance < size, torch.maximum(x, y) < size, (distance - size).abs() < 1.2, torch.minimum(x, y) < 1.2]
    drawn = torch.stack([each.float() for each in shapes])[kinds, torch.arange(count)]
    return (2 * drawn - 1)[:, None], kinds


def noised(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures on the way to noise (a rectified flow), the time, and the direction that the model learns."""
    at = torch.rand(len(images), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    weight = at[:, None, None, None]
    return (1 - weight) * images + weight * noise, (at * 999).long(), noise - images


def train(models: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(options.seed)
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds or len(times["fusedops"]) < 4:
        images, kinds = pictures(options.batch, generator)
        given, at, direction = noised(images, generator)
        turn = list(models) if len(times["fusedops"]) % 2 else list(reversed(models))
        for name in turn:
            torch.manual_seed(len(times[name]))  # classes are dropped at random
            started = time.perf_counter()
            velocity = models[name](given, at, kinds).sample[:, :1]
            loss = (velocity - direction).square().mean()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(time.perf_counter() - started)
            losses[name].append(float(loss.detach()))
    return losses, times


@torch.no_grad()
def sample(model: Any, options: argparse.Namespace) -> Tensor:
    """Two pictures of each class, from the same noise for each model."""
    model.eval()
    kinds = torch.arange(len(CLASSES)).repeat(2)
    x = torch.randn(len(kinds), 1, SIDE, SIDE, generator=torch.Generator().manual_seed(options.seed))
    for step in range(options.steps):
        at = 1 - step / options.steps
        velocity = model(x, torch.full((len(kinds),), int(at * 999)), kinds).sample[:, :1]
        x = x - velocity / options.steps
    return x.clamp(-1, 1)


def draw(samples: dict[str, Tensor], folder: Path) -> None:
    """Write the samples of each model in rows as a picture."""
    from PIL import Image

    rows = [torch.cat(list(each[:, 0]), -1) for each in samples.values()]
    pixels = ((torch.cat(rows) + 1) * 127.5).byte().repeat_interleave(8, 0).repeat_interleave(8, 1)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.numpy()).save(folder / "diffusion.png")
    print(f"\nsamples ({', '.join(samples)}, one row each): {folder / 'diffusion.png'}")


def flux(options: argparse.Namespace) -> dict[str, list[float]]:
    """The times of forward and backward of a block of Flux, plain and applied, in turns."""
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed, FluxTransformerBlock

    width, head = options.width, 128 if options.width % 128 == 0 else 16
    plain = FluxTransformerBlock(width, width // head, head)
    fused = copy.deepcopy(plain)
    print(apply(fused))
    text = 64
    x, y = torch.randn(1, options.tokens, width), torch.randn(1, text, width)
    axes = (head // 8, head // 16 * 7, head // 16 * 7)
    rotary = FluxPosEmbed(10000, axes)(torch.arange(3.0 * (options.tokens + text)).view(-1, 3))
    inputs = {"hidden_states": x, "encoder_hidden_states": y, "temb": torch.randn(1, width), "image_rotary_emb": rotary}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(3):
        for name, block in zip(NAMES, (plain, fused)):
            started = time.perf_counter()
            torch.stack([each.sum() for each in block(**inputs)]).sum().backward()
            block.zero_grad()
            times[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in times.items()}


def report(times: dict[str, list[float]]) -> None:
    for name, values in times.items():
        print(f"{name:10} {statistics.median(values) * 1e3:8.1f} ms")
    ratio = statistics.median(b / a for a, b in zip(*times.values()))
    print(f"fusedops takes {ratio:.2f} of the time of plain diffusers, the median of {len(values)} turns")


if __name__ == "__main__":
    main()
