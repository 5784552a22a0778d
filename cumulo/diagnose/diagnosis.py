"""Diagnosis: the answer of `cumulo diagnose`, and the table of the causes that it knows with what to run next."""

from dataclasses import dataclass

_TEST = "run `./all_reduce_perf -b 8 -e 8G -f 2 -g 8`, over several nodes with mpirun, and paste its output"
_LOG = "run it again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET and paste the log of rank 0"
_PAIRS = "run `ib_write_bw -d mlx5_N --report_gbits` between two nodes for each card N"
_PORTS = "run `ibstat` (or `rdma link`) on each node and look for ports that are not Active at full rate"
_TOPOLOGY = "run `nvidia-smi topo -m` and `nvidia-smi nvlink --status`, or `cumulo topology`"
_INTERFACE = "set NCCL_SOCKET_IFNAME to the interface that joins the nodes, such as eth0 or ^docker0,lo"


@dataclass(frozen=True, slots=True)
class Cause:
    title: str
    next_steps: tuple[str, ...]


CAUSES = {
    "healthy": Cause("healthy", ()),
    "rail-down": Cause("a rail (network card, cable or port) is down", (_PORTS, _PAIRS)),
    "wrong-nic": Cause(
        "data goes over the wrong network card, or over TCP",
        (
            "run `ibv_devinfo` inside the container; look at NCCL_IB_HCA and NCCL_IB_DISABLE",
            _INTERFACE,
            _LOG,
        ),
    ),
    "pcie-not-nvlink": Cause(
        "GPUs of a node talk over PCIe or host memory, not NVLink",
        (_TOPOLOGY, "look for NCCL_P2P_DISABLE and NCCL_P2P_LEVEL in the environment", _LOG),
    ),
    "no-gdr": Cause(
        "no GPUDirect RDMA: data is copied through host memory",
        (
            "run `lsmod | grep nvidia_peermem`, and `ib_write_bw --report_gbits` with and without --use_cuda=0",
            "load nvidia-peermem (or use dma-buf), and remove NCCL_NET_GDR_LEVEL",
        ),
    ),
    "small-messages": Cause(
        "messages are too small to show bandwidth",
        ("run with -b 8 -e 8G -f 2, and read busbw from 256 MiB up",),
    ),
    "wrong-ranks": Cause(
        "the stated number of ranks is not the one that ran",
        (
            "check -np, -g and the host file; count the `Rank` lines at the top of the output",
            "build nccl-tests with MPI=1, and start processes with mpirun, srun or torchrun",
        ),
    ),
    "late-rank": Cause(
        "a rank did not come to a collective",
        (
            "look at the missing rank with `py-spy dump`: data loading, a crash, or another branch of the program",
            "collect the dumps of all ranks: TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        ),
    ),
    "slow-link": Cause(
        "a link runs below its line rate",
        (
            "look at the PCIe link (`lspci -vv | grep LnkSta`): half the width or rate is half the bandwidth",
            "run `nvidia-smi nvlink --status` and look for inactive links",
            _PORTS,
        ),
    ),
    "congested": Cause(
        "the network is congested: pauses (PFC), or packets that are lost and sent again",
        (
            "watch `ethtool -S` (rx_prio3_pause, tx_prio3_pause, discards) on cards and switches during a run",
            "check that PFC and ECN (DCQCN) are on for the same traffic class on all cards and switches",
            "run `cumulo network lint FABRIC` for the layout's collisions",
        ),
    ),
    "setting": Cause("a setting slows the run down", ("remove the setting, and run again",)),
    "gpu-fault": Cause(
        "a GPU reports a hardware error, or is throttled",
        (
            "run `dmesg | grep -i xid` and `nvidia-smi -q` on the host, and take the GPU out of use",
            "run `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK` during a run",
        ),
    ),
    "wrong-results": Cause(
        "the collective's results are wrong: data was corrupted",
        (
            "run each node alone, then pairs, to find the GPU or card that is always in a wrong run",
            "run `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and `dcgmi diag -r 3` on those nodes",
        ),
    ),
    "mismatched-calls": Cause(
        "ranks call different collectives, or with different sizes",
        ("make all ranks take the same branch before this collective, with tensors of the same shape",),
    ),
    "no-connection": Cause(
        "processes cannot reach each other at the start",
        (
            "check that every node runs, with the same MASTER_ADDR and MASTER_PORT",
            "test with `nc -l 45000` on one node and `nc NODE 45000` on the other, for a firewall",
            _INTERFACE,
        ),
    ),
    "version-mismatch": Cause(
        "versions do not fit together (NCCL, CUDA, driver)",
        (
            "compare `nvidia-smi` and `python -c 'import torch; print(torch.cuda.nccl.version())'` on all nodes",
            "use one container image on all nodes; look for another libnccl in LD_LIBRARY_PATH",
        ),
    ),
    "unknown": Cause("I cannot tell", (_TEST, _LOG)),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: str  # a key of CAUSES
    sentence: str
    evidence: tuple[str, ...] = ()
    confidence: str = "low"  # high, medium, low
    ranks: int | None = None
    share: float | None = None  # measured over expected bus bandwidth
    more_steps: tuple[str, ...] = ()  # what to run before the steps of the cause

    @property
    def title(self) -> str:
        return CAUSES[self.cause].title

    @property
    def next_steps(self) -> tuple[str, ...]:
        return (*self.more_steps, *CAUSES[self.cause].next_steps)
