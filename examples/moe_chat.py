"""A small mixture of the form of gpt-oss with random weights: its experts in bfloat16, and packed in MXFP4.

    pip install transformers peft
    python examples/moe_chat.py         # --help lists the options

Both models have the same numbers as weights of experts. The report shows the memory of the experts, the time of a
token, and the tokens that differ. Then adapters of the packed experts are trained on four plays of Shakespeare.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py

import torch
from torch import Tensor
from train_gpt import HERE, title

from fusedops.integrations.transformers import apply, quantize

SKIP = ["*_proj", "*lm_head", "*embed_tokens"]  # all but the experts
WEIGHTS = ["experts.gate_up_proj", "experts.down_proj"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    text, (plain, packed) = read(), models(options)
    sizes = [memory(each) for each in (plain, packed)]
    title(f"{options.layers} layers of {options.experts} experts, {options.tokens} tokens after a prompt of 64")
    prompt = text[:64][None]
    (tokens, slow), (_, fast) = (generated(each, prompt, options.tokens) for each in (plain, packed))
    print(f"{'':28}{'bfloat16':>12} {'MXFP4':>12}")
    print(f"{'memory of the experts':28}{sizes[0] / 2**20:8.1f} MiB {sizes[1] / 2**20:8.1f} MiB")
    print(f"{'tokens per second':28}{slow:12.1f} {fast:12.1f}")
    report_tokens(plain, packed, tokens, prompt.shape[1])
    finetune(plain, text, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model (%(default)s)")
    add("--experts", type=int, default=32, help="experts of a layer, of which a token has 4 (%(default)s)")
    add("--width", type=int, default=768, help="of the model and of an expert, a multiple of 64 (%(default)s)")
    add("--tokens", type=int, default=64, help="tokens to generate (%(default)s)")
    add("--steps", type=int, default=10, help="training steps of the adapters (%(default)s)")
    return parser.parse_args(arguments)


def read() -> Tensor:
    """Return the plays as bytes."""
    plays = [file.read_bytes() for file in sorted((HERE / "data").glob("*.txt"))]
    return torch.tensor([byte for play in plays for byte in play])


def models(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model with the numbers of MXFP4 in bfloat16, and with packed experts."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise SystemExit("got no package transformers; to fix: pip install transformers peft") from None
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        num_hidden_layers=options.layers, num_local_experts=options.experts, hidden_size=options.width,
        intermediate_size=options.width, head_dim=64, num_attention_heads=options.width // 64, num_key_value_heads=4,
        vocab_size=128, rope_parameters={"rope_type": "default"}, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    packed = transformers.GptOssForCausalLM(config).bfloat16().eval()
    quantize(packed, skip=SKIP, experts="MXFP4").remove()  # to the numbers of the format
    plain = copy.deepcopy(packed)
    apply(packed), quantize(packed, skip=SKIP, experts="MXFP4")
    return plain, packed


def memory(model: Any) -> int:
    """Return the bytes of all experts."""
    every = [each for each in model.modules() if type(each).__name__ == "GptOssExperts"]
    return sum(each.nbytes for one in every for each in (*one.parameters(), *one.buffers()))


def generated(model: Any, prompt: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the prompt with the most likely tokens after it, and how many of them a second has."""
    options = {"do_sample": False, "eos_token_id": None}
    model.generate(prompt, max_new_tokens=2, **options)
    started = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=count, **options)
    return tokens, count / (time.perf_counter() - started)


@torch.no_grad()
def report_tokens(plain: Any, packed: Any, tokens: Tensor, first: int) -> None:
    """Print how many tokens the packed model would take otherwise, and how near the two logits are there."""
    ours, theirs = (model(input_ids=tokens).logits[0, first - 1 : -1].float() for model in (packed, plain))
    others = ours.argmax(-1) != theirs.argmax(-1)
    gaps = theirs.amax(-1) - theirs.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    print(f"{int(others.sum())} of {len(others)} tokens are other ones, whose logits differ by at most "
          f"{float(gaps.max()):.3f}, of logits up to {float(theirs.abs().max()):.1f}")  # fmt: skip


def finetune(model: Any, text: Tensor, options: argparse.Namespace) -> None:
    """Pack the experts of a model below adapters, and train these."""
    try:
        import peft
    except ModuleNotFoundError:
        print("got no package peft, so no adapters are trained; to fix: pip install peft")
        return
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[], target_parameters=WEIGHTS))
    apply(model), quantize(model, skip=SKIP, experts="MXFP4")  # after PEFT, which wraps weights as they are
    trained = [each for each in model.parameters() if each.requires_grad]
    title(f"Adapters of the packed experts: {sum(each.numel() for each in trained):,} numbers")
    optimizer, losses = torch.optim.AdamW(trained, lr=2e-3), list[float]()
    for step in range(options.steps):
        batch = text[512 * step :][:512].view(4, 128)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last one of {options.steps}")


if __name__ == "__main__":
    main()
