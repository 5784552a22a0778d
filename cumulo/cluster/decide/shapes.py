"""What jobs of one shape have in common: they fit at the same moments, and wait for the same reason. A decision
looks at a shape once, and not at each of the thousand jobs that have it."""

from functools import lru_cache

from cumulo.cluster.decide.fit import only_gpus
from cumulo.cluster.decide.fit_tables import fit_key
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest

ShapeKey = tuple[int, int, int, int, int, tuple[str, ...]]


def shape_key(job: JobRequest) -> ShapeKey:
    return (job.tasks, job.gpus_per_task, job.gpu_milli, job.cpu_milli, job.memory_mib, job.devices)


class GangShape:
    """One for all jobs of a shape in a queue: as a key of dictionaries it is known by itself, which is several
    times as fast as comparing what it asks for."""

    __slots__ = ("devices", "fit_key", "gpus_per_task", "milli", "needs", "number", "only_gpus", "tasks")

    def __init__(self, job: JobRequest, number: int = 0) -> None:
        self.number = number  # among those of its queue
        self.tasks, self.gpus_per_task, self.devices = job.tasks, job.gpus_per_task, job.devices
        self.only_gpus, self.fit_key = only_gpus(job), fit_key(job)
        self.milli = job.tasks * job.milli_per_task  # thousandths of GPUs of the whole gang
        self.needs = needs(job)


class GangShapes:
    """The shapes of one queue, or of one snapshot."""

    def __init__(self) -> None:
        self._known: dict[ShapeKey, GangShape] = {}

    def __len__(self) -> int:
        return len(self._known)

    def shape(self, job: JobRequest) -> GangShape:
        key = shape_key(job)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = GangShape(job, len(self._known))
        return known


def needs(job: JobRequest) -> str:
    """What a gang asks for, in words."""
    return _needs(job.tasks, job.gpus_per_task, job.gpu_milli, job.cpu_milli, job.devices)


@lru_cache(maxsize=4096)
def _needs(tasks: int, gpus: int, gpu_milli: int, cpu_milli: int, devices: tuple[str, ...]) -> str:
    """Worded once for all jobs of a shape."""
    amount, unit = float(gpus) if gpus != 1 else gpu_milli / WHOLE_GPU, "GPU"
    if not gpus:
        amount, unit = cpu_milli / 1000, "core"
    each = f"{amount:g} {unit}{'' if amount <= 1 else 's'}"
    kind = f" of {' or '.join(devices)}" if devices else ""
    return f"the gang needs {'1 task' if tasks == 1 else f'{tasks} tasks'} with {each}{kind} each"


def too_few(needs: str, able: int) -> str:
    """One sentence for the person who asks why a job waits. `able`: tasks that fit."""
    return f"{needs}; {able} fit now"
