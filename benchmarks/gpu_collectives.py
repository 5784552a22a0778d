"""All-reduce kernels over symmetric memory on GPUs: right, and how long they take, by size and algorithm.

    nvidia-cuda-mps-control -d
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_collectives.py --ranks 2

Ranks may share one GPU (as above); then times say what the kernels cost there, not what links carry. Every size is
summed a few times with other numbers and compared with the exact sum of the integers it is made of.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cumulo.kernels.cuda.collective.all_reduce import all_reduce  # noqa: E402
from cumulo.kernels.cuda.collective.one_shot import meet_all, sum_partials  # noqa: E402
from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor, aligned, flags_bytes  # noqa: E402
from cumulo.ranks.peer_memory import peer_memory  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402

SIZES = (8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of a bfloat16 tensor
REPEATS = 20


def numbers(rank: int, size: int, turn: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (size,), generator=generator, device="cuda").to(torch.bfloat16)


def reduce(memory: PeerMemory, algorithm: str, tensor: PeerTensor, out: torch.Tensor) -> torch.Tensor:
    if algorithm == "one_shot":
        sum_partials(memory, tensor, torch.bfloat16, out)
        return out
    return all_reduce(memory, tensor, algorithm)


def play(rank: int, ranks: int) -> list[dict[str, Any]]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    room = flags_bytes(ranks) + 2 * aligned(max(SIZES)) + 4096
    memory = peer_memory(room, _get_default_store(), "bench", rank, ranks, device)
    even, odd = (memory.carve((max(SIZES) // 2,), torch.bfloat16) for _ in range(2))
    found = []
    for size in SIZES:
        count = size // 2
        out = torch.empty(count, dtype=torch.bfloat16, device=device)
        for algorithm in ("one_shot", "two_shot", "ring"):
            views = [PeerTensor(one.own[:count], one.addresses) for one in (even, odd)]

            right = True
            for turn in range(4):
                views[turn % 2].own.copy_(numbers(rank, count, turn))
                expected = sum(numbers(peer, count, turn).float() for peer in range(ranks))
                torch.cuda.synchronize()
                meet_all(memory)
                right &= torch.equal(reduce(memory, algorithm, views[turn % 2], out).float(), expected)
            views[0].own.zero_()
            views[1].own.zero_()
            torch.cuda.synchronize()
            meet_all(memory)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for turn in range(REPEATS):
                reduce(memory, algorithm, views[turn % 2], out)
            end.record()
            torch.cuda.synchronize()
            found.append({"bytes": size, "algorithm": algorithm, "right": right,
                          "us": round(1e3 * begin.elapsed_time(end) / REPEATS, 1)})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    by_rank = run_ranks(play, chosen.ranks, chosen.ranks, timeout_s=200)
    rows = []
    for each in zip(*by_rank, strict=True):
        rows.append(
            {**each[0], "right": all(row["right"] for row in each), "us": max(row["us"] for row in each)}
        )
        print(chosen.ranks, "ranks:", rows[-1], flush=True)
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
