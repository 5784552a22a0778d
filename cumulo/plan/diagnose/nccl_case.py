"""What a pasted nccl-tests table and NCCL log say of a run: its ranks, nodes and operation, and how close it comes
to what its machines should reach. The rules of the verdict read it and add their evidence.
"""

from statistics import median

from cumulo.base import quick_re as re
from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.diagnosis import LOG_STEP, Diagnosis
from cumulo.plan.diagnose.expected import expected_of
from cumulo.plan.diagnose.machine_names import node_of
from cumulo.plan.diagnose.nccl_log_text import NcclLog
from cumulo.plan.diagnose.nccl_tests_text import NcclTest
from cumulo.plan.diagnose.peer_figures import PeerFigure, RunInHand, peer_figure

MOST_PCIE = 64.0  # GB/s: no PCIe slot carries more, and every NVLink does
HEALTHY_NEAR, _HEALTHY_FAR = 0.82, 0.90  # of what the model expects, in a node and between nodes
_HEALTHY_NVLINK = 0.90  # rings over NVLink are steady: all that were published or pasted reach 1.0 or more
_HEALTHY_ALL_TO_ALL = 0.75  # between nodes: many flows at once collide a little on every fabric
# Devices whose healthy nodes are above the model: the least that was published or pasted.
_ABOVE = {"b200": 1.05, "gb200": 1.05, "a100-80gb": 1.08, "a100-40gb": 1.08}
_LIKE_NEAR = 0.85  # of what the text says of a like run in a node; between nodes as above
_HEALTHY_NO_P2P = 0.36  # boards that may not reach each other's memory: through the host's
_NO_P2P = re.compile(r"GeForce|RTX [2345]0[5-9]0|\bT4\b|A10G|\bTITAN", re.I)
_HEALTHY_PCIE = 0.6  # over PCIe it depends on the board: switches, host bridges, the link between sockets
TOO_GOOD = 1.25  # of the best algorithm's rate: it is another machine, or another collective
_FULL_RATE = 0.6  # of what the largest messages reach


class NcclCase:
    def __init__(self, text: str, test: NcclTest | None, log: NcclLog | None) -> None:
        self.text, self.test, self.log = text, test, log
        self.evidence: list[str] = []
        self.said = False
        self.inferred = test.inferred_ranks() if test else None
        self.ranks = self._ranks()
        self.nodes = self._nodes()
        self.operation = self._operation()
        device = test.device if test else ""
        link = log.link if log else ""
        self.expected = expected_of(text, self.ranks, self.nodes, device, link) if self.ranks else None
        self.share = self._share()
        self.peer: PeerFigure | None = None

    def _ranks(self) -> int | None:
        said = self.test.claimed if self.test else None
        if self.inferred is not None and (self.inferred[0] < 512 or not (said and said.last)):
            return max(1, round(self.inferred[0]))
        if self.test and self.test.claimed.last:
            return self.test.claimed.last
        if self.test and self.test.devices and self.test.devices[-1].rank:
            return self.test.devices[-1].rank + 1
        return self.log.ranks if self.log else None

    @property
    def hosts_logged(self) -> int:
        """That the log or the list of devices names."""
        return max(self.test.hosts if self.test else 0, self.log.hosts if self.log else 0)

    def _nodes(self) -> int:
        devices = self.test.devices if self.test else ()
        hosts = len({one.host for one in devices})
        if hosts and len(devices) >= (self.ranks or 0):
            return hosts
        if (
            hosts and self.ranks
        ):  # the list is cut off: other hosts have as many as the highest number in it says
            each = 1 + max(one.number for one in devices)
            node = node_of(devices[0].name)
            if node is not None and each > node.gpus / 2 and self.ranks % node.gpus == 0:
                each = node.gpus
            return max(hosts, round(self.ranks / each))
        if self.log and self.log.nodes:
            return self.log.nodes
        node = node_of(self.text)
        said = self.test.claimed.nodes if self.test else 0
        if self.ranks and said > 1 and self.ranks % said == 0:
            return said
        logged = min(self.log.hosts, self.ranks or self.log.hosts) if self.log else 1
        each = node.scale_up_gpus if node is not None else 8
        return max(1, logged, (self.ranks or 1) // each)

    def _operation(self) -> str:
        if self.test is None:
            return "all_reduce"
        if self.test.operation is not None:
            return self.test.operation
        ratio = self.test.ratio
        if self.test.reducing and ratio is not None and ratio < 0.97:
            return "reduce_scatter"
        return (
            "all_reduce" if ratio is None or ratio > 1 or (self.ranks == 2 and ratio > 0.9) else "all_gather"
        )

    def _share(self) -> float | None:
        """Measured over expected, of the two largest messages."""
        if self.test is None or self.expected is None:
            return None
        rows = self.test.rows[-2:]
        operations = [self.operation]
        if self.test.operation is None and self.operation == "all_gather" and not self.test.reducing:
            operations = ["all_gather", "all_to_all"]  # the table does not say which; the kinder one counts
        shares = [
            median(row.busbw / self.expected.busbw(name, row.size_bytes) for row in rows)
            for name in operations
        ]
        return max((one for one in shares if one <= TOO_GOOD), default=min(shares))

    def compare_with_peer(self) -> None:
        """What the text says of a like run counts for more than what the model expects."""
        if self.test is None or self.share is None:
            return
        best = max(max(row.busbw, row.in_place or 0.0) for row in self.test.rows)
        device = f"{self.test.device} {self.expected.node.device.name if self.expected else ''}"
        own = RunInHand(best, self.ranks or 0, self.nodes, self.operation, device)
        peer = peer_figure(self.text, own, best / (_LIKE_NEAR if self.one_domain else _HEALTHY_FAR))
        if peer is not None:
            self.peer = peer
            self.share = min(self.share, best / peer.rate)
            self.evidence.append(f"{best / peer.rate:.0%} of what the text says of a like run: {peer.words}")

    @property
    def full_rate(self) -> bool:
        """The largest message is one that shows bandwidth: it should reach most of what the links carry."""
        if self.test is None:
            return False
        largest = self.test.rows[-1].size_bytes
        if self.expected is None:
            return largest > 4 << 20
        most = self.expected.busbw(self.operation, 16 << 30)
        return self.expected.busbw(self.operation, largest) >= _FULL_RATE * most

    @property
    def enough(self) -> bool:
        """It reaches what such machines reach."""
        if self.share is None or self.expected is None or self.peer is not None:
            return False
        if self.one_domain and not self.expected.has_nvlink:
            named = self.test.device if self.test and self.test.device else self.text
            return self.share >= (_HEALTHY_NO_P2P if _NO_P2P.search(named) else _HEALTHY_PCIE)
        if self.one_domain:
            rings = self.operation in ("all_reduce", "all_gather", "reduce_scatter")
            steady = rings and self.expected.node.device.link_kind.startswith("nvlink")
            usual = _ABOVE.get(self.expected.node.device.name, 1.0) if (self.ranks or 0) >= 8 else 1.0
            return self.share >= (_HEALTHY_NVLINK * usual if steady else HEALTHY_NEAR)
        alike = self.operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
        return self.share >= (_HEALTHY_FAR if alike else _HEALTHY_ALL_TO_ALL)

    @property
    def one_domain(self) -> bool:
        """All GPUs are on one NVLink domain, be it of several hosts."""
        return self.nodes == 1 or (
            self.expected is not None and self.expected.ranks <= self.expected.node.scale_up_gpus
        )

    @property
    def per_node(self) -> int:
        return max(1, (self.ranks or 8) // max(1, self.nodes))

    def say_numbers(self) -> None:
        """The bandwidth next to what it should be, once."""
        if self.said or self.share is None or self.expected is None or self.test is None:
            return
        self.said = True
        row = self.test.rows[-1]
        usual = self.expected.busbw(self.operation, row.size_bytes)
        self.evidence.append(
            f"busbw {row.busbw:.4g} GB/s at {quantity(row.size_bytes, 'B')}: {self.share:.0%} of the "
            f"{usual:.0f} GB/s "
            f"that {self.ranks} × {self.expected.node.device.name} should reach"
            + (f" with {self.expected.card_gbps:.0f} Gbit/s for each GPU" if self.nodes > 1 else "")
        )

    def apart(self, why: str, confidence: str) -> Diagnosis:
        """Trays of one rack that talk over network cards."""
        return self.answer(
            "pcie-not-nvlink",
            f"The hosts of the NVLink domain talk over network cards ({why}).",
            (
                "run `nvidia-smi -q | grep -A4 Fabric` and check that nvidia-imex runs on every host",
                "remove NCCL_MNNVL_ENABLE=0",
                LOG_STEP,
            ),
            confidence,
        )

    def answer(self, cause: str, sentence: str, steps: tuple[str, ...], confidence: str) -> Diagnosis:
        if cause not in ("wrong-ranks", "small-messages"):
            self.say_numbers()
        return Diagnosis(cause, sentence, tuple(self.evidence), steps, confidence, self.ranks, self.share)
