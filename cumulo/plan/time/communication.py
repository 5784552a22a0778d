"""What a training step communicates, stated once, as data: the collectives of each layer, the messages between
stages, and what data-parallel ranks exchange.

Everybody else folds over it: seconds in `chunks` and `data_parallel`, bytes in `step`, single collectives in
`phases`, messages on a fabric in `step_traffic`.

Symbols of the data-parallel part: P parameters of a rank before sharing, w and g bytes of a weight and a
gradient.

    ZeRO-0      all-reduce of g·P once
    ZeRO-1, 2   reduce-scatter of g·P and all-gather of w·P once
    ZeRO-3      for each micro-batch, two all-gathers of w·P and a reduce-scatter of g·P
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory.states import Elements, adapter_elements, heaviest_stage
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.spec.model import MoESpec


def exchanged_s(stream_bytes: float, moe: MoESpec, network: Network, ranks: int, stride: int) -> float:
    """Seconds in which each rank's tokens reach their experts where a token travels once to each domain that
    wants it, and there once to each rank."""
    group = network.group(ranks, stride)
    reach = group.reach
    near_bytes = stream_bytes * distinct(reach.ranks, moe)
    near_s = collective_s("all_to_all", near_bytes, network.group(reach.per_domain, stride))
    if reach.domains == 1:
        return near_s
    return max(near_s, collective_s("all_to_all", stream_bytes * distinct(reach.domains, moe), group))


def distinct(places: int, moe: MoESpec) -> float:
    """Of the places that experts are spread over, how many a token's experts are in, if routing is even: k
    choices of n places name n·(1 − (1 − 1/n)^k) different ones. Limited to t of G groups (DeepSeek-AI 2024,
    section 2.1.2), the choices are among the n·(1 − C(G − G/n, t)/C(G, t)) places that have such a group."""
    able = float(places)
    if moe.top_groups < moe.groups and moe.groups % places == 0:
        others = moe.groups - moe.groups // places
        able *= 1 - math.comb(others, moe.top_groups) / math.comb(moe.groups, moe.top_groups)
    return able * (1 - (1 - 1 / able) ** moe.experts_per_token)


ATTENTION, FEED_FORWARD = "attention", "feed-forward"  # the blocks of a layer


class CommunicationCall(NamedTuple):
    """One collective as one rank takes part in it, and how often in each pass of one micro-batch."""

    place: str  # the block of a layer, or what travels
    axis: str
    collective: Kind
    ranks: int
    stride: int  # GPUs from one member to the next
    size_bytes: float  # of the buffer, as nccl-tests counts
    forward: int = 0
    backward: int = 0
    again: int = 0  # in what backward computes again
    # Tokens that travel once to each rank that wants them: their bytes, and who wants them.
    once: tuple[float, MoESpec] | None = None

    @property
    def sent_bytes(self) -> float:
        """By one rank in one call."""
        return self.size_bytes * busbw_factor(self.collective, self.ranks)

    def seconds(self, network: Network, pieces: int = 1) -> float:
        """Of one call, or of one of the pieces that it is made in."""
        if self.once is not None:
            return exchanged_s(*self.once, network, self.ranks, self.stride)
        return collective_s(self.collective, self.size_bytes / pieces, network.group(self.ranks, self.stride))


def layer_calls(job: TrainJob, has_experts: bool) -> tuple[CommunicationCall, ...]:
    """The calls of one layer and one micro-batch."""
    found = [*_tensor_calls(job, has_experts), *_context_calls(job)]
    if has_experts:
        found += _expert_calls(job)
    if job.recompute == "full":
        return tuple(call._replace(again=call.forward) for call in found)
    return tuple(found)


def _tensor_calls(job: TrainJob, has_experts: bool) -> Iterator[CommunicationCall]:
    ranks, stride = job.axes["tp"]
    if ranks == 1:
        return
    size = float(job.stream_bytes)
    for block in (ATTENTION, FEED_FORWARD):
        mixed = has_experts and block == FEED_FORWARD
        if mixed and job.whole_experts:  # no block of slices
            continue
        if not job.layout.sequence_parallel:
            yield CommunicationCall(block, "tp", "all_reduce", ranks, stride, size, 1, 1)
            continue
        # A norm that is computed again gathers again. One before experts feeds the router, too, and is kept.
        again = int("norm" in job.recomputed_operations and not mixed)
        yield CommunicationCall(block, "tp", "all_gather", ranks, stride, size, 1, 1, again)
        yield CommunicationCall(block, "tp", "reduce_scatter", ranks, stride, size, 1, 1)


def _context_calls(job: TrainJob) -> Iterator[CommunicationCall]:
    """A ring passes keys and values on; in backward it brings them again and takes their gradients along."""
    ranks, stride = job.axes["cp"]
    if ranks == 1:
        return
    steps = ranks - 1
    again = steps if "attention" in job.recomputed_operations else 0
    size = job.key_value_bytes / job.layout.tp
    yield CommunicationCall(ATTENTION, "cp", "send_recv", ranks, stride, size, steps, 2 * steps, again)


def _expert_calls(job: TrainJob) -> Iterator[CommunicationCall]:
    """Tokens reach their experts and come back."""
    (ranks, stride), moe = job.axes["ep"], job.model.moe
    if ranks == 1 or moe is None:
        return
    own = job.stream_bytes / (job.layout.tp if job.layout.sequence_parallel else 1)
    once = job.expert_exchange == "once"
    size = own * (distinct(ranks, moe) if once else moe.experts_per_token)
    yield CommunicationCall(
        FEED_FORWARD, "ep", "all_to_all", ranks, stride, size, 2, 2, once=(own, moe) if once else None
    )


def stage_layers(job: TrainJob) -> dict[bool, int]:
    """Layers of an average stage without and with experts, in whole ones."""
    layers = -(-job.model.layers // job.layout.pp)
    return {
        has_experts: max(1, round(layers * count / job.model.layers))
        for has_experts, count in layer_counts(job).items()
    }


def layer_counts(job: TrainJob) -> dict[bool, int]:
    """Layers of the model without and with experts."""
    counts = (sum(found) for found in zip(*job.chunk_kinds, strict=True))
    return {bool(kind): count for kind, count in enumerate(counts) if count}


def recomputed_share(job: TrainJob) -> float:
    """Of the layers, those that communicate again where `again` says so."""
    if job.recompute_layers is None:
        return 1.0
    return sum(min(job.recompute_layers, layers) for layers in job.chunk_layers) / job.model.layers


def message_call(job: TrainJob) -> CommunicationCall | None:
    """What a stage in the middle sends for one micro-batch: an activation on and a gradient back for each chunk.
    Tensor-parallel ranks each send their part and gather on the other side (Narayanan et al. 2021, section
    4.1)."""
    ranks, stride = job.axes["pp"]
    if ranks == 1:
        return None
    size, times = job.stream_bytes / job.layout.tp, job.chunks_per_stage
    return CommunicationCall("between stages", "pp", "send_recv", 2, stride, size, times, times)


class DataExchange(NamedTuple):
    """Parameters that the same data-parallel ranks share out, and the collectives for them: for each micro-batch
    with ZeRO-3, else for each step."""

    parameters: float
    calls: tuple[CommunicationCall, ...]

    def pieces(self, job: TrainJob, bucket_bytes: float) -> int:
        """In which each call is made: buckets of gradients, or layers."""
        if bucket_bytes:
            return math.ceil(self.parameters * DTYPE_BYTES[job.gradient_dtype] / bucket_bytes)
        return -(-job.model.layers // job.layout.pp)


def data_exchanges(job: TrainJob, trained: Elements | None = None) -> Iterator[DataExchange]:
    """The exchanges of the stage that has most parameters; `trained`: its `trained_elements`, where they are
    known."""
    gradient, weight = DTYPE_BYTES[job.gradient_dtype], job.weight_bytes_each
    for name, count, ranks, stride, copies in _data_groups(job, trained or trained_elements(job)):
        size = count * gradient
        if job.layout.zero == 0:
            yield DataExchange(
                count,
                (CommunicationCall(f"gradients{name}", "dp", "all_reduce", ranks, stride, size, 0, 1),),
            )
            continue
        calls = [CommunicationCall(f"gradients{name}", "dp", "reduce_scatter", ranks, stride, size, 0, 1)]
        if copies > 1:  # hybrid: shared inside, summed over the copies
            apart, share = stride * ranks, size / ranks
            calls.append(
                CommunicationCall(f"gradients{name}", "dp", "all_reduce", copies, apart, share, 0, 1)
            )
        calls.append(_gather(job, f"weights{name}", ranks, stride, count * weight))
        yield DataExchange(count, tuple(calls))
    if job.layout.zero == 3 and job.lora_rank is not None:  # frozen weights are shared out, too
        for name, count, ranks, stride, _ in _data_groups(job, heaviest_stage(job)):
            held = count * job.frozen_bits / 8
            yield DataExchange(count, (_gather(job, f"frozen weights{name}", ranks, stride, held),))


def data_rounds(job: TrainJob) -> int:
    """Times that data-parallel ranks exchange in a step."""
    return job.micro_batches if job.layout.zero == 3 else 1


def trained_elements(job: TrainJob) -> Elements:
    """Parameters with gradients on a rank of the heaviest stage."""
    whole = heaviest_stage(job)
    return whole if job.lora_rank is None else Elements(matrices=adapter_elements(job, whole))


def _gather(job: TrainJob, name: str, ranks: int, stride: int, size: float) -> CommunicationCall:
    backward = int(job.layout.zero == 3)
    return CommunicationCall(name, "dp", "all_gather", ranks, stride, size, 1, backward)


def _data_groups(job: TrainJob, elements: Elements) -> Iterator[tuple[str, float, int, int, int]]:
    """Name, parameters, ranks and stride of what shares them out, and copies of such groups."""
    layout, (all_ranks, stride) = job.layout, job.axes["dp"]
    for name, count, ranks, apart, share in (
        ("", elements.matrices + elements.rest, all_ranks, stride, layout.zero_ranks),
        (
            " of experts",
            elements.experts,
            all_ranks // layout.ep,
            stride * layout.ep,
            layout.expert_zero_ranks,
        ),
    ):
        if count and ranks > 1:
            together = share if layout.zero else ranks
            yield name, float(count), together, apart, ranks // together
