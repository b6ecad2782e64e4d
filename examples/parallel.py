"""Tensor parallelism for the demo's GPT with torch's own tools. The fused ops support DTensors.

Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each process has some heads of the attention and
some columns of the perceptron. With ``sequence``, the tensors between them are sharded along the text (Korthikanti et
al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from gpt import GPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)


def parallelize(model: GPT, mesh: DeviceMesh, *, sequence: bool = False) -> GPT:
    """Shard the model's weights over a mesh of one dim, in place. The weights of the first process are used.

    All tensors between the layers are then DTensors. Call the model and its backward under ``implicit_replication()``,
    because the model creates a few plain tensors, which are equal on all processes.

    Args:
        model: its heads, and four times its width, are divisible by the number of processes.
        mesh: the processes.
        sequence: also shard the residual stream along the text.

    Raises:
        ValueError: the number of heads is not divisible by the number of processes.
    """
    heads = model.blocks[0].attention.heads
    if heads % mesh.size():
        raise ValueError(f"got {heads} heads, expected a number divisible by the {mesh.size()} processes")
    stream = Shard(1) if sequence else Replicate()
    gather = PrepareModuleOutput(output_layouts=stream, desired_output_layouts=Replicate(), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False),
        "norm": gather,
    }
    for index in range(len(model.blocks)):
        block = f"blocks.{index}"
        plan[f"{block}.attention.qkv"] = ColwiseParallel(input_layouts=stream, use_local_output=False)
        plan[f"{block}.norm_2"] = gather
        # Only the weights of these three are sharded: the block applies them itself, and the ops add the biases. The
        # results are partial sums, which bias_dropout_add reduces, or reduces and scatters along the text.
        plan[f"{block}.attention.out"] = RowwiseParallel()
        plan[f"{block}.up"] = ColwiseParallel()
        plan[f"{block}.down"] = RowwiseParallel()
    return distribute_module(parallelize_module(model, mesh, plan), mesh)  # which replicates the other weights
