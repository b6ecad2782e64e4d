"""Teach SmolLM2, a model of 135 million parameters, to prefer answers: DPO with plain torch and with fusedops.

    python examples/preference.py         # `make preference` installs what it needs; --help lists the options

The pairs are made up: a prompt is some lines of Shakespeare, the chosen answer is what follows, and the rejected one is
what follows elsewhere. Two copies of the model see the same pairs, in turns. One computes the log probabilities of the
answers by `linear_log_probs` from the last layer's input, the other by log_softmax and gather from the logits. The
report shows their losses, the share of pairs whose chosen answer is preferred, and the time and memory of a step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from finetune import HERE, Trainee, peak_bytes
from smollm2 import load
from torch import Tensor
from torch.nn.functional import logsigmoid
from train_gpt import title

import fusedops
from fusedops.losses import dpo_loss

BETA, LEARNING_RATE = 0.1, 5e-6
NAMES = ("fusedops", "torch")

#: Returns the log probabilities of the answers, (n, answer), from a model, (n, length) tokens and the answers' length.
LogProbs = Callable[[Any, Tensor, int], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    tokenizer, model = load(options.device)
    pairs = make_pairs(tokenizer, options)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"Two models of {size:,} parameters: {options.pairs} pairs, {options.batch} a step, {options.epochs} times")
    print(f"A sequence has {options.prompt} tokens of a prompt and {options.answer} of an answer.\n")
    fused = Learner(copy.deepcopy(model), pairs, options.answer, by_op, dpo_loss)
    plain = Learner(model, pairs, options.answer, by_logits, plain_loss)
    train(fused, plain, options)
    report_costs(fused, plain, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pairs", type=int, default=32, help="pairs of answers (%(default)s)")
    add("--batch", type=int, default=4, help="pairs of a step (%(default)s)")
    add("--epochs", type=int, default=2, help="times that each pair is seen (%(default)s)")
    add("--prompt", type=int, default=32, help="tokens of a prompt (%(default)s)")
    add("--answer", type=int, default=64, help="tokens of an answer (%(default)s)")
    add("--seed", type=int, default=1, help="of the choice of the pairs (%(default)s)")
    add("--device", type=torch.device, default="cpu", help="where to train (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.batch, options.epochs, options.prompt, options.answer) < 1 or options.pairs < options.batch:
        parser.error("--batch, --epochs, --prompt and --answer must be at least 1, --pairs at least --batch")
    return options


def make_pairs(tokenizer: Any, options: argparse.Namespace) -> Tensor:
    """Return tokens (2, pairs, prompt + answer): the chosen sequences, and the rejected ones with the same prompts."""
    plays = [file.read_text(encoding="ascii") for file in sorted((HERE / "data").glob("*.txt"))]
    tokens = torch.tensor([token for play in plays for token in tokenizer(play)["input_ids"]])
    length = options.prompt + options.answer
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(options.seed))
    chosen, elsewhere = pieces[order[: 2 * options.pairs]].chunk(2)
    rejected = torch.cat([chosen[:, : options.prompt], elsewhere[:, options.prompt :]], 1)
    return torch.stack([chosen, rejected]).to(options.device)


def by_op(model: Any, ids: Tensor, answer: int) -> Tensor:
    """Return the log probabilities from the input of the last layer: the logits never exist at once."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -answer - 1 : -1]
    head = model.get_output_embeddings()
    return fusedops.linear_log_probs(hidden, head.weight, ids[:, -answer:], head.bias)


def by_logits(model: Any, ids: Tensor, answer: int) -> Tensor:
    """Return the log probabilities from the logits, of the answers alone."""
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=answer + 1).logits[:, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, -answer:, None])[..., 0]


def plain_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """Compute the loss of DPO."""
    return -logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


class Learner(Trainee):
    """A model that learns preferences. A batch is the numbers of its pairs.

    Args:
        model: a causal language model.
        pairs: (2, pairs, length) tokens.
        answer: tokens of an answer.
        log_probs: see :data:`LogProbs`.
        loss: of the four sums of log probabilities, each (n,).
    """

    def __init__(
        self, model: Any, pairs: Tensor, answer: int, log_probs: LogProbs, loss: Callable[..., Tensor]
    ) -> None:
        super().__init__(model)
        self.pairs, self.answer, self.log_probs, self.loss = pairs, answer, log_probs, loss
        with torch.no_grad():  # of the model before it learns: the reference
            self.reference = torch.cat([self.sums(at) for at in torch.arange(pairs.shape[1]).split(4)], 1)

    def sums(self, at: Tensor) -> Tensor:
        """Return the sums of the log probabilities of the chosen and the rejected answers: (2, n)."""
        ids = self.pairs[:, at.to(self.pairs.device)].flatten(0, 1)
        return self.log_probs(self.model, ids, self.answer).sum(-1).view(2, -1)

    def backward(self, ids: Tensor) -> Tensor:
        """Return the loss of pairs, and add its gradients."""
        loss = self.loss(*self.sums(ids), *self.reference[:, ids], beta=BETA)
        loss.backward()
        return loss

    def preferred(self) -> float:
        """Return the share of pairs of which the chosen answer gained more than the rejected one."""
        with torch.no_grad():
            gains = torch.cat([self.sums(at) for at in torch.arange(self.pairs.shape[1]).split(4)], 1) - self.reference
        return (gains[0] > gains[1]).float().mean().item()


def train(fused: Learner, plain: Learner, options: argparse.Namespace) -> None:
    """Train both on the same pairs, and print the losses beside each other."""
    print(f"{'':24}{NAMES[0]:>12} {NAMES[1]:>12} {'difference':>11}")
    generator = torch.Generator().manual_seed(options.seed)
    step = 0
    for _ in range(options.epochs):
        for at in torch.randperm(options.pairs, generator=generator).split(options.batch):
            # the order alternates, so that other programs on the machine slow both models equally
            for learner in (fused, plain) if step % 2 else (plain, fused):
                learner.step(at, LEARNING_RATE)
            step += 1
            ours, theirs = fused.losses[-1], plain.losses[-1]
            print(f"{f'step {step}':24}{ours:12.5f} {theirs:12.5f} {abs(ours - theirs):11.1e}", flush=True)
    differences = [abs(ours - theirs) for ours, theirs in zip(fused.losses, plain.losses)]
    print(f"Largest difference of a step's loss: {max(differences):.1e}")
    print(f"Pairs of which the chosen answer is preferred: {fused.preferred():.0%} and {plain.preferred():.0%}")


def report_costs(fused: Learner, plain: Learner, options: argparse.Namespace) -> None:
    title("Time and memory of a step of DPO; the times are medians of the training, in turns")
    print(f"{'':40}{NAMES[0]:>12} {NAMES[1]:>12} {f'{NAMES[0]} / {NAMES[1]}':>24}")
    late = [each.seconds[1:] or each.seconds for each in (fused, plain)]  # the first step is warm-up
    seconds = [statistics.median(each) for each in late]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*late))
    print(f"{'time':40}{seconds[0]:10.2f} s {seconds[1]:10.2f} s {ratio:24.2f}")
    at = torch.arange(options.batch)
    rows: list[tuple[str, Callable[[Learner], Any]]] = [
        ("peak of the sums without gradients", without_gradients(at)),
        ("peak of forward and backward", lambda each: each.backward(at)),
    ]
    for what, run in rows:
        peaks: list[float] = []
        for learner in (fused, plain):
            learner.optimizer.zero_grad()
            device = learner.pairs.device
            peaks.append(peak_bytes(lambda run=run, learner=learner: run(learner), device) / 2**20)
        print(f"{what:40}{peaks[0]:8.0f} MiB {peaks[1]:8.0f} MiB {peaks[0] / peaks[1]:24.2f}")
    print("Peaks are beside the weights and AdamW's state; that of both directions has the gradients of all weights.")


def without_gradients(at: Tensor) -> Callable[[Learner], Tensor]:
    """Return the computation of the sums of some pairs, without gradients."""

    @torch.no_grad()
    def run(learner: Learner) -> Tensor:
        return learner.sums(at)

    return run


if __name__ == "__main__":
    main()
