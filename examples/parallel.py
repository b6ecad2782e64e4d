"""How the demo's GPT is spread over processes, with torch's own means: the fused ops take DTensors like other tensors.

Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each process has some heads of the attention and
some columns of the perceptron. With ``sequence`` what lies between them is cut along the text (Korthikanti et al. 2022,
arXiv:2205.05198).
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
    """Cuts the model's weights over a mesh of one dim, in place; the first process's weights count.

    Everything between the layers is then a DTensor. Call the model and its backward under ``implicit_replication()``:
    it makes a few plain tensors of its own, equal on all processes.

    Args:
        model: its heads, and four times its width, divisible by the number of processes.
        mesh: the processes.
        sequence: also cut the stream between the blocks' halves along the text.

    Raises:
        ValueError: the heads cannot be shared out evenly.
    """
    heads = model.blocks[0].attention.heads
    if heads % mesh.size():
        raise ValueError(f"the model has {heads} heads; needs a number divisible by the {mesh.size()} processes")
    stream = Shard(1) if sequence else Replicate()
    whole = PrepareModuleOutput(output_layouts=stream, desired_output_layouts=Replicate(), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False),
        "norm": whole,
    }
    for place in range(len(model.blocks)):
        block = f"blocks.{place}"
        plan[f"{block}.attention.qkv"] = ColwiseParallel(input_layouts=stream, use_local_output=False)
        plan[f"{block}.norm_2"] = whole
        # of these three only the weights are cut: the block applies them itself, and leaves the biases to the ops.
        # Their results are partial sums, which bias_dropout_add sums up, or scatters along the text
        plan[f"{block}.attention.out"] = RowwiseParallel()
        plan[f"{block}.up"] = ColwiseParallel()
        plan[f"{block}.down"] = RowwiseParallel()
    return distribute_module(parallelize_module(model, mesh, plan), mesh)  # which replicates the other weights
