"""The block of docs/comparison.md with the versions of other libraries. A test compares every other page with it."""

from __future__ import annotations

#: By the name that pages use: address, version, when it was read, and what of it.
SOURCES = {
    "Liger-Kernel": (
        "https://github.com/linkedin/Liger-Kernel",
        "0.8.5; sources after 0.8.2, `ead96b61`",
        "November, August 2026",
        "the wheel's functions; README, `ops/`, `transformers/functional.py`",
    ),
    "quack-kernels": ("https://github.com/Dao-AILab/quack", "0.2.4", "November 2026", "the wheel's functions"),
    "flash-attn": ("https://github.com/Dao-AILab/flash-attention", "2.8", "November 2026", "the interfaces"),
    "FlagGems": (
        "https://github.com/flagos-ai/FlagGems",
        "`ed2508bc`",
        "August 2026",
        "README, `docs/content/en`, `ops/`, `fused/`, `runtime/backend/`",
    ),
    "kernels": (
        "https://github.com/huggingface/kernels",
        "0.17.2; sources of `8ac69fc5`",
        "November, August 2026",
        "run; README, `docs/source`",
    ),
    "mojo_opset": ("https://github.com/XPU-Forces/mojo_opset", "`b97e98bf`", "August 2026", "README, `core/`"),
    "vLLM": (
        "https://docs.vllm.ai/en/latest/design/vllm_ir/",
        "documentation of 0.20 to 0.32",
        "November 2026",
        "design/vllm_ir, api/vllm/ir, `vllm/ir/op.py`",
    ),
    "llama-cpp-python": ("https://github.com/abetlen/llama-cpp-python", "0.3.36", "November 2026", "run"),
    "torchao": ("https://github.com/pytorch/ao", "0.18.0", "November 2026", "run"),
    "zentorch": ("https://github.com/amd/ZenDNN-pytorch-plugin", "2.13.0.2", "November 2026", "run"),
    "trl": ("https://github.com/huggingface/trl", "1.16.0", "November 2026", "run; `trainer/`"),
    "peft": ("https://github.com/huggingface/peft", "0.21.2", "November 2026", "run"),
}


def block(_: str = "") -> str:
    """Return the table of the versions."""
    lines = ["| library | version | read | what |", "|---|---|---|---|"]
    for name, (address, version, when, what) in SOURCES.items():
        lines.append(f"| [{name}]({address}) | {version} | {when} | {what} |")
    return "\n".join(lines)
