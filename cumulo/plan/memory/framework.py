"""What a framework needs beside a job's own tensors: buffers, its allocator's fragments, its context. The ledger
asks.

DeepSpeed's, with a pipeline: 16-bit gradients are kept beside the float32 sums (BF16_Optimizer; float16 is summed
as it comes), the gradients of the shard that a rank updates are copied to float32, two buckets of 5e8 elements
travel (`reduce_bucket_size`, `allgather_bucket_size`), and a stage keeps its outputs until backward. CUDA 11 loaded
all kernels at start, 1,573 MiB on an A100 (BigScience, chronicles-prequel.md).
"""

from dataclasses import dataclass

from cumulo.base.quantities import MIB
from cumulo.plan.job import TrainJob
from cumulo.plan.time.efficiency import shipped_efficiency

_BUCKETS, _BUCKET_ELEMENTS = 2, 500_000_000
# Of all it hands out, what the allocator of 2022 held beside it under DeepSpeed: fitted to 14 figures in float16
# of BLOOM's trials; the 17 in bfloat16 were seen, not fitted (docs/plan-memory.md).
_DEEPSPEED_FRAGMENTS = 0.155
_FRAGMENTS = 0.03  # of what is allocated and freed again in a step


@dataclass(frozen=True, slots=True)
class FrameworkMemory:
    gradients: int = 0  # beside those that are summed
    buffers: int = 0
    fragment_share: float = _FRAGMENTS  # of what is allocated and freed again
    fragment_share_of_states: float = 0.0
    context: int = 700 * MIB
    communicator: int = 200 * MIB  # of each kind of group a rank is in
    more_groups: int = 0


_PLAIN = FrameworkMemory()


def framework_memory(job: TrainJob, parameters: int, updated: int, live: int) -> FrameworkMemory:
    """`parameters` of a rank, of which it updates some; `live`: micro-batches that its stage keeps at once."""
    if not runs_deepspeed(job.software):
        return _PLAIN
    each = job.weight_bytes_each
    beside = each * parameters if job.dtype == "bfloat16" and job.gradient_dtype == "float32" else 0
    outputs = live * job.stream_bytes
    return FrameworkMemory(
        gradients=beside,
        buffers=_BUCKETS * _BUCKET_ELEMENTS * each + 4 * updated + (outputs if job.layout.pp > 1 else 0),
        fragment_share=_DEEPSPEED_FRAGMENTS,
        fragment_share_of_states=_DEEPSPEED_FRAGMENTS,
        context=1573 * MIB,
        communicator=300 * MIB,
        more_groups=2,  # of all model-parallel ranks, and of both ends of the pipeline
    )


def runs_deepspeed(software: str) -> bool:
    traits = shipped_efficiency().software.get(software)
    return traits is not None and traits.deepspeed_collectives
