"""Two-shot and ring all-reduce over ranks in processes of their own that read each other's memory: sums of small
integers are exact, whatever the order. Without a GPU Triton's interpreter plays the kernels."""

import os
from importlib.util import find_spec

import pytest
import torch

# Asked without starting CUDA: the ranks are forked from a process that has imported this file.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from torch.distributed.distributed_c10d import _get_default_store  # noqa: E402

from cumulo.kernels.cuda.collective.all_reduce import all_reduce  # noqa: E402
from cumulo.kernels.cuda.collective.peers import aligned, flags_bytes  # noqa: E402
from cumulo.ranks.peer_memory import peer_memory  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402
from tests.thorough import rare  # noqa: E402

pytestmark = pytest.mark.slow
SIZES = (1, 7, 4099, 12_288)
ALGORITHMS = ("two_shot", "ring")


def numbers(rank: int, size: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (size,), generator=generator).float()


def play(rank: int, ranks: int) -> list[bool]:
    device = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
    room = flags_bytes(ranks) + sum(aligned(4 * size) for size in SIZES) * len(ALGORITHMS)
    memory = peer_memory(room, _get_default_store(), "all-reduce", rank, ranks, device)
    right = []
    for algorithm in ALGORITHMS:
        for size in SIZES:
            tensor = memory.carve((size,), torch.float32)
            for turn in range(2):  # the second finds the flags as the first has left them
                tensor.own.copy_(numbers(rank, size, turn))
                expected = sum(numbers(peer, size, turn) for peer in range(ranks))
                right.append(torch.equal(all_reduce(memory, tensor, algorithm).cpu(), expected))
    return right


@pytest.mark.parametrize("ranks", [3, *rare(2, 4)])
def test_every_rank_ends_with_the_sum(ranks: int) -> None:
    for right in run_ranks(play, ranks, ranks, timeout_s=300):
        assert right == [True] * (2 * len(SIZES) * len(ALGORITHMS))
