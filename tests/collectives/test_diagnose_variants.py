"""`cumulo diagnose` does not change its verdict with the form of a text, and reads what tools next to a run print:
bindings, pings, addresses, versions, reports of flight recorders. Texts are those of strangers or written here."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cumulo.plan.diagnose.verdict import diagnose

OUTPUTS = Path(__file__).parent / "outputs"
LABELS: dict[str, dict[str, str]] = json.loads((OUTPUTS / "labels.json").read_text())
_H100 = "NVIDIA H100 80GB HBM3"
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\S+\s+\S+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+[\d.]+")


def _each(prefix: Callable[[int], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(prefix(at) + line for at, line in enumerate(text.splitlines()))


def _rows(change: Callable[[list[str]], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(
        change(line.split()) if _ROW.match(line) else line for line in text.splitlines()
    )


_FORMS: dict[str, Callable[[str], str]] = {
    "ranks of srun": _each(lambda at: f"{at % 16:2d}: "),
    "a time": _each(lambda at: f"09:11:{at % 60:02d} "),
    "a time in brackets": _each(lambda at: f"[2025-01-07 09:11:{at % 60:02d},123] "),
    "syslog": _each(lambda at: f"Jan  7 09:11:{at % 60:02d} node01 job[221]: "),
    "a host": _each(lambda _: "node01: "),
    "a rank": _each(lambda _: "[rank0]: "),
    "a host and a rank": _each(lambda _: "node01: 0: "),
    "numbers of lines": _each(lambda at: f"{at + 1:6d}\t"),
    "indented": _each(lambda _: "    "),
    "one blank": lambda text: re.sub(r"(?<=\S) {2,}", " ", text),
    "empty lines": lambda text: text.replace("\n", "\n\n"),
    "no headings": lambda text: re.sub(
        r"^#.*(?:out-of-place|size +count|\(B\) +\(elem).*\n?", "", text, flags=re.M
    ),
    "no hash signs": lambda text: re.sub(r"^# ?", "", text, flags=re.M),
    "out of place only": _rows(lambda words: " ".join(words[:9])),
    "Markdown": _rows(lambda words: f"| {' | '.join(words)} |"),
}


@pytest.mark.parametrize("form", _FORMS.values(), ids=list(_FORMS))
def test_the_form_of_a_text_changes_no_verdict(form: Callable[[str], str]) -> None:
    for split, offset in (("blind_4", 0), ("blind_5", 4), ("blind_6", 0)):
        for name, label in list(LABELS[split].items())[offset::9]:
            assert diagnose(form((OUTPUTS / split / f"{name}.txt").read_text())).cause == label, name


def _run(ranks: int, hosts: int, peak: float, unit: float = 1.0) -> str:
    """An all-reduce up to 8 GiB as nccl-tests prints it, in GB/s or in another unit."""
    each = ranks // hosts
    lines = [
        f"#  Rank {rank} Group 0 Pid {rank} on node{rank // each} device {rank % each} [0000:1b:00] {_H100}"
        for rank in range(ranks)
    ]
    for power in range(26, 34):
        size, factor = 1 << power, 2 * (ranks - 1) / ranks
        time_us = round(20 + size * factor / peak / 1e3, 1)
        algbw = size / time_us / 1e3 * unit
        lines.append(f"{size} {size // 4} float sum -1 {time_us} {algbw:.2f} {algbw * factor:.2f} 0")
    return "\n".join(["8x NDR", *lines, ""])


@pytest.mark.parametrize("unit", [1.0, 8.0, 1e9 / 2**30], ids=["GB/s", "Gbit/s", "GiB/s"])
def test_units_of_bandwidths_follow_from_sizes_and_times(unit: float) -> None:
    assert diagnose(_run(8, 1, 475, unit)).cause == "healthy"
    assert diagnose(_run(8, 1, 60, unit)).cause == "pcie-not-nvlink"


def _bound(line: str) -> str:
    return (
        "\n".join(line.format(rank=rank, first=8 * rank, mask=hex(0xFF << 8 * rank)) for rank in range(8))
        + "\n"
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_bound("cpu-bind=MASK - node1, task  {rank}  {rank} [9]: mask 0x1 set") + _run(8, 1, 110), "numa"),
        (_bound("cpu-bind=MASK - node1, task  {rank}  {rank} [9]: mask {mask} set") + _run(8, 1, 475), "healthy"),
        (_bound("[n1:2] Rank {rank} bound to package[0][core:0]") + _run(8, 1, 475), "unknown"),
        (_bound("[n1:2] Rank {rank} bound to package[0][core:0-31]") + _run(8, 1, 475), "healthy"),
        ("$ ping -M do -s 8972 b\nping: local error: message too long, mtu=1500\nunhandled system error", "mtu"),
        ("$ ping -M do -s 8972 b\n8980 bytes from b icmp_seq=1\n" + _run(16, 2, 375), "healthy"),
        ("NCCL version 2.14.3+cuda11.7\nNCCL version 2.18.1+cuda12.1\nremote process exited", "version-mismatch"),
        ("with NCCL version 2.21.5 too\nNCCL version 2.18.1+cuda12.1\nremote process exited", "late-rank"),
        ("mlx5_0:1/RoCE\nGot completion with status=12 opcode=0 vendor err 129 localGid fe80::1", "no-path"),
        ("mlx5_0:1/IB\nGot completion with status=12 opcode=0 vendor err 129 localGid fe80::1", "rail-down"),
        (_run(8, 1, 475) + "\nnow with NCCL_P2P_DISABLE=1:\n" + _run(8, 1, 20), "pcie-not-nvlink"),
        ("mlx5_3 port 1: DOWN\n" + re.sub(r"#.*\n|8x NDR\n", "", _run(16, 2, 97)), "rail-down"),
    ],
)  # fmt: skip
def test_what_other_tools_print_next_to_a_run_is_read(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


def _report(ended: int, more: str = "", second: int = 900) -> str:
    rows = "\n".join(
        f"| {rank} | 0:default_pg | {second if rank == 2 else 900} | 900 | {ended} |" for rank in range(4)
    )
    return f"| rank | pg | last enqueued | last started | last completed |\n{rows}\nErrors: 0\n{more}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_report(900), "healthy"),
        (_report(899, "oldest in-flight age: 3 ms"), "healthy"),
        (_report(899, "oldest in-flight age: 612 s"), "unknown"),
        (_report(899), "unknown"),
        (_report(899, "age: 1 ms", second=897), "late-rank"),
        ("loaded 8 files\n" + _report(900), "unknown"),
    ],
)
def test_a_report_is_healthy_only_if_all_ranks_came_and_nothing_is_old(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


@pytest.mark.parametrize(
    ("operation", "group", "cause"),
    [("ALLREDUCE", 0, "mismatched-calls"), ("ALLTOALL", 0, "late-rank"), ("ALLREDUCE", 1, "late-rank")],
)
def test_ranks_of_a_group_that_give_other_sizes_are_named(operation: str, group: int, cause: str) -> None:
    found = diagnose(
        "\n".join(
            f"[PG ID {group * rank} Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
            f"OpType={operation}, NumelIn={4096 - (rank == 2)}, NumelOut=4096, Timeout(ms)=600000)"
            for rank in range(4)
        )
    )
    assert found.cause == cause and (cause == "late-rank" or "rank 2" in found.sentence)


def _cards(rounds: list[list[float]]) -> str:
    return "ib_write_bw --report_gbits, 400G\n" + "\n".join(
        f"mlx5_{card}  1048576  2000  {rate}  {rate}  0.0467"
        for rates in rounds
        for card, rate in enumerate(rates)
    )


def test_cards_that_are_slow_by_turns_collide_and_one_that_is_always_slow_is_named() -> None:
    assert diagnose(_cards([[392.0, 196.0, 131.0], [196.0, 392.0, 392.0]])).cause == "collisions"
    found = diagnose(_cards([[392.0, 196.0, 392.0], [392.0, 196.5, 392.0]]))
    assert found.cause == "slow-link" and "mlx5_1" in found.sentence


def test_fast_cards_are_not_healthy_next_to_uplinks_that_collide() -> None:
    cards = "\n".join(f"n1->n2 mlx5_{card}  391.50 Gb/s" for card in range(4))
    assert diagnose(cards).cause == "healthy"
    uplinks = "\n".join(
        f"  Eth1/{33 + at}  {rate} Gb/s out" for at, rate in enumerate((398.2, 12.4, 397.6, 0.3))
    )
    assert diagnose(f"{cards}\n{uplinks}").cause == "collisions"


def _matrix(
    rates: list[float], title: str = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)"
) -> str:
    """Of GPUs of which each pair reaches what the slower of the two can."""
    rows = [
        f"  {at} "
        + " ".join("2550.1" if one == at else str(min(rates[at], rates[one])) for one in range(len(rates)))
        for at in range(len(rates))
    ]
    return "\n".join([title, "   D\\D " + " ".join(f"  {at}" for at in range(len(rates))), *rows, ""])


def test_a_matrix_of_pairs_names_the_slow_gpu_and_calls_nothing_healthy() -> None:
    found = diagnose(_matrix([376.2, 377.1, 376.9, 120.3]))
    assert found.cause == "slow-link" and "GPU 3" in found.sentence
    assert "GPU 2" in diagnose(_matrix([276.1, 276.2, 90.1])).sentence
    assert diagnose("4x H100 SXM\n" + _matrix([24.1, 24.2, 24.1, 24.3])).cause == "pcie-not-nvlink"
    assert diagnose(_matrix([376.2, 377.1, 376.9, 376.3])).cause == "unknown"


def test_cells_with_units_are_a_table_and_a_rank_that_alone_is_silent_is_late() -> None:
    row = "all_reduce  4.00 GiB  {} ms  {} GB/s  {} GB/s\n"
    assert diagnose("8x H100\n" + row.format(15.8, 271.8, 475.7)).cause == "healthy"
    assert diagnose("8x H100\n" + row.format(158, 27.18, 47.57)).cause == "pcie-not-nvlink"
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE"
    silent = diagnose("\n".join(f"[Rank {rank}] {timeout}" for rank in range(8) if rank != 5))
    assert silent.cause == "late-rank" and "Rank 5" in silent.sentence
    group = diagnose("\n".join(f"[Rank {rank}] {timeout}" for rank in range(0, 8, 2)))
    assert group.cause == "late-rank" and "does not say" in group.sentence


def _ranks(heads: str, row: str, *others: str) -> str:
    """A table of eight ranks as people's scripts print it; `others`: the rows of the last ranks."""
    rows = [row.format(rank=rank) for rank in range(8 - len(others))]
    return "\n".join(
        [heads, *rows, *(one.format(rank=8 - len(others) + at) for at, one in enumerate(others))]
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_ranks("rank seq op state age_s", "{rank} 42 nccl:all_reduce started 612.1"), "unknown"),
        (_ranks("rank seq op state age_ms", "{rank} 42 nccl:all_reduce started 6.1"), "healthy"),
        (_ranks("rank seq op state age", "{rank} 42 nccl:all_reduce started 6.1"), "unknown"),
        (_ranks("rank,state,op,seq_id", "{rank},completed,all_reduce,42"), "healthy"),
        (_ranks("rank,state,op,seq_id", "{rank},completed,all_reduce,42", "{rank} has no dump"), "unknown"),
        (_ranks("rank,state,op,seq", "{rank},started,reduce,42", "{rank},completed,reduce,41"), "late-rank"),
        (_ranks("age_ms op seq rank", "4 all_reduce 42 {rank}", "4 all_reduce 41 {rank}"), "unknown"),
        (_ranks("age_s op seq rank", "90 all_reduce 42 {rank}", "90 all_reduce 41 {rank}"), "late-rank"),
        (_ranks("rank seq op numel", "{rank} 42 all_reduce 8", "{rank} 42 all_reduce 9"), "mismatched-calls"),
        (_ranks("rank seq op", "{rank} 42 all_reduce", "{rank} 42 broadcast"), "mismatched-calls"),
        (_ranks("|last completed|rank|last enqueued|", "|99|{rank}|104|", "|99|{rank}|99|"), "late-rank"),
        (_ranks("rank enqueued started completed age_s", "{rank} 12 10 9 90", "{rank} 12 9 9 90"), "late-rank"),
        (_ranks("rank enqueued started completed age_ms", "{rank} 12 10 9 3", "{rank} 13 9 9 3"), "healthy"),
    ],
)  # fmt: skip
def test_tables_of_ranks_are_read_by_their_headings(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


def _stranger(name: str) -> str:
    return (OUTPUTS / "blind_6" / f"blind_6_{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new", "cause"),
    [
        ("04", "found 32 nics", "found 31 nics", "rail-down"),
        ("04", "protocol RDMA", "protocol SENDRECV", "unknown"),
        ("04", "Libfabric/3/GDRDMA", "Libfabric/3", "unknown"),
        ("04", "NVLS multicast", "some", "unknown"),
        ("26", "a2-highgpu-8g", "a3-highgpu-8g", "wrong-nic"),
        ("28", "rank 0 nranks 1 ", "rank 0 nranks 8 ", "unknown"),
        ("33", "nodes=3", "nodes=4", "no-connection"),
    ],
)
def test_what_was_healthy_or_named_changes_with_the_line_that_said_so(
    name: str, old: str, new: str, cause: str
) -> None:
    text = _stranger(name).replace("WORLD_SIZE=24\n", "\n")  # the launcher's line says it, too
    changed = text.replace(old, new)
    assert changed != text and diagnose(text).cause != cause and diagnose(changed).cause == cause
