"""RunCase: what a table of nccl-tests and a log say of one run: its ranks, nodes and operation, and how close it
comes to what its machines should reach. The signs of causes read it."""

from dataclasses import dataclass
from functools import cached_property
from statistics import median

from cumulo.base.quantities import quantity
from cumulo.diagnose.host_tools import HostFacts
from cumulo.diagnose.machine import Machine, machine_of, node_of
from cumulo.diagnose.nccl_log import NcclLog
from cumulo.diagnose.nccl_tests import TestRow, TestRun

RINGS = ("all_reduce", "all_gather", "reduce_scatter")
# Shares of what the model expects, from which a run is healthy.
_NVLINK = 0.90  # rings over NVLink are steady: all that were published or pasted reach 1.0 or more
_OTHER_NEAR = 0.82
_PCIE = 0.6  # over PCIe it depends on the board: switches, host bridges, the link between sockets
_FAR, _FAR_ALL_TO_ALL = 0.90, 0.75  # many flows at once collide a little on every fabric
_TOO_GOOD = 1.25  # of the best algorithm's rate: it is another machine, or another collective
_FULL_RATE = 0.6  # of what the largest messages reach


@dataclass(frozen=True)
class RunCase:
    text: str  # of this run
    everything: str  # that was pasted: what the run's own part does not name may stand in the rest of it
    run: TestRun | None
    log: NcclLog | None
    host: HostFacts

    @cached_property
    def inferred(self) -> tuple[float, float, float] | None:
        return self.run.inferred_ranks() if self.run else None

    @cached_property
    def ranks(self) -> int | None:
        if self.inferred is not None and self.inferred[0] < 512:
            return max(1, round(self.inferred[0]))
        if self.run and self.run.devices:
            return self.run.devices[-1].rank + 1
        if self.run and self.run.asked_ranks:
            return self.run.asked_ranks
        return self.log.ranks if self.log else None

    @cached_property
    def nodes(self) -> int:
        devices = self.run.devices if self.run else ()
        hosts = len({one.host for one in devices})
        if hosts and len(devices) >= (self.ranks or 0):
            return hosts
        if (
            hosts and self.ranks
        ):  # the list is cut off: other hosts have as many as the highest number in it says
            return max(hosts, round(self.ranks / (1 + max(one.number for one in devices))))
        if self.log and self.log.nodes:
            return self.log.nodes
        node = node_of(self.text)
        logged = min(self.log.hosts, self.ranks or self.log.hosts) if self.log else 1
        return max(1, logged, (self.ranks or 1) // (node.scale_up_gpus if node else 8))

    @property
    def per_node(self) -> int:
        return max(1, (self.ranks or 8) // max(1, self.nodes))

    @property
    def operation(self) -> str:
        return (self.run.operation if self.run else "") or "all_reduce"

    @cached_property
    def machine(self) -> Machine | None:
        if self.ranks is None:
            return None
        device = self.run.devices[0].name if self.run and self.run.devices else ""
        link = self.log.link if self.log else ""
        named = device if node_of(device) else self.text if node_of(self.text) else self.everything
        return machine_of(named, self.everything, self.ranks, self.nodes, link)

    @cached_property
    def share(self) -> float | None:
        """Measured over expected, of the two largest messages."""
        if self.run is None or self.machine is None or not self.run.operation:
            return None
        rows = self.run.rows[-2:]
        return median(row.busbw / self.machine.busbw(self.operation, row.size_bytes) for row in rows)

    @cached_property
    def one_domain(self) -> bool:
        """All GPUs are on one NVLink domain, be it of several hosts."""
        return self.nodes == 1 or (
            self.machine is not None and self.machine.ranks <= self.machine.node.scale_up_gpus
        )

    @cached_property
    def full_rate(self) -> bool:
        """The largest message is one that shows bandwidth: it should reach most of what the links carry."""
        assert self.run is not None
        largest = self.run.rows[-1].size_bytes
        if self.machine is None:
            return largest > 4 << 20
        most = self.machine.busbw(self.operation, 16 << 30)
        return self.machine.busbw(self.operation, largest) >= _FULL_RATE * most

    @cached_property
    def impossible(self) -> bool:
        """It is more than the network that the text names can carry."""
        assert self.run is not None and self.machine is not None
        row = self.run.rows[-1]
        return row.busbw > _TOO_GOOD * self.machine.busbw(self.operation, row.size_bytes, best=True)

    @cached_property
    def is_enough(self) -> bool:
        """It reaches what such machines reach."""
        assert self.share is not None and self.machine is not None
        if self.one_domain and not self.machine.has_nvlink:
            return self.share >= _PCIE
        if self.one_domain:
            steady = self.operation in RINGS and self.machine.node.device.link_kind.startswith("nvlink")
            return self.share >= (_NVLINK if steady else _OTHER_NEAR)
        return self.share >= (_FAR if self.operation in (*RINGS, "broadcast", "reduce") else _FAR_ALL_TO_ALL)

    @cached_property
    def large(self) -> tuple[TestRow, ...]:
        """Rows that show bandwidth."""
        return tuple(row for row in self.run.rows if row.size_bytes >= 32 << 20) if self.run else ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The bandwidth next to what it should be, as evidence."""
        if self.share is None or self.machine is None or self.run is None:
            return ()
        row = self.run.rows[-1]
        usual = self.machine.busbw(self.operation, row.size_bytes)
        cards = f" with {self.machine.card_gbps:.0f} Gbit/s for each GPU" if self.nodes > 1 else ""
        return (
            f"busbw {row.busbw:.4g} GB/s at {quantity(row.size_bytes, 'B')}: {self.share:.0%} of the "
            f"{usual:.0f} GB/s that {self.ranks} × {self.machine.node.device.name} should reach{cards}",
        )
