"""Settings of NCCL, libfabric and CUDA that a text shows, and the faults that some of them are.

They stand in logs ("NCCL_PROTO set by environment to LL"), in commands (-x NCCL_PROTO=LL) and in environments."""

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import LOG_STEP, TOPO_STEP
from cumulo.plan.diagnose.named.fault import SLOW, SLOW_NETWORK, SLOW_NODE, Fault

_LOGGED = re.compile(r"\b((?:NCCL|RCCL|FI|HSA)_\w+)\s+set\s+(?:by (?:the )?environment\s+)?to\s+([^\s,;]+)")
_GIVEN = re.compile(r"\b((?:NCCL|RCCL|FI|HSA|CUDA|UCX|TORCH)_[A-Z0-9_]+)\s*[=:]\s*[\"']?([^\s\"',;)]+)")
# Sentences of people who say what is no longer so, or what they tried besides.
_NOT_SET = re.compile(
    r"\b(?:remov\w*|unset\w*|without|no longer|not set|was set|tried|try|also with|even with|would|should|after\w*|"
    r"same with|fixed|works with|helps?|sbatch without|instead of)\b",
    re.I,
)
_NO_PLUGIN = re.compile(
    r"libnccl-net\S*: cannot open|No plugin found|[Cc]ould not find[^\n]{0,30}libnccl-net|Plugin[^\n]*No such file"
)
_NEEDS_PLUGIN = re.compile(
    r"\befa\b|\bp4de?\.|\bp5(?:en?)?\.|\bp6-|\bp3dn\.|\btrn\d|\ba3-(?:high|mega)gpu|TCPXO?\b|FasTrak", re.I
)


def settings_of(text: str) -> dict[str, str]:
    """Name to value; what a log says counts before what a command says."""
    given: dict[str, str] = {}
    for line in text.splitlines():
        if "NCCL INFO" not in line and _NOT_SET.search(line):
            continue
        given.update((name, value.rstrip(".:")) for name, value in _GIVEN.findall(line))
    return given | {name: value.rstrip(".:") for name, value in _LOGGED.findall(text)}


def setting_faults(text: str) -> list[Fault]:
    settings = settings_of(text)
    found = [one for name, value in settings.items() if (one := _fault(name, value)) is not None]
    return [*found, *_no_plugin(text)]


def _no_plugin(text: str) -> list[Fault]:
    """Machines whose network needs a plugin: where it is not found NCCL sends over TCP."""
    missing, needed = _NO_PLUGIN.search(text), _NEEDS_PLUGIN.search(text)
    if missing is None or needed is None:
        return []
    return [
        Fault(
            "no-plugin",
            f"NCCL does not find the plugin for {needed[0].strip()} (libnccl-net.so), and sends over TCP.",
            missing[0].strip(),
            (
                "install aws-ofi-nccl (or the cloud's plugin) in the image, and put it into LD_LIBRARY_PATH",
                "look for `NET/OFI` (or the plugin's name) in the log of the next run",
            ),
            frozenset({"wrong-nic", "unknown"}),
            sure=True,
        )
    ]


def _fault(name: str, value: str) -> Fault | None:
    number = int(value) if value.isdecimal() else None
    low, words = value.lower(), f"{name}={value}"
    if name == "NCCL_PROTO" and low in ("ll", "^simple", "ll,ll128", "ll128,ll"):
        return _limit(
            words, f"{words} forces a protocol for small messages: it moves flags next to the data.", SLOW
        )
    if name == "NCCL_ALGO" and low in ("tree", "collnet", "collnetchain", "collnetdirect", "pat"):
        return _limit(
            words, f"{words} forces an algorithm that does not suit this run.", SLOW, least="medium"
        )
    if (name == "NCCL_ALGO" and low in ("ring", "^nvls")) or (name == "NCCL_NVLS_ENABLE" and value == "0"):
        return Fault(
            "nvls-off",
            f"{words} keeps NCCL from using NVLS: switches do not add, so that a ring is the best there is.",
            words,
            (f"remove {name}",),
            frozenset({"nvls-off"}),
        )
    if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_P2P_NCHANNELS") and number and number <= 4:
        return _limit(words, f"{words} lets NCCL use only {number} channel{'s' if number > 1 else ''}.", SLOW)
    if name in ("NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE") and number and number < 1 << 20:
        return _limit(words, f"{words} makes NCCL's buffers too small.", SLOW)
    if name == "NCCL_NTHREADS" and number and number <= 128:
        return _limit(words, f"{words} gives each channel too few threads.", SLOW)
    if name == "CUDA_LAUNCH_BLOCKING" and value == "1":
        return _limit(words, f"{words} makes every kernel wait for the one before.", SLOW, least="medium")
    if name == "NCCL_PXN_DISABLE" and value == "1":
        return Fault(
            "setting",
            f"{words}: GPUs without a near card may not send through a neighbour that has one.",
            words,
            ("remove NCCL_PXN_DISABLE", LOG_STEP),
            SLOW_NETWORK - {"wrong-nic", "shared-path"},
            confidence="medium",
        )
    if (name == "NCCL_IB_DISABLE" and value == "1") or (name == "NCCL_NET" and low == "socket"):
        return _over_tcp(words)
    if name == "FI_PROVIDER" and low in ("tcp", "sockets", "udp", "tcp;ofi_rxm"):
        return _over_tcp(words)
    if name == "NCCL_SOCKET_IFNAME" and re.match(r"=?(?:lo|docker|virbr|veth|br-)", low):
        return Fault(
            "wrong-nic",
            f"{words} names an interface that does not lead to other nodes.",
            words,
            ("name the interface that joins the nodes in NCCL_SOCKET_IFNAME", LOG_STEP),
            frozenset({"wrong-nic", "failed", "unknown", "no-connection"}),
        )
    if (name == "NCCL_NET_GDR_LEVEL" and low in ("0", "loc")) or (
        name == "FI_EFA_USE_DEVICE_RDMA" and value == "0"
    ):
        return Fault(
            "no-gdr",
            f"{words} turns GPUDirect RDMA off: data is copied through host memory.",
            words,
            (f"remove {name}", LOG_STEP),
            SLOW_NETWORK - {"rail-down"},
        )
    if (name == "NCCL_P2P_DISABLE" and value == "1") or (name == "NCCL_P2P_LEVEL" and low in ("0", "loc")):
        return Fault(
            "pcie-not-nvlink",
            f"{words}: GPUs of a node may not reach each other's memory, and NVLink is not used.",
            words,
            (f"remove {name}", TOPO_STEP),
            SLOW_NODE - {"nvls-off", "late-rank"},
        )
    return None


def _limit(words: str, sentence: str, explains: frozenset[str], least: str = "high") -> Fault:
    name = words.split("=")[0]
    step = f"remove {name} and run again: NCCL chooses better by itself"
    return Fault("setting", sentence, words, (step, LOG_STEP), explains, confidence=least)


def _over_tcp(words: str) -> Fault:
    return Fault(
        "wrong-nic",
        f"{words} makes NCCL send over TCP although it could use RDMA cards.",
        words,
        (f"remove {words.split('=')[0]}", LOG_STEP),
        SLOW_NETWORK,
        sure=True,
    )
