"""`cumulo diagnose` on pasted outputs: the common causes are named, and nothing is called healthy or faulty
without a sign. The texts in outputs/ have the formats of the real tools, and names that begin with their cause."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cumulo.diagnose.diagnose import diagnose
from cumulo.diagnose.diagnosis import CAUSES
from cumulo.diagnose.nccl_tests import nccl_test_runs

OUTPUTS = sorted((Path(__file__).parent / "outputs").glob("*.txt"))
_H100, _A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def _label(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.stem)
def test_the_common_causes_are_named_and_others_are_unknown(path: Path) -> None:
    found = diagnose(path.read_text())
    assert found.cause == _label(path), found
    assert found.cause in CAUSES and found.sentence
    assert found.next_steps or found.cause == "healthy"


def test_every_cause_that_bandwidths_and_tools_show_has_an_output() -> None:
    of_messages = {"no-connection", "version-mismatch", "program-fault", "gpu-out-of-memory"}
    assert {_label(path) for path in OUTPUTS} == set(CAUSES) - of_messages


@pytest.mark.parametrize(
    "text", ["", "hello", "1 2 3 4 5 6 7 8", "{}", "NCCL INFO", "# Avg bus bandwidth    : 3", "{" * 500]
)
def test_what_says_nothing_is_not_judged(text: str) -> None:
    found = diagnose(text)
    assert found.cause == "unknown" and found.confidence == "low" and found.next_steps


@pytest.mark.parametrize("text", ["{'" * 4_000, '{"a": ' * 3_000 + "}" * 3_000, "{'a': b'}" * 2_000])
def test_braces_that_are_no_dump_cost_little_and_say_nothing(text: str) -> None:
    assert diagnose(text).cause == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "\n", " \n", "Rank 1 on a device 1 [", "x NCCL INFO a:1:1 [0] nranks 1 ", "RDMA_Write BW ", '"size": 1 ',
        "\x1b]", "NCCL INFO NET/OFI ", "{",
    ],
)  # fmt: skip
def test_a_text_of_twice_the_length_takes_about_twice_the_time(text: str) -> None:
    def seconds(characters: int) -> float:
        begin_s = time.process_time()
        diagnose("Rank 0 " + text * (characters // len(text)) + "!")
        return time.process_time() - begin_s

    # Twice the time is linear and four times quadratic; the constant is for clocks and caches.
    assert min(seconds(20_000) for _ in range(2)) < 3 * seconds(10_000) + 0.05


def test_ranks_follow_from_the_ratio_of_bandwidths() -> None:
    (run,) = nccl_test_runs("8589934592 2147483648 float sum -1 44037 195.06 386.07 0 44037 195.06 386.07 0")
    inferred = run.inferred_ranks()
    assert inferred is not None and round(inferred[0]) in range(94, 99)  # two digits tell no more


@pytest.mark.parametrize(
    "line",
    [
        "   134217728      33554432     float     sum      -1   1542.0   87.04  163.20      0 "
        "  1546.1   86.81  162.76      0",
        "   134217728      33554432   float     sum     1542.0   87.04  163.20  1e-06   1546.1   86.81  "
        "162.76  1e-06",
        "| 134217728 | 33554432 | float | sum | -1 | 1542.0 | 87.04 | 163.20 | 0 |",
        "134217728 33554432 bfloat16 sum -1 1542.0 87.04 163.20 N/A",
    ],
)
def test_rows_are_found_in_all_versions_of_the_table(line: str) -> None:
    (run,) = nccl_test_runs(line)
    assert run.rows[0].busbw == 163.20 and run.rows[0].size_bytes == 1 << 27 and not run.rows[0].wrong


def _table(ranks: int, peak: float, wrong: int = 0) -> str:
    """An all-reduce's rows up to 8 GiB, as nccl-tests prints them."""
    rows = []
    for power in range(26, 34):
        size, factor = 1 << power, 2 * (ranks - 1) / ranks
        time_us = round(20 + size * factor / peak / 1e3, 1)
        algbw = size / time_us / 1e3
        rows.append(
            f"{size} {size // 4} float sum -1 {time_us} {algbw:.2f} {algbw * factor:.2f} {wrong} "
            f"{time_us} {algbw:.2f} {algbw * factor:.2f} 0"
        )
    return "\n".join(["#  size  count  type  redop  root  time  algbw  busbw  #wrong", *rows, ""])


def _devices(ranks: int, hosts: int, name: str) -> str:
    each = ranks // hosts
    return "# nThread 1 nGpus 1\n" + "".join(
        f"#  Rank {rank:2} Group 0 Pid {9000 + rank} on node{rank // each} device {rank % each} "
        f"[0000:1b:00] {name}\n"
        for rank in range(ranks)
    )


def _slow(peak: float = 60, name: str = _H100) -> str:
    return _devices(8, 1, name) + _table(8, peak)


def _far(peak: float) -> str:
    return _devices(16, 2, _H100) + _table(16, peak)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_slow(475).replace(" 0 ", " 3 "), "wrong-results"),
        ("srun -N 2 --ntasks-per-node=8 all_reduce_perf -b 64M -e 8G -f 2 -g 1 -n 100\n"
         + _devices(16, 2, "NVIDIA H200") + _table(16, 470), "healthy"),
        ("mpirun -np 2 -npernode 1 all_reduce_perf -b 64M -e 8G -f 2 -g 8\n"
         + _devices(8, 1, "NVIDIA H200") + _table(8, 470), "wrong-ranks"),
        (_slow(231, _A100) + _devices(16, 2, _A100) + _table(16, 9), "wrong-nic"),
        (_devices(8, 1, "Tesla V100-PCIE-16GB") + _table(8, 10.4), "healthy"),
        (_slow(475) + "NVRM: Xid (PCI:0000:1b): 74", "gpu-fault"),
        ("8x NDR\n" + _far(280) + "mlx5_4 -> PORT_DOWN", "rail-down"),
        ("8x NDR, nvidia_peermem not loaded\n" + _far(300), "no-gdr"),
        (_devices(4, 1, "NVIDIA L40S") + _table(4, 9)
         + "LnkCap: Speed 16GT/s, Width x16\nLnkSta: Speed 16GT/s, Width x8\n", "slow-link"),
        ("8x NDR\n" + _far(250) + "rx_prio3_pause: 9120400\nrx_prio3_discards: 41022\n", "congested"),
        (_slow(), "pcie-not-nvlink"),
        ("export NCCL_MAX_NCHANNELS=1\n" + _slow(), "setting"),
        ("mpirun -x NCCL_ALGO=Tree all_reduce_perf\n" + _slow(230), "setting"),
        ("NCCL_P2P_LEVEL=LOC\n" + _slow(), "pcie-not-nvlink"),
        ("HW Slowdown : Active\n" + _slow(210), "gpu-fault"),
    ],
)  # fmt: skip
def test_what_a_text_names_explains_what_its_bandwidth_shows(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


@pytest.mark.parametrize(
    "text",
    [
        "8x NDR\n" + _far(371) + "mlx5_4 -> PORT_DOWN",  # the bandwidth is fine, and a port is down
        "HW Slowdown : Active\n" + _slow(475),
        "all 16 GPUs:\n" + _slow(475),  # and 8 ran
        _slow(475) + _slow(400),  # one of two equal runs is slower
        _slow(300),  # slow, and nothing says why
        _devices(8, 1, "Some GPU") + _table(8, 300),  # a GPU that is not known here
        "8x 25G\n" + _far(371),  # more than the stated network carries
        "n1: Test NCCL failure common.cu:958 'unhandled system error'",
    ],
)
def test_nothing_is_called_healthy_or_faulty_without_a_sign(text: str) -> None:
    assert diagnose(text).cause == "unknown"


@pytest.mark.parametrize(
    "words",
    [
        "NVLink is 900 GB/s by the data sheet, was it ever?",
        "our other cluster of B200 does 850 GB/s",
        "mlx5_9 (storage, not cabled) port 1 ==> ibp9 (Down)",
        "LnkCap: Speed 32GT/s, Width x16\nLnkSta: Speed 2.5GT/s (downgraded), Width x16",
        "out_of_sequence: 3\nrx_prio3_pause: 1204\nSymbolErrorCounter:..............0",
        "SW Power Cap : Active\nHW Slowdown : Not Active",
        "NCCL_IB_TC=106 NCCL_IB_GID_INDEX=3 NCCL_SOCKET_IFNAME=eth0",
    ],
)
def test_specifications_other_machines_and_idle_links_accuse_no_healthy_run(words: str) -> None:
    assert diagnose(words + "\n" + _slow(475)).cause == "healthy"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("n1: connect failed : No route to host", "no-connection"),
        ("port: 29500, name: EADDRINUSE, message: address already in use", "no-connection"),
        ("Mismatched NCCL version detected : rank 8 version 21903 rank 0 version 22005", "version-mismatch"),
        ("Error type: COLLECTIVE_TYPE_MISMATCH\nCulprit rank 2; found collective type: 'broadcast'",
         "mismatched-calls"),
        ("Got completion with status=12 opcode=0 vendor err 129", "rail-down"),
        ("mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9", "late-rank"),
    ],
)  # fmt: skip
def test_a_run_that_failed_says_why(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


def _perftest(command: str, card: str, gbps: float) -> str:
    heading = " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n"
    return f"$ {command} -d {card}\nRDMA_Write BW Test\n{heading} 65536 5000 {gbps} {gbps} 0.7\n"


def test_tests_of_cards_are_compared_with_each_other_and_with_their_port() -> None:
    several = "".join(_perftest("ib_write_bw", f"mlx5_{n}", g) for n, g in enumerate((391.2, 391.4, 196.9)))
    found = diagnose(several)
    assert found.cause == "slow-link" and "mlx5_2" in found.sentence
    fast, slow = _perftest("ib_write_bw", "mlx5_0", 392), _perftest("ib_write_bw --use_cuda=0", "mlx5_0", 61)
    assert diagnose(fast + slow).cause == "no-gdr"
    assert diagnose("Rate: 400\n" + fast).cause == "healthy"
    assert diagnose("Rate: 400\n" + _perftest("ib_write_bw", "mlx5_0", 190)).cause == "slow-link"
    assert diagnose(fast).cause == "unknown"  # the port's rate is not stated


def _dump(rank: int, took_ms: float, ranks: int = 4) -> str:
    entry = {"collective_seq_id": 9, "profiling_name": "nccl:all_reduce", "state": "completed"}
    group = {"0": {"ranks": str(list(range(ranks)))}}
    return json.dumps({"rank": rank, "pg_config": group, "entries": [entry | {"duration_ms": took_ms}]})


def test_dumps_in_step_are_healthy_only_if_all_are_there_and_none_is_waited_for() -> None:
    all_ranks = [_dump(rank, 2.0 + rank / 10) for rank in range(4)]
    assert diagnose("\n".join(all_ranks)).cause == "healthy"
    assert diagnose("\n".join(all_ranks[:3])).cause == "unknown"
    waited = diagnose("\n".join([*all_ranks[:3], _dump(3, 0.1)]))
    assert waited.cause == "late-rank" and "rank 3" in waited.sentence


def test_a_rank_that_alone_is_silent_is_late_and_of_a_group_it_is_not_said_which() -> None:
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE"
    silent = diagnose("\n".join(f"[Rank {rank}] {timeout}" for rank in range(8) if rank != 5))
    assert silent.cause == "late-rank" and "Rank 5" in silent.sentence
    group = diagnose("\n".join(f"[Rank {rank}] {timeout}" for rank in range(0, 8, 2)))
    assert group.cause == "late-rank" and "does not say" in group.sentence


def test_a_matrix_of_links_is_for_another_command() -> None:
    found = diagnose("        GPU0    GPU1\nGPU0     X      SYS\nGPU1    SYS      X")
    assert "cumulo topology" in found.next_steps[0]


def _each(prefix: str) -> Callable[[str], str]:
    return lambda text: "\n".join(prefix + line for line in text.splitlines())


_FORMS: dict[str, Callable[[str], str]] = {
    "srun -l": _each("0: "),
    "mpirun": _each("[1,0]<stdout>:"),
    "kubectl": _each("[pod/nccl-launcher-x7/main] "),
    "a log collector": _each("2025-03-01T10:00:00.123Z "),
    "a mail": _each("> "),
    "colours": _each("\x1b[32m"),
    "one blank": lambda text: re.sub(r"(?<=\S) {2,}", " ", text),
    "empty lines": lambda text: text.replace("\n", "\n\n"),
}


@pytest.mark.parametrize("form", _FORMS.values(), ids=list(_FORMS))
def test_the_form_of_a_text_changes_no_verdict(form: Callable[[str], str]) -> None:
    for path in OUTPUTS[::4]:
        assert diagnose(form(path.read_text())).cause == _label(path), path.name


@pytest.mark.parametrize(
    ("text", "cause", "sentence", "step"),
    [
        (
            "NVRM: Xid (PCI:0000:4b:00): 79, pid=1, GPU has fallen off the bus.",
            "gpu-fault",
            "fell off",
            "power off",
        ),
        (
            "NVRM: Xid (PCI:0000:4b:00): 74, pid=1, NVLink: fatal error",
            "gpu-fault",
            "NVLink",
            "nvlink --status",
        ),
        (
            "NVRM: Xid (PCI:0000:4b:00): 94, pid=1, Contained: CE User Channel",
            "gpu-fault",
            "could not",
            "restart",
        ),
        ("NVRM: Xid (PCI:0000:4b:00): 63, pid=1, Row Remapper: New row", "gpu-fault", "can go on", "reset"),
        ("NVRM: Xid (PCI:0000:4b:00): 64, pid=1, Row Remapper: Error", "gpu-fault", "no spare", "replaced"),
        ("Xid (PCI:0000:4b:00): 31, pid=1, MMU Fault", "program-fault", "must not", "LAUNCH_BLOCKING"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "gpu-out-of-memory",
            "no free memory",
            "plan train",
        ),
    ],
)
def test_errors_of_a_gpu_have_an_advice_of_their_own(text: str, cause: str, sentence: str, step: str) -> None:
    found = diagnose(text)
    assert (found.cause, sentence in found.sentence) == (cause, True)
    assert step in found.next_steps[0]
