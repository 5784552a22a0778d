"""Diagnosis of a pasted output: which cause is likely, on what evidence, and what to run next. `cumulo diagnose`
calls it.

Logs decide before numbers, since they name things; numbers are compared with the planner's network model. Where
neither is enough the answer is "I cannot tell" with the command that would tell. A run is called healthy only if it
reaches what such machines reach.
"""

from statistics import median

from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.counters_text import congestion_counters
from cumulo.plan.diagnose.diagnosis import (
    CAUSES,
    ECN_STEP,
    GDR_STEP,
    LOG_STEP,
    PAIRS_STEP,
    PAUSES_STEP,
    PORTS_STEP,
    TEST_STEP,
    TOPO_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.expected import expected_of, nearest_published, node_of
from cumulo.plan.diagnose.flight_text import parse_hang
from cumulo.plan.diagnose.hang_verdict import hang_verdict
from cumulo.plan.diagnose.nccl_log_text import NcclLog, parse_nccl_log
from cumulo.plan.diagnose.nccl_tests_text import NcclTest, parse_nccl_tests
from cumulo.plan.diagnose.perftest_text import parse_perftest
from cumulo.plan.diagnose.perftest_verdict import perftest_verdict

__all__ = ["CAUSES", "Diagnosis", "diagnose"]


_HEALTHY_NEAR, _HEALTHY_FAR = 0.82, 0.88  # of what the model expects, in a node and between nodes
_HEALTHY_PCIE = 0.6  # over PCIe it depends on the board: switches, host bridges, the link between sockets
_FALLS = 1.5  # times the bandwidth of the largest messages, that smaller ones reach: buffers overflow
_TOO_GOOD = 1.25  # of the best algorithm's rate: it is another machine


def diagnose(text: str) -> Diagnosis:
    if (hang := parse_hang(text)) is not None:
        return hang_verdict(hang)
    test, log = parse_nccl_tests(text), parse_nccl_log(text)
    if test is None and (perftest := parse_perftest(text)) is not None:
        return perftest_verdict(perftest)
    if test is None and log is None:
        return Diagnosis(
            "unknown",
            "The text contains no table of nccl-tests, no NCCL log, no perftest output and no flight recorder.",
            (),
            (TEST_STEP, LOG_STEP),
            "low",
        )
    return _Judge(text, test, log).verdict()


class _Judge:
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

    def verdict(self) -> Diagnosis:
        found = (
            self._stated_ranks()
            or self._from_log()
            or self._small()
            or self._congested()
            or self._from_numbers()
        )
        return found or self._answer(
            "unknown", "This text does not say enough.", (LOG_STEP, TEST_STEP), "low"
        )

    # -- what ran ---------------------------------------------------------------------------------------
    def _ranks(self) -> int | None:
        if self.inferred is not None and self.inferred[0] < 512:
            return max(1, round(self.inferred[0]))
        if self.test and self.test.claimed:
            return self.test.claimed[-1]
        return self.log.ranks if self.log else None

    def _nodes(self) -> int:
        if self.test and self.test.hosts:
            return self.test.hosts
        if self.log and self.log.nodes:
            return self.log.nodes
        node = node_of(self.text)
        if self.ranks and node is not None:
            return max(1, self.ranks // node.scale_up_gpus)
        return max(1, (self.ranks or 1) // 8)

    def _operation(self) -> str:
        if self.test is None:
            return "all_reduce"
        if self.test.operation is not None:
            return self.test.operation
        ratio = self.test.ratio
        return (
            "all_reduce" if ratio is None or ratio > 1 or (self.ranks == 2 and ratio > 0.9) else "all_gather"
        )

    def _share(self) -> float | None:
        """Measured over expected, of the largest messages."""
        if self.test is None or self.expected is None:
            return None
        rows = self.test.large[-4:] or self.test.rows[-2:]
        operations = [self.operation]
        if self.test.operation is None and self.operation == "all_gather":
            operations = ["all_gather", "all_to_all"]  # the table does not say which; the kinder one counts
        shares = [
            median(row.busbw / self.expected.busbw(name, row.size_bytes) for row in rows)
            for name in operations
        ]
        return max(shares)

    # -- rules --------------------------------------------------------------------------------------------
    def _stated_ranks(self) -> Diagnosis | None:
        if self.test is None:
            return None
        if self.test.ratio is not None and self.test.ratio < 0.05:
            return self._answer(
                "wrong-ranks",
                "busbw is 0: every process ran alone, with one rank. The processes did not find each other.",
                ("build nccl-tests with MPI=1, and check that mpirun and the build use the same MPI",),
                "high",
            )
        if self.inferred is None:
            return None
        best, low, high = self.inferred
        slack = 0.15 + 0.02 * best
        claimed = [one for one in self.test.claimed if one > 1]
        wrong = [one for one in claimed if not low - slack <= one <= high + slack]
        if not claimed or not wrong or (len(wrong) < len(claimed) and self.test.hosts):
            return None
        self.evidence.append(
            f"busbw/algbw is {self.test.ratio:.4f}, which an {self.operation} of {best:.0f} ranks has; the "
            f"text states {', '.join(str(one) for one in wrong)}"
        )
        return self._answer(
            "wrong-ranks",
            f"{round(best)} ranks ran, not {wrong[0]}. Compare the bandwidth with that of {round(best)} ranks.",
            ("check -np, -g and the host file; count the `Rank` lines at the top of the output",),
            "high",
        )

    def _from_log(self) -> Diagnosis | None:
        log = self.log
        if log is None:
            return None
        far = self.nodes > 1 or bool(log.far)
        found = (
            self._events(log)
            or self._domain(log)
            or (self._network(log) if far else None)
            or (self._near(log) if not far else None)
            or (self._missing_cards(log) if far else None)
            or (self._gdr(log) if far else None)
            or self._near(log)
        )
        if found is not None:
            return found
        if self.test is None:
            return self._log_alone(log)
        return None

    def _events(self, log: NcclLog) -> Diagnosis | None:
        bad = [one for one in log.events if "error" in one or "down" in one or "fatal" in one]
        if not bad:
            return None
        self.evidence.append(f"NCCL reports: {', '.join(bad)}")
        return self._answer("rail-down", "A port went down during the run.", (PORTS_STEP, PAIRS_STEP), "high")

    def _domain(self, log: NcclLog) -> Diagnosis | None:
        node = self.expected.node if self.expected else node_of(self.text)
        wide = node is not None and node.scale_up_gpus > node.gpus
        if not (wide and self.nodes > 1 and log.far and log.domain_off):
            return None
        self.evidence.append("NCCL says MNNVL 0: no NVLink between hosts")
        return self._apart("MNNVL 0", "high")

    def _network(self, log: NcclLog) -> Diagnosis | None:
        if log.socket:
            self.evidence.append("NCCL uses the network Socket (TCP)")
            if log.settings.get("NCCL_IB_DISABLE", "0").strip(".") == "1":
                self.evidence.append("NCCL_IB_DISABLE is 1")
            return self._answer(
                "wrong-nic",
                "NCCL found no RDMA card that it may use and sends over TCP.",
                (
                    "run `ibv_devinfo` inside the container",
                    "remove NCCL_IB_DISABLE; set NCCL_IB_HCA=mlx5",
                    LOG_STEP,
                ),
                "high",
            )
        counts = {len(cards) for cards in log.cards.values()}
        near = self._per_node()
        if counts and max(counts) == 1 and near >= 4:
            card = next(iter(log.cards.values()))[0]
            self.evidence.append(f"of each node's cards NCCL uses one, {card}, for {near} GPUs")
            return self._answer(
                "wrong-nic",
                f"All GPUs of a node share the card {card}, which may be the management or storage card.",
                (f"remove NCCL_IB_HCA={card}, or name all compute cards in it", TOPO_STEP, PORTS_STEP),
                "high",
            )
        return None

    def _missing_cards(self, log: NcclLog) -> Diagnosis | None:
        counts = {host: len(cards) for host, cards in log.cards.items()}
        near = self._per_node()
        if not counts:
            return None
        most, least = max(counts.values()), min(counts.values())
        usual = near if most in (near, near - 1) else most
        short = [host for host, count in counts.items() if count < usual]
        if not short or (self.share is not None and self.share > 1.0 and most == least):
            return None
        self.evidence.append(f"{short[0]} has {least} network cards in use, of {usual}")
        return self._answer(
            "rail-down",
            f"{usual - least} of {usual} rails of {short[0]} is missing.",
            (PORTS_STEP, PAIRS_STEP),
            "high",
        )

    def _gdr(self, log: NcclLog) -> Diagnosis | None:
        paths = [path for path in log.far if path.startswith("NET/IB")]
        if not log.gdr_off and not (paths and not any("GDRDMA" in path for path in paths)):
            return None
        if log.gdr_on and not log.gdr_off:
            return None
        self.evidence.append("messages between nodes go via NET/IB without GDRDMA")
        return self._answer(
            "no-gdr",
            "Data between nodes is copied through host memory, since GPUDirect RDMA is off.",
            (GDR_STEP, "load nvidia-peermem (or use dma-buf), and remove NCCL_NET_GDR_LEVEL", TOPO_STEP),
            "high",
        )

    def _near(self, log: NcclLog) -> Diagnosis | None:
        node = self.expected.node if self.expected else node_of(self.text)
        pcie_device = node is not None and node.device.link_kind.startswith("pcie")
        shared = [path for path in log.near if path.startswith("SHM")]
        off = log.settings.get("NCCL_P2P_DISABLE", "0").startswith("1")
        if not (shared or off or log.pcie_path) or pcie_device:
            return None
        if log.pcie_path:
            self.evidence.append(f"NCCL found the path type {log.pcie_path} between GPUs, not NVL")
        if shared:
            self.evidence.append(f"GPUs of a node talk via {shared[0]}")
        settings = [f"{name}={value}" for name, value in log.settings.items() if "P2P" in name]
        self.evidence.extend(f"{one} is set" for one in settings)
        fixes = tuple(f"remove {one}" for one in settings)
        return self._answer(
            "pcie-not-nvlink", "GPUs of a node do not use NVLink.", (*fixes, TOPO_STEP), "high"
        )

    def _log_alone(self, log: NcclLog) -> Diagnosis | None:
        good = bool(log.near) and all(path.startswith("P2P") for path in log.near)
        if self.nodes > 1 or log.far:
            good = good and log.gdr_on and bool(log.cards)
        if not good:
            return None
        self.evidence.append(
            "P2P between the GPUs of a node" + (", GPUDirect RDMA between nodes" if log.far else "")
        )
        return self._answer(
            "healthy",
            "The log shows the paths one would want. It has no bandwidth: measure it.",
            (TEST_STEP,),
            "medium",
        )

    def _small(self) -> Diagnosis | None:
        if self.test is None or self.test.rows[-1].size_bytes > 4 << 20:
            return None
        smallest = self.test.rows[0]
        self.evidence.append(f"the largest message has {quantity(self.test.rows[-1].size_bytes, 'B')}")
        if self.expected is not None:
            usual = self.expected.latency_us(self.operation)
            self.evidence.append(
                f"{smallest.time_us:.0f} µs for the smallest; about {usual:.0f} µs are usual"
            )
            if smallest.time_us > 8 * usual:
                return self._answer(
                    "unknown",
                    "Messages are small, and even their latency is high.",
                    (LOG_STEP, TEST_STEP),
                    "low",
                )
        return self._answer(
            "small-messages",
            "At these sizes latency counts, not bandwidth: a low busbw says nothing about the links.",
            ("run with -b 8 -e 8G -f 2, and read busbw from 256 MiB up",),
            "high",
        )

    @property
    def one_domain(self) -> bool:
        """All GPUs are on one NVLink domain, be it of several hosts."""
        return self.nodes == 1 or (
            self.expected is not None and self.expected.ranks <= self.expected.node.scale_up_gpus
        )

    def _congested(self) -> Diagnosis | None:
        """Counters of pauses and losses, or a bandwidth that falls as messages grow."""
        if self.nodes == 1 or self.one_domain:
            return None
        counters = congestion_counters(self.text)
        rows = [row for row in self.test.rows if row.size_bytes >= 8 << 20] if self.test else []
        best = max(rows, key=lambda row: row.busbw, default=None)
        falls = best is not None and best.busbw > _FALLS * rows[-1].busbw and best is not rows[-1]
        slow = self.share is not None and self.share < _HEALTHY_FAR
        if not falls and not (counters and (slow or self.share is None)):
            return None
        if falls and best is not None:
            self.evidence.append(
                f"busbw falls from {best.busbw:.4g} GB/s at {quantity(best.size_bytes, 'B')} to "
                f"{rows[-1].busbw:.4g} at {quantity(rows[-1].size_bytes, 'B')}"
            )
        self.evidence.extend(f"{name} is {count:,}" for name, count in counters[:4])
        return self._answer(
            "congested",
            "Large messages fill the switches' buffers: senders are paused, or packets are lost and sent again.",
            (
                PAUSES_STEP,
                ECN_STEP,
                "run `cumulo network lint FABRIC` for the layout's collisions",
                PAIRS_STEP,
            ),
            "high" if falls and counters else "medium",
        )

    def _from_numbers(self) -> Diagnosis | None:
        if self.share is None or self.expected is None or self.test is None:
            return None
        row = self.test.rows[-1]
        usual = self.expected.busbw(self.operation, row.size_bytes)
        self._say_numbers()
        if row.busbw > _TOO_GOOD * max(usual, self.expected.busbw(self.operation, row.size_bytes, best=True)):
            return self._answer(
                "unknown",
                "This is more than the network that the text names can carry, so that it is not the one that ran.",
                (LOG_STEP, "state the cards of a node, as in 8 x 400G"),
                "low",
            )
        if (published := nearest_published(self.expected)) is not None:
            self.evidence.append(f"published: {published}")
        return self._near_numbers() if self.one_domain else self._far_numbers(row.busbw)

    def _say_numbers(self) -> None:
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

    def _near_numbers(self) -> Diagnosis:
        assert self.share is not None and self.expected is not None
        if self.share >= (_HEALTHY_NEAR if self.expected.has_nvlink else _HEALTHY_PCIE):
            return self._healthy()
        if self.share < 0.32 and self.expected.has_nvlink and self.nodes > 1:
            return self._apart(f"{self.share:.0%} of what the NVLink domain gives", "medium")
        if self.share < 0.32 and self.expected.has_nvlink:
            return self._answer(
                "pcie-not-nvlink",
                f"{self.share:.0%} of what NVLink gives; PCIe gives as much.",
                (TOPO_STEP, "look for NCCL_P2P_DISABLE and NCCL_P2P_LEVEL in the environment", LOG_STEP),
                "medium",
            )
        ring = self.operation == "all_reduce" and self.expected.network.profile.nvls_bytes_per_s > 0
        if ring and 0.68 <= self.share < _HEALTHY_NEAR and (self.ranks or 0) >= 5:
            return self._answer(
                "nvls-off",
                "This is what a ring over NVLink reaches; with NVLS it would be a third more.",
                ("check that fabric manager runs and NCCL_NVLS_ENABLE is not 0", LOG_STEP),
                "medium",
            )
        links = (
            "NVLink gives; more than PCIe does" if self.expected.has_nvlink else "its PCIe links could carry"
        )
        return self._answer("unknown", f"{self.share:.0%} of what {links}.", (TOPO_STEP, LOG_STEP), "low")

    def _apart(self, why: str, confidence: str) -> Diagnosis:
        """Trays of one rack that talk over network cards."""
        return self._answer(
            "pcie-not-nvlink",
            f"The hosts of the NVLink domain talk over network cards ({why}).",
            (
                "run `nvidia-smi -q | grep -A4 Fabric` and check that nvidia-imex runs on every host",
                "remove NCCL_MNNVL_ENABLE=0",
                LOG_STEP,
            ),
            confidence,
        )

    def _far_numbers(self, busbw: float) -> Diagnosis:
        assert self.share is not None and self.expected is not None
        share = self.share
        card = self.expected.card_gbps / 8
        if share >= _HEALTHY_FAR:
            return self._healthy()
        if share < 0.16 or busbw < 1.05 * card / 2:
            return self._answer(
                "wrong-nic",
                "So little goes over one slow card, or over TCP.",
                (LOG_STEP, "look at `NET/IB : Using` or `NET/Socket` in it, and at NCCL_IB_HCA", PORTS_STEP),
                "medium",
            )
        if share < 0.42:
            return self._answer(
                "no-gdr",
                f"{share:.0%} of the cards' rate is what copies through host memory reach.",
                (GDR_STEP, LOG_STEP, PAIRS_STEP),
                "medium",
            )
        if share < 0.62:
            return self._answer(
                "rail-down",
                f"{share:.0%}, about half: one card seems to carry two GPUs' traffic, and all wait for it."
                + (
                    ""
                    if self.expected.stated
                    else f" Or the cards have less than {self.expected.card_gbps:.0f} Gbit/s."
                ),
                (PORTS_STEP, PAIRS_STEP, LOG_STEP),
                "medium",
            )
        return self._answer(
            "unknown",
            f"{share:.0%} of what is usual: a rail that is missing (7 of 8 is 88%), links that flows hash onto "
            "together, or a slow node would all look so.",
            (PORTS_STEP, PAIRS_STEP, "run pairs of nodes, to find a slow one", LOG_STEP),
            "low",
        )

    # -- answers ------------------------------------------------------------------------------------------
    def _per_node(self) -> int:
        if self.test and self.test.devices:
            return max(1, len(self.test.devices) // max(1, self.test.hosts))
        return max(1, (self.ranks or 8) // max(1, self.nodes))

    def _healthy(self) -> Diagnosis:
        assert self.share is not None
        return self._answer(
            "healthy",
            f"{self.share:.0%} of what such a machine should reach.",
            (),
            "high" if self.share > 0.92 else "medium",
        )

    def _answer(self, cause: str, sentence: str, steps: tuple[str, ...], confidence: str) -> Diagnosis:
        if cause not in ("wrong-ranks", "small-messages"):
            self._say_numbers()
        return Diagnosis(cause, sentence, tuple(self.evidence), steps, confidence, self.ranks, self.share)
