"""Messages between ranks in processes of their own: what is sent arrives in order and whole, however far the sender
is ahead. Without a GPU Triton's interpreter plays the kernels."""

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

from cumulo.kernels.cuda.collective import passing  # noqa: E402
from cumulo.kernels.cuda.collective.peers import flags_bytes  # noqa: E402
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION, SLOT  # noqa: E402
from cumulo.ranks.peer_memory import peer_memory  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402

pytestmark = pytest.mark.long
WORDS, PLACES, DRAWS = 2500, 2, 3
SIZES = (1, WORDS, 700, 2049, 3)  # more than there are places: the sender waits for the receiver
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


def message(turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(SIZES[turn], generator=generator)


def play(rank: int) -> list[bool]:
    """Rank 1 sends streams to rank 0, which sends tokens back."""
    if not HAS_GPU:
        passing._PROGRAMS = 2  # an interpreted program takes milliseconds, however little it does
    streams = passing.passage_bytes(PLACES, WORDS, torch.float32)
    tokens = passing.passage_bytes(PLACES, passing.token_words(DRAWS), torch.int32)
    memory = peer_memory(flags_bytes(2) + streams + tokens, _get_default_store(), "passing", rank, 2, DEVICE)
    stream = passing.make_passage(memory, PLACES, WORDS, torch.float32)
    back = passing.make_passage(memory, PLACES, passing.token_words(DRAWS), torch.int32)
    table, right = torch.zeros((4, 8), dtype=torch.int32, device=DEVICE), []
    if rank == 1:
        memory.waits = False  # a rehearsal sends nothing
        passing.send(stream, message(0).to(DEVICE), 0)
        memory.waits = True
        for turn in range(len(SIZES)):
            passing.send(stream, message(turn).to(DEVICE), 0)
        for turn in range(3):
            passing.take_tokens(back, table, 0)
            right.append(table.tolist()[turn][turn + 2] == 10 + turn and table.tolist()[3] == [0] * 8)
        return right
    for turn in range(len(SIZES)):
        found = torch.full((SIZES[turn],), torch.nan, device=DEVICE)
        passing.receive(stream, found, 1)
        right.append(torch.equal(found.cpu(), message(turn)))
    for turn in range(3):
        draws = torch.zeros((DRAWS, COLUMNS), dtype=torch.int32, device=DEVICE)
        draws[:, SLOT], draws[:, POSITION] = -1, 1  # places that only fill a shape up
        draws[1, SLOT], draws[1, POSITION] = turn, turn + 2
        table[turn, turn + 2] = 10 + turn
        passing.send_tokens(back, draws, table, 1)
    return right


def let_go(rank: int) -> bool:
    if not HAS_GPU:
        passing._PROGRAMS = 2
    size = flags_bytes(2) + passing.passage_bytes(PLACES, 8, torch.float32)
    memory = peer_memory(size, _get_default_store(), "gone", rank, 2, DEVICE)
    stream = passing.make_passage(memory, PLACES, 8, torch.float32)
    if rank == 0:  # its peer sends nothing, and takes nothing
        stream.let_go()
        passing.receive(stream, torch.zeros(8, device=DEVICE), 1)
        for _ in range(PLACES + 1):
            passing.send(stream, torch.zeros(8, device=DEVICE), 1)
    return True


def test_messages_arrive_whole_and_in_order() -> None:
    for right in run_ranks(play, 2, timeout_s=300):
        assert all(right)


def test_whoever_waits_for_a_rank_that_died_is_let_go() -> None:
    assert run_ranks(let_go, 2, timeout_s=300) == [True, True]
