"""A chat model's tokens per second and memory on this CPU, in several ways, and the time of the parts of a token.

    python -m benchmarks.token_time            # `make chat` installs the model, SmolLM2-135M-Instruct in 4 bits
    python -m benchmarks.token_time --ways plain packed llama.cpp compiled
    python -m benchmarks.token_time --parts    # of the packed weights, with one thread

Each way is a process of its own, and they answer in turns: a ratio is the median of the ratios of the turns. An answer
is the prompt and ``--tokens`` tokens, the most probable ones. ``peak`` is the most memory of the process, without the
tokenizer, and ``beside`` what of it came after the libraries were loaded. llama.cpp needs the package llama-cpp-python;
it rounds the activations to 8 bits, so its tokens may be others.

``--parts`` interrupts answers every 0.7 ms, and counts the line of Python that was running or had called a function of
C: shares of the processor time of a token, whatever other programs do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WAYS = {
    "plain": "transformers, float32",
    "fused": "after apply, float32",
    "packed": "packed weights, after apply",
    "recorded": "the same, with a recorded cache",
    "static": "packed weights, with a static cache",
    "compiled": "the same, with a static cache and torch.compile",
    "llama.cpp": "llama.cpp",
}
Answer = Callable[[int, Any], list[int]]  # of a number of tokens, and a streamer of transformers or None


class _Part(NamedTuple):
    """A part of a token: its name, and the ends of paths and the names of functions that belong to it."""

    name: str
    paths: tuple[str, ...]
    functions: tuple[str, ...] = ()


# the first that fits; a call of a kernel is a line of `run`
PARTS = (
    _Part("fusedops, kernels", ("_dispatch/serve.py",), ("run",)),
    _Part("fusedops, in Python", ("/fusedops/", "<fusedops: a comparison")),
    _Part("fusedops, kernels", ("/fusedops_cpu/", "/fusedops_sdpa/")),
    _Part("transformers, cache", ("transformers/cache_utils.py",)),
    _Part("transformers, generate", ("transformers/generation/",)),
    _Part("transformers, modules", ("transformers/",)),
    _Part("torch.nn.Module", ("torch/nn/modules/module.py",)),
)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["plain", "fused", "packed", "recorded"], choices=WAYS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", action="store_true", help="of a token of the packed weights, with one thread")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples"))
    if options.child:
        serve(**json.loads(options.child))
    elif options.parts:
        print("\n".join(table_of_parts(*parts(options.tokens, options.rounds))))
    else:
        print("\n".join(table(measured(options.ways, options.tokens, options.rounds, options.threads))))


# ---------------------------------------------------------------------------------------- one way, in its own process


def serve(way: str, path: str, prompt: list[int], threads: int) -> None:
    """Answer for each line of stdin, a number of tokens: print a line of JSON."""
    libraries, answer, version = ready(way, path, prompt, threads)
    answer(2, None)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = answer(int(line), None)
        seconds = time.perf_counter() - started
        record = {"tokens": tokens, "seconds": seconds, "peak": _peak(), "libraries": libraries, "version": version}
        print(json.dumps(record), flush=True)


def ready(way: str, path: str, prompt: list[int], threads: int) -> tuple[float, Answer, str]:
    """Return the memory of the libraries, the function that answers, and the version of the library that it is of."""
    if way == "llama.cpp":
        llama_cpp: Any = importlib.import_module("llama_cpp")
        libraries = _peak()
        llama: Any = llama_cpp.Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
        return libraries, lambda tokens, _: of_llama(llama, prompt, tokens), llama_cpp.__version__
    import torch

    import fusedops
    from fusedops.integrations.transformers import apply, from_gguf, recorded_cache

    smollm2: Any = importlib.import_module("smollm2")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    libraries, ids = _peak(), torch.tensor([prompt])
    chat = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model: Any = smollm2.load_model(ids.device) if way in ("plain", "fused") else from_gguf(path)
    if way != "plain":
        apply(model)
    if way in ("static", "compiled"):
        model.generation_config.cache_implementation = "static"
    if way == "compiled":
        model.forward = torch.compile(model.forward)

    recorded = {"past_key_values": recorded_cache(model)} if way == "recorded" else {}

    def answer(tokens: int, streamer: Any) -> list[int]:
        return smollm2.answer(model, chat, tokens, whole=True, streamer=streamer, **recorded)

    return libraries, answer, transformers.__version__ if way == "plain" else fusedops.__version__


def file_and_prompt() -> tuple[str, list[int]]:
    """Return the path of the model's file, and the tokens of the prompt."""
    import torch

    smollm2: Any = importlib.import_module("smollm2")
    chat: Any = smollm2.as_chat(smollm2.load_tokenizer(), smollm2.PROMPT, torch.device("cpu"))
    return f"{smollm2.folder()}/{smollm2.FILE}", chat["input_ids"][0].tolist()


def of_llama(llama: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the most probable tokens after a prompt by llama.cpp."""
    llama.reset()
    made: list[int] = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        made.append(int(token))
        if len(made) == tokens:
            break
    return made


def _peak() -> float:
    """Return the most memory that this process had, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss begins with the memory of the parent
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) * 1024 / 1e6
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024) / 1e6


# --------------------------------------------------------------------------------------------------- ways, in turns


def measured(ways: Sequence[str], tokens: int, rounds: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Return the records of the answers of each way, in turns. A way whose process ends is left out, and named."""
    path, prompt = file_and_prompt()
    children = {way: _Child(way=way, path=path, prompt=prompt, threads=threads) for way in ways}
    records: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first one warms up
        for way in ways if turn % 2 else reversed(ways):
            record = children[way].answer(tokens)
            if record is None:
                print(f"left out: {way}: {children[way].reason()}")
                records.pop(way, None)
                ways = [each for each in ways if each != way]
            elif turn:
                records[way].append(record)
    for child in children.values():
        child.close()
    return records


class _Child:
    """The process of a way."""

    def __init__(self, **arguments: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.token_time", "--child", json.dumps(arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def answer(self, tokens: int) -> dict[str, Any] | None:
        """Return the record of an answer, None where the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(tokens, file=self.process.stdin, flush=True)
            line = next((line for line in self.process.stdout if line.startswith("{")), None)
        except BrokenPipeError:
            return None
        return None if line is None else json.loads(line)

    def reason(self) -> str:
        """Return the last line of what the process wrote about its end."""
        errors = self.process.communicate()[1].strip().splitlines()
        return errors[-1] if errors else f"exit code {self.process.returncode}"

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.communicate()


def table(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a table with a line for each way; ratios are to the first one."""
    first = next(iter(records.values()))
    yield "| way | tokens/s | ratio | peak, MB | ratio | beside, MB | the same tokens |"
    yield "|---|---|---|---|---|---|---|"
    for way, mine in records.items():
        rate = statistics.median(len(each["tokens"]) / each["seconds"] for each in mine)
        ratio = statistics.median(theirs["seconds"] / each["seconds"] for theirs, each in zip(first, mine))
        peak, least = mine[-1]["peak"], first[-1]["peak"]
        beside = peak - mine[-1]["libraries"]
        same = "yes" if mine[-1]["tokens"] == first[-1]["tokens"] else "no"
        name = f"{WAYS[way]} {mine[-1]['version']}" if way == "llama.cpp" else WAYS[way]
        yield f"| {name} | {rate:.1f} | {ratio:.2f} | {peak:.0f} | {peak / least:.2f} | {beside:.0f} | {same} |"
    yield f"\nThe load average is {os.getloadavg()[0]:.1f}."


# ------------------------------------------------------------------------------------------------ the parts of a token


class _Clock:
    """A streamer of generate that counts where Python is at each interruption, from the first token on."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.thread_time())

    def end(self) -> None:
        """Nothing is left to write."""

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        if len(self.times) > 1 and frame is not None:
            self.lines[part_of(frame.f_code.co_filename, frame.f_code.co_name)] += 1


def part_of(path: str, function: str) -> str:
    """Return the part of a token to which a function belongs.

    >>> part_of("/lib/transformers/cache_utils.py", "update")
    'transformers, cache'
    """
    path = path.replace("\\", "/")
    for name, paths, functions in PARTS:
        if any(each in path for each in paths) and (not functions or function in functions):
            return name
    return "other"


def parts(tokens: int, rounds: int) -> tuple[float, Counter[str]]:
    """Return the processor time of a token in ms, and how often each part was running."""
    _, answer, _ = ready("packed", *file_and_prompt(), 1)
    answer(tokens, None)
    lines, times = Counter[str](), list[float]()
    for _ in range(rounds):
        clock = _Clock()
        signal.signal(signal.SIGALRM, clock.interrupted)
        signal.setitimer(signal.ITIMER_REAL, 7e-4, 7.1e-4)
        answer(tokens, clock)
        signal.setitimer(signal.ITIMER_REAL, 0)
        lines += clock.lines
        times += [after - before for before, after in zip(clock.times[2:], clock.times[3:])]
    return statistics.median(times) * 1e3, lines


def table_of_parts(per_token: float, lines: Counter[str]) -> Iterator[str]:
    """Yield a table of the processor time of a token."""
    yield "| part of a token | ms | share |"
    yield "|---|---|---|"
    for name, count in lines.most_common():
        share = count / lines.total()
        yield f"| {name} | {share * per_token:.1f} | {share:.0%} |"
    yield f"| in all | {per_token:.1f} | |"


if __name__ == "__main__":
    main()
