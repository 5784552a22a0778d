"""RankStage: what a rank of a pipeline on GPUs says to the other stages: hidden states to the next one, and from
the last, which draws, the tokens to the first, which embeds them. `CudaDecoder` and `CudaRunner` call it.

Everything is launched, nothing waits on the host. A message is as long as the step's shape, which all stages work
out alike from the plan.
"""

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
from cumulo.layout.serving import RankPart

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
