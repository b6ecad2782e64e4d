"""``fusedops try``: what ``apply`` gives for a model on this machine."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedops._cli.arguments import count, floating_dtype, seconds, usable_device
from fusedops._cli.output import print_json, print_text
from fusedops.errors import FusedOpsWarning, InvalidInputError

HELP = "time, memory and results of a transformers model on this machine, plain and with apply"
DESCRIPTION = "The batch is random tokens. For images, sounds or a batch of your own: apply(model).benchmark(batch)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name that transformers loads")
    parser.add_argument("--train", action="store_true", help="training steps; default: forward alone")
    parser.add_argument("--fused-loss", action="store_true", help="with --train: apply(model, fused_loss=True)")
    parser.add_argument("--batch", type=count, default=2, metavar="N", help="sequences; default %(default)s")
    parser.add_argument("--length", type=count, default=128, metavar="N", help="tokens of each; default %(default)s")
    parser.add_argument("--dtype", default="float32", metavar="DTYPE", help="of the model; default %(default)s")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="a torch device; default %(default)s")
    length = "measuring time, about; default %(default)s"
    parser.add_argument("--seconds", type=seconds, default=15.0, metavar="S", help=length)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    device, kind = usable_device(options.device), floating_dtype(options.dtype)
    if options.fused_loss and not options.train:
        raise InvalidInputError("try: got --fused-loss without --train, expected both; to fix: add --train")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FusedOpsWarning)
        try:
            from fusedops.integrations.transformers import apply

            model = _loaded(options.model)
        except ImportError as error:  # its text has the package and the fix
            raise InvalidInputError(f"try: {' '.join(str(error).split())}") from error
        model = model.to(device, kind).train(options.train)
    batch = _batch(model, options)
    applied = apply(model, fused_loss=options.fused_loss)
    measured = applied.benchmark(batch, seconds=options.seconds)
    if options.json:
        print_json({**asdict(measured), "rows": [asdict(row) for row in applied.rows]})
        return 0
    print(applied)
    print()
    print(measured)
    if not applied.ops:
        print_text("nothing is replaced, so the two are the same")
    return 0


def _loaded(name: str) -> Any:
    import transformers

    from fusedops.integrations.transformers import from_gguf

    if name.endswith(".gguf"):
        return from_gguf(name)
    known = Path(name).exists()
    try:
        if not known:
            _reach_the_hub(name)
        library: Any = transformers
        config = library.AutoConfig.from_pretrained(name)
        own = getattr(library, (config.architectures or [""])[0], None)
        return (own or library.AutoModel).from_pretrained(name)
    except (OSError, ValueError) as error:
        fix = (
            "give a folder with config.json and weights" if known else "give a folder, a file.gguf or a name of the Hub"
        )
        first = str(error).splitlines()[0]
        raise InvalidInputError(
            f"try: got {name!r}, expected a model of transformers ({first}); to fix: {fix}"
        ) from error


def _reach_the_hub(name: str) -> None:
    """Raise OSError where the Hub is needed and cannot be reached: transformers tries for half a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except (HfHubHTTPError, ValueError):  # it answers, or has no such name: transformers' own text has more
        return
    except Exception as error:
        raise OSError(f"no connection to the Hub: {error}") from error


def _batch(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    if model.main_input_name != "input_ids":
        raise InvalidInputError(
            f"try: got {type(model).__name__}, which takes {model.main_input_name}, expected a model of tokens; "
            f"to fix: call fusedops.integrations.transformers.apply(model).benchmark(batch) with a batch of your own"
        )
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size, (options.batch, options.length), generator=generator).to(model.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        with torch.no_grad():
            model(**batch)
    except Exception as error:  # of too many tokens, or of an argument that the batch does not have
        raise InvalidInputError(
            f"try: got {type(error).__name__} from {type(model).__name__} for {options.batch} x {options.length} "
            f"tokens ({' '.join(str(error).split())}), expected tokens that it takes; to fix: try another --length, or "
            f"call apply(model).benchmark(batch) with a batch of your own"
        ) from error
    return {**batch, "labels": ids} if options.train else batch
