"""What offloading to the host's memory costs a step. Search, `why` and reports time plans with `plan_time`.

Symbols: P parameters that a rank updates, w and g bytes of a weight and a gradient, o of the optimizer's states for
a parameter, H the rate between a device and its host, M a device's share of its host's memory bandwidth.

    optimizer     g P / H down, (2 o + g) P / M for the step itself, w P / H back: nothing is hidden
    activations   what each micro-batch keeps, down in forward and back in backward, each behind the arithmetic
"""

from dataclasses import replace

from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory.ledger import Interval, TrainEstimate
from cumulo.plan.memory.peak import chunk_activation_bytes
from cumulo.plan.memory.states import heaviest_stage, state_bytes, updated_elements
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.step import estimate
from cumulo.spec.cluster import Cluster

# Of a node: two sockets of eight DDR5-4800 channels each, as the catalogue's cpu has them.
HOST_MEMORY_BYTES_PER_S = 2 * 307.2e9


def plan_time(
    job: TrainJob, cluster: Cluster, profile: Profile | None = None, explain: bool = True
) -> TrainEstimate:
    """The cost model's estimate, with what the job offloads."""
    found = estimate(job, cluster, profile, explain)
    parts = dict(found.breakdown)
    if job.offload_optimizer:
        # A host is no faster than its devices: the search prunes by their time.
        parts["optimizer on the host"] = max(optimizer_s(job, cluster), parts.pop("optimizer", 0.0))
    if job.offload_activations:
        parts["activations to the host"] = activations_s(job, cluster, found.step_s)
    if not (job.offload_optimizer or job.offload_activations):
        return found
    step_s = sum(parts.values())
    slower = step_s / found.step_s
    return replace(
        found,
        step_s=step_s,
        breakdown=tuple(parts.items()),
        tokens_per_s=found.tokens_per_s / slower,
        mfu=found.mfu / slower,
        hfu=found.hfu / slower,
        interval=Interval(found.interval.low * slower, found.interval.high * slower),
    )


def optimizer_s(job: TrainJob, cluster: Cluster) -> float:
    """Gradients down, the step on the host, weights back."""
    layout, elements = job.layout, heaviest_stage(job)
    gradient = DTYPE_BYTES[job.gradient_dtype]
    host_bytes = state_bytes(job, elements).host  # states and gradients of what the rank updates
    updated = updated_elements(layout, elements)
    down = gradient * updated
    if layout.world == 1:  # the gradients of every micro-batch, as wide as the weights
        down = job.micro_batches * job.weight_bytes_each * updated
    # Where weights are shared out, what comes back is their float32 copy.
    back = (max(4, job.weight_bytes_each) if layout.zero >= 2 else job.weight_bytes_each) * updated
    step = 2 * (host_bytes - gradient * updated) + gradient * updated
    share = HOST_MEMORY_BYTES_PER_S / cluster.node.gpus
    return (down + back) / cluster.device.host_bytes_per_s + step / share


def activations_s(job: TrainJob, cluster: Cluster, step_s: float) -> float:
    """What the arithmetic does not hide: a third of the step is forward, behind which activations leave; behind the
    rest they come back."""
    kept = sum(chunk_activation_bytes(job, chunk) for chunk in range(job.chunks)) / job.layout.pp
    moved_s = job.micro_batches * kept / cluster.device.host_bytes_per_s
    return max(0.0, moved_s - step_s / 3) + max(0.0, moved_s - 2 * step_s / 3)
