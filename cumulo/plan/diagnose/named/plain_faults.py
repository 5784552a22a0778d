"""Faults that one line of a text names outright: services that do not run, modes, limits, options of the test.
Each is a row: what the tool prints, what it means, what to do, and which symptoms it explains."""

from dataclasses import dataclass

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import LOG_STEP, TEST_STEP, TOPO_STEP
from cumulo.plan.diagnose.link_states import whole_line
from cumulo.plan.diagnose.named.fault import FAILED, SLOW, SLOW_NODE, Fault


@dataclass(frozen=True, slots=True)
class _Row:
    pattern: str
    cause: str
    sentence: str
    steps: tuple[str, ...]
    explains: frozenset[str]
    sure: bool = False


_ROWS = (
    _Row(
        r"nvidia-fabricmanager[^\n]*(?:\n[^\n]*){0,3}?\b(?:inactive|failed|dead|not (?:running|found))\b|"
        r"[Ff]abric ?[Mm]anager[^\n]{0,40}(?:not running|stopped|failed|inactive|mismatch|is down)|"
        r"system not yet initialized|error 802|Fabric[\s\S]{0,40}?State\s*:\s*(?:In Progress|Not Started)",
        "fabric-manager",
        "The fabric manager does not run, or not in the driver's version: NVSwitch and NVLink are not set up.",
        ("run `systemctl restart nvidia-fabricmanager`, with the version of the driver", TOPO_STEP),
        SLOW_NODE | FAILED,
        sure=True,
    ),
    _Row(
        r"(?i)nvidia-imex[^\n]*(?:\n[^\n]*){0,3}?\b(?:inactive|failed|dead|not running)\b|"
        r"IMEX[^\n]{0,40}(?:not running|DOWN|unavailable)",
        "pcie-not-nvlink",
        "nvidia-imex does not run: hosts of the NVLink domain cannot share memory over NVLink.",
        ("start nvidia-imex on every host with the same list of nodes", TOPO_STEP),
        SLOW_NODE | FAILED,
        sure=True,
    ),
    _Row(
        r"MIG [Mm]ode[\s\S]{0,40}?Current\s*:\s*Enabled|\bMIG \d+g\.\d+gb\b|\bMIG (?:mode )?(?:is )?(?:on|enabled)",
        "setting",
        "MIG is on: parts of a GPU can use neither NVLink nor each other's memory.",
        ("turn MIG off with `nvidia-smi -mig 0`, or run one process on each GPU", TOPO_STEP),
        SLOW_NODE | FAILED,
        sure=True,
    ),
    _Row(
        r"(?i)\bCC (?:status|mode)\s*:\s*ON\b|confidential comput\w+ (?:is )?(?:on|enabled)",
        "setting",
        "Confidential computing is on: traffic is encrypted and goes through host memory.",
        ("turn it off (nvidia-smi conf-compute), or expect this bandwidth",),
        SLOW | FAILED,
    ),
    _Row(
        r"^\s*GPU\d+\s+(?:X\s+|OK\s+|[CGT]?NS\s+)*[CGT]NS\b[^\n]*",
        "pcie-not-nvlink",
        "Driver or chipset do not allow GPUs to reach each other's memory (peer-to-peer is not supported).",
        (
            "look at the BIOS (ACS, above-4G decoding), the virtual machine's settings and the driver",
            TOPO_STEP,
        ),
        SLOW_NODE - {"late-rank"},
    ),
    _Row(
        r"scaling_governor[^\n]*\n?[^\n]*\bpowersave\b|governor[^\n]{0,30}\bpowersave\b",
        "setting",
        "The CPU's governor is powersave: cores are slow to wake for the network.",
        ("run `cpupower frequency-set -g performance`", TEST_STEP),
        frozenset({"slow-link", "congested", "unknown"}),
    ),
    _Row(
        r"warmup iters: 0\b",
        "setting",
        "The test ran without warm-up: setting up connections counts as part of the first call.",
        ("run with -w 5 -n 20", LOG_STEP),
        SLOW,
    ),
    _Row(
        r"\bP_?[Kk]ey\b[^\n]{0,60}(?:mismatch|not found|violation|differ\w*|invalid)|"
        r"PkeyViolations?[:.]+\s*[1-9]\d*",
        "no-path",
        "The ports are in different partitions (P_Key).",
        ("give both ports the same P_Key in the subnet manager's partitions, or set NCCL_IB_PKEY",),
        FAILED | {"rail-down", "no-path"},
        sure=True,
    ),
    _Row(
        r"/dev/shm/nccl[^\n]*|failed to extend[^\n]*shm|^\s*shm\s[^\n]*100%[^\n]*",
        "limit",
        "Shared memory is full: /dev/shm is too small.",
        ("give the container more with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of Memory)",),
        FAILED,
    ),
    _Row(
        r"(?i)max locked memory[^\n]*\s\d+\s*$|memlock[^\n]*\s\d{2,6}\s*$|"
        r"(?:ibv_reg_mr|ibv_create_cq|ibv_create_qp|ibv_alloc_pd|mlock)\w*[^\n]*(?:Cannot allocate memory|ENOMEM)|"
        r"Couldn't allocate MR",
        "limit",
        "A process may lock too little memory, so that cards cannot register buffers (memlock).",
        ("set `ulimit -l unlimited` (limits.conf, the service's LimitMEMLOCK, docker --ulimit memlock=-1)",),
        FAILED | {"wrong-nic", "rail-down"},
    ),
    _Row(
        r"[Tt]oo many open files|EMFILE",
        "limit",
        "A process may open too few files.",
        ("raise `ulimit -n`, for example to 65536",),
        FAILED,
    ),
)


def plain_faults(text: str) -> list[Fault]:
    found = []
    for row in _ROWS:
        if match := re.search(row.pattern, text, re.M):
            found.append(
                Fault(row.cause, row.sentence, whole_line(match), row.steps, row.explains, sure=row.sure)
            )
    return found
