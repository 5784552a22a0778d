"""Diagnosis: an answer of `cumulo diagnose`, the causes it may name, and the commands that people run next."""

from dataclasses import dataclass

CAUSES = {
    "healthy": "healthy",
    "rail-down": "a rail (network card, cable or port) is down",
    "wrong-nic": "data goes over the wrong network card, or over TCP",
    "pcie-not-nvlink": "GPUs of a node talk over PCIe or host memory, not NVLink",
    "no-gdr": "no GPUDirect RDMA: data is copied through host memory",
    "small-messages": "messages are too small to show bandwidth",
    "wrong-ranks": "the stated number of ranks is not the one that ran",
    "late-rank": "a rank did not come to a collective",
    "slow-link": "a link runs below its line rate",
    "congested": "the network is congested: pauses (PFC), or packets that are lost and sent again",
    "oversubscribed": "uplinks carry less than the nodes below them send: the fabric is oversubscribed",
    "shared-path": "GPUs or cards share a PCIe link, or reach each other across sockets",
    "nvls-off": "NVLink SHARP (NVLS) is not used",
    "collisions": "flows collide on the same uplinks (ECMP)",
    "lossy": "RoCE packets are lost: PFC or ECN does not work",
    "mtu": "the MTU is too small, or not the same everywhere",
    "link-errors": "a link has errors: cable, transceiver or connector",
    "no-subnet-manager": "InfiniBand ports have no subnet manager",
    "acs": "PCIe ACS sends traffic between devices through the root complex",
    "numa": "processes run on the wrong cores: on another socket than their card or GPU, or all on one",
    "slow-gpu": "a GPU is slower than the others (heat, power, clock), and all wait for it",
    "busy": "another job uses the same GPUs or links",
    "setting": "a setting slows the run down",
    "no-plugin": "the network plugin (EFA, TCPX) is missing, so that data goes over TCP",
    "fabric-manager": "the fabric manager does not run: NVSwitch is not set up",
    "wrong-results": "the collective's results are wrong: data was corrupted",
    "gpu-fault": "a GPU or its NVLink reports a hardware error",
    "mismatched-calls": "ranks call different collectives, or with different sizes",
    "version-mismatch": "versions do not fit together (NCCL, CUDA, driver)",
    "no-path": "cards find no path to each other (GID, subnet or VLAN)",
    "process-died": "a process died, and the others wait for it",
    "firewall": "a firewall blocks the ports between nodes",
    "no-connection": "processes cannot reach each other at the start",
    "limit": "a limit of the system or container is too small",
    "failed": "the run failed before it measured anything",
    "unknown": "I cannot tell",
}

TEST_STEP = (
    "run `./all_reduce_perf -b 8 -e 8G -f 2 -g 8`, over several nodes with mpirun, and paste its output"
)
LOG_STEP = "run it again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET and paste the log of rank 0"
PAIRS_STEP = "run `ib_write_bw -d mlx5_N --report_gbits` between two nodes for each card N"
WIDTH_STEP = (
    "look at the card's PCIe link (`lspci -vv | grep LnkSta`): half the width or rate is half the bandwidth"
)
PORTS_STEP = "run `ibstat` (or `rdma link`) on each node and look for ports that are not Active at full rate"
GDR_STEP = "run `lsmod | grep nvidia_peermem`, and `ib_write_bw --report_gbits` with and without --use_cuda=0"
PAUSES_STEP = (
    "watch `ethtool -S` (rx_prio3_pause, tx_prio3_pause, discards) on cards and switch ports during a run"
)
ECN_STEP = "check that PFC and ECN (DCQCN) are on for the same traffic class on all cards and switches"
TOPO_STEP = "run `nvidia-smi topo -m` and `nvidia-smi nvlink --status`, or `cumulo topology`"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: str  # a key of CAUSES
    sentence: str
    evidence: tuple[str, ...]
    next_steps: tuple[str, ...]
    confidence: str  # high, medium, low
    ranks: int | None = None
    share: float | None = None  # measured over expected bus bandwidth

    @property
    def title(self) -> str:
        return CAUSES[self.cause]
