"""RankStage and FarStage: what a rank of a pipeline on GPUs sends to the other stages: hidden states to the next
one, and from the last, which draws, the tokens to the first, which embeds them. `CudaDecoder` and `CudaRunner` call
them. A RankStage reads other ranks' memory.

A FarStage has stages on other hosts, and sends messages: hidden states from device to device, and drawn tokens from
host to host. Tokens leave by a thread of their own when the device has drawn them, so that the next step need not
wait. The first stage takes them on its host before it launches the step that embeds them.
"""

import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cumulo.kernels.cuda.collective.passing import (
    PeerPassage,
    make_passage,
    passage_bytes,
    receive,
    send,
    send_tokens,
    take_tokens,
    token_words,
)
from cumulo.kernels.cuda.collective.peers import PeerMemory, flags_bytes
from cumulo.kernels.cuda.sampling.sample import POSITION, SLOT
from cumulo.layout.serving import RankPart
from cumulo.ranks.device_group import MessageGroup
from cumulo.ranks.rank_group import RankGroup

_STREAMS = 2  # a stage may be as many steps ahead of the next
TOKEN_MESSAGES = 16  # drawn and not yet asked for


def stage_bytes(hidden: int, max_tokens: int, max_outputs: int, dtype: torch.dtype, stages: int) -> int:
    """What a rank must let the ranks of other stages write into."""
    streams = passage_bytes(_STREAMS, max_tokens * hidden, dtype)
    tokens = passage_bytes(TOKEN_MESSAGES, token_words(max_outputs), torch.int32)
    return flags_bytes(stages) + streams + tokens


class RankStage:
    def __init__(
        self, memory: PeerMemory, part: RankPart, max_tokens: int, max_outputs: int, dtype: torch.dtype
    ) -> None:
        """`memory`: of the pipeline's ranks, by stage."""
        self.memory, self.index, self.stages = memory, part.place.stage, part.layout.pp
        self.first, self.last = part.first, part.last
        self._streams: PeerPassage = make_passage(memory, _STREAMS, max_tokens * part.whole.hidden, dtype)
        self._tokens: PeerPassage = make_passage(
            memory, TOKEN_MESSAGES, token_words(max_outputs), torch.int32
        )

    def receive(self, stream: Tensor) -> None:
        """The stream as the stage before left it."""
        receive(self._streams, stream, self.index - 1)

    def send(self, stream: Tensor) -> None:
        send(self._streams, stream, self.index + 1)

    def send_tokens(self, draws: Tensor, tokens: Tensor) -> None:
        """What was drawn, to the first stage."""
        send_tokens(self._tokens, draws, tokens, 0)

    def take_tokens(self, tokens: Tensor) -> None:
        """The oldest draws of the last stage that were not yet taken."""
        take_tokens(self._tokens, tokens, self.stages - 1)

    def let_go(self) -> None:
        """Kernels that wait for a stage that died go on, with nonsense."""
        self._streams.let_go()
        self._tokens.let_go()


_HELD = 64  # messages on their way: more than steps are


@dataclass(frozen=True, slots=True)
class _Message:
    words: Tensor  # [1 + 3 · draws], on the host: how many draws; then slots, positions and tokens
    written: "torch.cuda.Event | None"  # when the device has


class FarStage:
    def __init__(self, group: MessageGroup, tokens: RankGroup, part: RankPart, max_outputs: int) -> None:
        """`group`, `tokens`: of the pipeline's ranks, by stage; the second is used for drawn tokens alone."""
        self.memory = group  # whose `waits` a rehearsal turns off
        self.index, self.stages = part.place.stage, part.layout.pp
        self.first, self.last = part.first, part.last
        self._tokens, self._draws = tokens, max_outputs
        self._leaving: queue.Queue[_Message] = queue.Queue(_HELD)
        self.failed: Exception | None = None
        if self.last and not self.first:
            threading.Thread(target=self._send_all, name="cumulo-drawn-tokens", daemon=True).start()

    def receive(self, stream: Tensor) -> None:
        """The stream as the stage before left it."""
        self.memory.receive(stream, self.index - 1)

    def send(self, stream: Tensor) -> None:
        self.memory.send(stream, self.index + 1)

    def send_tokens(self, draws: Tensor, tokens: Tensor) -> None:
        """What was drawn, to the first stage."""
        if self.failed is not None:
            raise self.failed
        slots, positions = draws[:, SLOT].long(), draws[:, POSITION].long()
        drawn = tokens[slots.clamp_min(0), positions.clamp_min(0)].long()
        on_gpu, count = tokens.is_cuda, len(draws)
        words = torch.zeros(1 + 3 * self._draws, dtype=torch.int64, pin_memory=on_gpu)
        words[0] = count
        words[1 : 1 + 3 * count].copy_(torch.cat((slots, positions, drawn)), non_blocking=True)
        written = None
        if on_gpu:
            written = torch.cuda.Event()
            written.record()
        self._leaving.put(_Message(words, written))

    def take_tokens(self, tokens: Tensor) -> None:
        """The oldest draws of the last stage that were not yet taken."""
        words = torch.empty(1 + 3 * self._draws, dtype=torch.int64)
        told = self._tokens.receive(words, self.stages - 1).numpy()
        slots, positions, drawn = told[1 : 1 + 3 * int(told[0])].reshape(3, -1)
        held = slots >= 0
        places = torch.from_numpy(np.stack((slots[held], positions[held], drawn[held]))).to(tokens.device)
        tokens[places[0], places[1]] = places[2].to(tokens.dtype)

    def let_go(self) -> None:
        """What waits on the device for a stage that died goes on, with nonsense."""
        self.memory.abort()

    def _send_all(self) -> None:
        while True:
            message = self._leaving.get()
            try:
                if message.written is not None:
                    message.written.synchronize()
                self._tokens.send(message.words, 0).wait()
            except Exception as error:  # the first stage is gone: the next step says so
                self.failed = error
                return
