"""`cumulo diagnose` on pasted outputs: cumulo/plan/diagnose. The texts have the formats of the real tools; those of
held_out/ were written before the rules; two rules were changed after one of them was called healthy wrongly."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cumulo.plan.diagnose.nccl_tests_text import nccl_test_runs
from cumulo.plan.diagnose.verdict import CAUSES, diagnose

OUTPUTS = Path(__file__).parent / "outputs"
LABELS: dict[str, dict[str, str]] = json.loads((OUTPUTS / "labels.json").read_text())


@pytest.mark.parametrize("split", LABELS)
def test_nine_of_ten_causes_are_named_and_none_is_called_healthy_wrongly(split: str) -> None:
    found = {name: diagnose((OUTPUTS / split / f"{name}.txt").read_text()).cause for name in LABELS[split]}
    wrong = {name: cause for name, cause in found.items() if cause != LABELS[split][name]}
    assert len(wrong) <= 0.1 * len(found), wrong
    assert "healthy" not in wrong.values(), wrong


def test_every_cause_comes_with_a_title_and_with_what_to_run_next() -> None:
    for name, label in list(LABELS["tuned"].items())[::3]:
        found = diagnose((OUTPUTS / "tuned" / f"{name}.txt").read_text())
        assert found.cause in CAUSES and found.sentence
        assert found.next_steps or label == "healthy"


@pytest.mark.parametrize(
    "text", ["", "hello", "1 2 3 4 5 6 7 8", "{}", "NCCL INFO", "# Avg bus bandwidth    : 3", "{" * 500]
)
def test_what_says_nothing_is_not_judged(text: str) -> None:
    assert diagnose(text).cause == "unknown"


def test_ranks_follow_from_the_ratio_of_bandwidths() -> None:
    line = "8589934592 2147483648 float sum -1 44037 195.06 386.07 0 44037 195.06 386.07 0"
    (run,) = nccl_test_runs(line)
    test = run.test
    inferred = test.inferred_ranks()
    assert inferred is not None and round(inferred[0]) in range(94, 99)  # two digits tell no more


@pytest.mark.parametrize(
    "line",
    [
        "[1,0]<stdout>:   134217728      33554432     float     sum      -1   1542.0   87.04  163.20      0 "
        "  1546.1   86.81  162.76      0",
        "   134217728      33554432   float     sum     1542.0   87.04  163.20  1e-06   1546.1   86.81  "
        "162.76  1e-06",
        "|  128MB |  163.20GBps |   87.04GBps |",
        "worker-0: 134217728 33554432 bfloat16 sum -1 1542.0 87.04 163.20 N/A",
        "   134217728      33554432     float    none      -1   1542.0   87.04  163.20      0",
    ],
)
def test_rows_are_found_in_all_versions_of_the_table(line: str) -> None:
    (run,) = nccl_test_runs(line)
    assert run.test.rows[0].busbw == 163.20 and run.test.rows[0].size_bytes == 1 << 27


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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_devices(8, 1, "NVIDIA H100 80GB HBM3") + _table(8, 475, wrong=3), "wrong-results"),
        ("srun -N 2 --ntasks-per-node=8 all_reduce_perf -b 64M -e 8G -f 2 -g 1 -n 100\n"
         + _devices(16, 2, "NVIDIA H200") + _table(16, 470), "healthy"),
        ("mpirun -np 2 -npernode 1 all_reduce_perf -b 64M -e 8G -f 2 -g 8\n"
         + _devices(8, 1, "NVIDIA H200") + _table(8, 470), "wrong-ranks"),
        (_devices(8, 1, "NVIDIA A100-SXM4-80GB") + _table(8, 231)
         + _devices(16, 2, "NVIDIA A100-SXM4-80GB") + _table(16, 9), "wrong-nic"),
        ("8x400G\n" + _devices(16, 2, "NVIDIA H100 80GB HBM3") + _table(16, 338), "rail-down"),
        (_devices(8, 1, "Tesla V100-PCIE-16GB") + _table(8, 10.4), "healthy"),
        (_devices(8, 1, "NVIDIA H100 80GB HBM3") + _table(8, 475) + "NVRM: Xid (PCI:0000:1b): 74", "gpu-fault"),
        ("n1: Test NCCL failure common.cu:958 'unhandled system error'", "failed"),
        ("# OSU MPI-CUDA Bandwidth Test v7.3, 400G ports\n# Size  Bandwidth (MB/s)\n4194304  9900.10\n", "no-gdr"),
    ],
)  # fmt: skip
def test_what_else_a_text_may_say_is_read(text: str, cause: str) -> None:
    """Wrong sums, -n that counts iterations, each node by itself, the worst of two runs, seven of eight rails, a
    slow board that is healthy, a driver's message, an error, another tool."""
    assert diagnose(text).cause == cause


def _lines(busbw: list[float]) -> str:
    """One size on several pairs of nodes, each named in its line."""
    size, factor = 8 << 30, 15 / 16
    return "".join(
        f"n{at},m{at} {size} {size // 4} float sum -1 {size * factor / one / 1e3:.1f} {one / factor:.2f} {one} 0\n"
        for at, one in enumerate(busbw)
    )


_H100, _A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("the sister node gives 233 GB/s\n" + _devices(8, 1, _A100) + _table(8, 190), "slow-link"),
        ("8x NDR. last week these nodes did 386\n" + _devices(16, 2, _H100) + _table(16, 338), "rail-down"),
        ("8x NDR\n" + _devices(16, 2, _H100) + _table(16, 371) + "mlx5_4 -> PORT_DOWN", "rail-down"),
        ("8x NDR, nvidia_peermem is not loaded\n" + _devices(16, 2, _H100) + _table(16, 371), "no-gdr"),
        (_devices(4, 1, "NVIDIA L40S") + _table(4, 19)
         + "LnkCap: Speed 16GT/s, Width x16\nLnkSta: Speed 16GT/s, Width x8\n", "slow-link"),
        ("all 16 GPUs:\n" + _devices(8, 1, _H100) + _table(8, 475), "wrong-ranks"),
        ("pairs of H200, 16 ranks, 8x NDR\n" + _lines([375.0, 376.0, 328.0, 374.0]), "rail-down"),
        ("8x H100\nall_reduce size=4GiB time=125.3ms algbw=34.3 GB/s busbw=480 Gbit/s", "pcie-not-nvlink"),
    ],
)  # fmt: skip
def test_what_speaks_against_a_run_is_heard_though_its_bandwidth_is_near(text: str, cause: str) -> None:
    assert diagnose(text).cause == cause


@pytest.mark.parametrize(
    "words",
    [
        "NVLink is 900 GB/s by the data sheet, was it ever?",
        "our other cluster of B200 does 850 GB/s",
        "before the repair it was 60 GB/s",
        "8x H100 node, and a port of the same box is rated 800 GB/s",
        "mlx5_9 (storage, not cabled) port 1 ==> ibp9 (Down)",
        "LnkCap: Speed 32GT/s, Width x16\nLnkSta: Speed 2.5GT/s (downgraded), Width x16",
        "firewalld is inactive (dead)",
        "ACSCtl: SrcValid- TransBlk- ReqRedir- CmpltRedir-",
        "out_of_sequence: 3\nrx_prio3_pause: 1204\nSymbolErrorCounter:..............0",
        "SW Power Cap : Active\nHW Slowdown : Not Active",
        "2: eno1: <UP> mtu 1500 state UP\n3: ens1f0np0: <UP> mtu 9000 state UP",
        "NCCL_IB_TC=106 NCCL_IB_GID_INDEX=3 NCCL_SOCKET_IFNAME=eth0",
    ],
)
def test_specifications_other_machines_and_idle_links_accuse_no_healthy_run(words: str) -> None:
    assert diagnose(words + "\n" + _devices(8, 1, _H100) + _table(8, 475)).cause == "healthy"


def test_of_several_cards_the_slow_one_is_named() -> None:
    heading = " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n"
    text = "".join(
        f"RDMA_Write BW Test\n Device : mlx5_{card}\n{heading} 65536 5000 {gbps} {gbps} 0.7\n"
        for card, gbps in enumerate((391.2, 391.4, 196.9, 391.1))
    )
    found = diagnose(text)
    assert found.cause == "slow-link" and "mlx5_2" in found.sentence


_PREFIXES = {
    "srun -l": "0: ",
    "mpirun": "[1,0]<stdout>:",
    "kubectl": "[pod/nccl-launcher-x7/main] ",
    "a log collector": "2025-03-01T10:00:00.123Z ",
    "a mail": "> ",
    "colours": "\x1b[32m",
}


@pytest.mark.parametrize("prefix", _PREFIXES.values(), ids=list(_PREFIXES))
def test_what_launchers_write_before_each_line_changes_no_verdict(prefix: str) -> None:
    for name, label in list(LABELS["blind_4"].items())[::4]:
        text = (OUTPUTS / "blind_4" / f"{name}.txt").read_text()
        assert diagnose("\n".join(prefix + line for line in text.splitlines())).cause == label, name


def _slow(peak: float = 60, name: str = _H100) -> str:
    return _devices(8, 1, name) + _table(8, peak)


@pytest.mark.parametrize(
    ("words", "run", "cause"),
    [
        ("export NCCL_MAX_NCHANNELS=1", _slow(), "setting"),
        ("we removed NCCL_MAX_NCHANNELS=1 yesterday", _slow(), "pcie-not-nvlink"),
        ("mpirun -x NCCL_ALGO=Tree", _slow(230), "setting"),
        ("NCCL_P2P_LEVEL=LOC", _slow(), "pcie-not-nvlink"),
        ("MIG mode is on", _slow(), "setting"),
        ("ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+", _slow(9, "NVIDIA L40S"), "acs"),
        ("BOOT_IMAGE=/vmlinuz amd_iommu=on", _slow(4, "NVIDIA L40S"), "acs"),
        ("BOOT_IMAGE=/vmlinuz amd_iommu=on iommu=pt", _slow(4, "NVIDIA L40S"), "unknown"),
        ("index, clocks.sm [MHz]\n0, 1980\n1, 1980\n2, 690", _slow(210), "slow-gpu"),
        ("index, clocks.sm [MHz]\n0, 1980\n1, 1980\n2, 1965", _slow(475), "healthy"),
        ("GPU 2: Link 7: CRC Errors: 911203", _slow(260), "link-errors"),
        ("nvidia-fabricmanager.service: inactive (dead)", _slow(), "fabric-manager"),
        ("2x g5.8xlarge\nn:1:1 [0] NCCL INFO Using network Socket",
         _devices(2, 2, "NVIDIA A10G") + _table(2, 2.8), "healthy"),
        ("2x g5.8xlarge, ConnectX\nn:1:1 [0] NCCL INFO Using network Socket",
         _devices(2, 2, "NVIDIA A10G") + _table(2, 0.1), "wrong-nic"),
        ("3090 pair with its NVLink bridge", _devices(2, 1, "NVIDIA GeForce RTX 3090") + _table(2, 51), "healthy"),
        ("3090 pair with its NVLink bridge", _devices(2, 1, "NVIDIA GeForce RTX 3090") + _table(2, 9),
         "pcie-not-nvlink"),
        ("", _devices(2, 1, "AMD Instinct MI300X") + _table(2, 48), "healthy"),
        ("", _slow(182, _A100), "slow-link"),
    ],
)  # fmt: skip
def test_what_a_text_names_explains_what_its_bandwidth_shows(words: str, run: str, cause: str) -> None:
    assert diagnose(f"{words}\n{run}").cause == cause


@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        ("n1: connect failed : No route to host\n64 bytes from 10.0.0.1: icmp_seq=1", "firewall", "ports"),
        ("Mismatched NCCL version detected : rank 8 version 21903 rank 0 version 22005", "version-mismatch", ""),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "limit", "memlock"),
        ("NCCL WARN Call to ibv_modify_qp failed with error Connection timed out", "no-path", "GID"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE\n"
         "[rank0]: KeyError: 'labels'", "process-died", "rank 0"),
        ("Error type: COLLECTIVE_TYPE_MISMATCH\nCulprit rank 2; found collective type: 'broadcast'",
         "mismatched-calls", "rank 2"),
        ("port: 29500, name: EADDRINUSE, message: address already in use", "no-connection", "port"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "failed", "same GPU"),
    ],
)  # fmt: skip
def test_a_run_that_failed_says_why(text: str, cause: str, says: str) -> None:
    found = diagnose(text)
    assert found.cause == cause and says in found.sentence


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


@pytest.mark.parametrize(
    "write", [json.dumps, repr, lambda one: "seq={collective_seq_id} {profiling_name} {state}".format(**one)]
)
def test_dumps_are_read_entry_by_entry(write: Callable[[dict[str, object]], str]) -> None:
    def entry(number: int, state: str) -> str:
        return write({"collective_seq_id": number, "profiling_name": "nccl:all_reduce", "state": state})

    ranks = {
        0: [(7, "completed"), (8, "scheduled")],
        1: [(7, "completed")],
        2: [(7, "completed"), (8, "started")],
    }
    lines = [
        line for rank, calls in ranks.items() for line in (f"rank {rank}", *(entry(*call) for call in calls))
    ]
    found = diagnose("\n".join(lines))
    assert found.cause == "late-rank" and "Rank 1 did not come to all_reduce number 8" in found.sentence


@pytest.mark.parametrize("text", ["{'" * 4_000, "{'a': " * 3_000 + "}" * 3_000, "{'a': b'}" * 2_000])
def test_braces_that_are_no_dump_cost_little_and_say_nothing(text: str) -> None:
    assert diagnose(text).cause == "unknown"


def test_a_matrix_of_links_is_for_another_command() -> None:
    assert (
        "cumulo topology"
        in diagnose("        GPU0    GPU1\nGPU0     X      SYS\nGPU1    SYS      X").next_steps[0]
    )


def test_two_tests_of_one_card_differ_in_the_reason() -> None:
    def test(command: str, gbps: float, mtu: int = 4096) -> str:
        heading = " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n"
        return f"$ {command} -d mlx5_0\n Mtu : {mtu}[B]\n{heading} 65536 5000 {gbps} {gbps} 0.7\n"

    assert diagnose(test("ib_write_bw", 392) + test("ib_write_bw --use_cuda=0", 61)).cause == "no-gdr"
    assert diagnose(test("ib_write_bw", 121) + test("numactl -N 1 ib_write_bw", 197)).cause == "numa"
    assert diagnose(test("ib_write_bw", 283, 1024) + test("ib_write_bw", 391)).cause == "mtu"
    assert diagnose(test("ib_write_bw -q 1", 150) + test("ib_write_bw -q 8", 391)).cause == "setting"
