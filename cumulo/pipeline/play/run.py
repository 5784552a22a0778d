"""Plays a pipeline schedule: the one place where actions become computation and messages.

    play(schedule, stage, chunks, micro_batches, wire, transport, sink)

The trainer calls it on every rank of a pipeline, once per step. The schedule decides everything; the player does
what its order says, action by action; a receive is begun where it stands and waited for where its tensor is used.
One stage alone is a pipeline, too: gradient accumulation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, blocks
from cumulo.pipeline.play.deferred import DeferredWeights


class Chunk(Protocol):
    """A stage's part of the model. It may keep sums of its losses itself."""

    def __call__(self, x: Tensor | None, micro_batch: Any) -> tuple[Tensor | None, Tensor | None]:
        """(output for the next chunk, what is to be made small). The first chunk has no x, the last no output;
        in between there may be an objective, too: the balance of experts."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Sink(Protocol):
    """Who takes the gradients."""

    def last(self, chunk: int) -> None:
        """The next backward (one call of autograd) is the last of the step that adds to this chunk's weights: what
        it makes ready can be sent while it still runs."""
        ...

    def added(self, chunk: int) -> None:
        """A micro-batch's gradients have been added to this chunk's weights."""
        ...


class InTransit(Protocol):
    """A tensor on its way."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(Protocol):
    """Who carries tensors between stages, in the order of the calls. `cumulo.ranks.collectives` has one."""

    def send(self, tensor: Tensor, peer: int) -> InTransit: ...
    def receive(self, tensor: Tensor, peer: int) -> InTransit: ...


@dataclass(frozen=True, slots=True)
class Wire:
    """What passes between stages: one micro-batch's hidden states or their gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def play(
    schedule: PipelineSchedule,
    stage: int,
    chunks: Mapping[int, Chunk],
    micro_batches: Sequence[Any],
    wire: Wire,
    transport: Transport | None,
    sink: Sink,
    beside: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Run one step of a stage: `schedule` has its communication, `chunks` are those the stage holds, by number (no
    stage holds one number twice), and `transport` reaches the other stages by number; None: there is only one.

    `beside`: pairs that the schedule overlaps are computed at the same time, the forward in a thread of its own,
    inside this context, which keeps its collectives apart from the backward's. None: one after the other."""
    player = _Player(schedule, stage, chunks, micro_batches, wire, transport)
    order = schedule.orders[stage]
    last = {action.chunk: number for number, action in enumerate(order) if action.kind.gives_weight_gradient}
    with ThreadPoolExecutor(1, "forward") if beside is not None else nullcontext() as thread:
        number = 0
        for block in blocks(order):
            done = range(number, number + len(block))
            for position, action in zip(done, block, strict=True):
                if last.get(action.chunk) == position and action.kind.gives_weight_gradient:
                    sink.last(action.chunk)
            if thread is not None and beside is not None and _is_pair(block):
                _together(player, block, thread, beside, wire.device)
            else:
                for action in block:
                    player.do(action)
            for action in block:
                if action.kind.gives_weight_gradient:
                    sink.added(action.chunk)
            number = done.stop
    player.wait_for_sends()


def _is_pair(block: tuple[Action, ...]) -> bool:
    """A forward and a backward."""
    return len(block) == 2 and sum(action.kind is Kind.FORWARD for action in block) == 1


def _together(
    player: "_Player",
    block: tuple[Action, ...],
    thread: ThreadPoolExecutor,
    beside: Callable[[], AbstractContextManager[object]],
    device: torch.device,
) -> None:
    """While one waits for its messages the other computes. On a GPU each has a stream; memory that the forward's
    takes comes back to it alone, and it begins when all earlier work is done: nothing is overwritten early."""
    forward, backward = sorted(block, key=lambda action: action.kind is not Kind.FORWARD)
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    side = _side_stream(device) if here is not None else None
    grad = torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(grad), beside():
            if side is None or here is None:
                player.do(forward)
                return
            with torch.cuda.device(device), torch.cuda.stream(side):
                side.wait_stream(here)
                player.do(forward)

    begun = thread.submit(run)
    try:
        player.do(backward)
    finally:
        begun.result()
    if side is not None and here is not None:
        here.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class _Alive:
    """A micro-batch between its forward and the end of its backward on a chunk."""

    x: Tensor | None
    outputs: list[Tensor]
    later: DeferredWeights | None  # None: its backward is not in halves


@dataclass(frozen=True, slots=True)
class _Tensor:
    tensor: Tensor
    work: InTransit | None = None  # None: it is here, or gone

    @property
    def is_over(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


Key = tuple[int, int]  # (micro-batch, chunk)


@dataclass(slots=True)
class _Player:
    schedule: PipelineSchedule
    stage: int
    chunks: Mapping[int, Chunk]
    micro_batches: Sequence[Any]
    wire: Wire
    transport: Transport | None
    activations: dict[Key, _Tensor] = field(default_factory=dict)  # inputs of chunks, until their forward
    gradients: dict[Key, _Tensor] = field(default_factory=dict)  # of outputs of chunks, until their backward
    leaving: dict[tuple[Kind, int, int], Tensor] = field(default_factory=dict)  # made, not yet sent
    alive: dict[Key, _Alive] = field(default_factory=dict)
    sent: dict[tuple[Kind, int, int], _Tensor] = field(default_factory=dict)  # they live until they are gone
    halved: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.halved = {
            (action.micro_batch, action.chunk)
            for action in self.schedule.orders[self.stage]
            if action.kind is Kind.BACKWARD_INPUT
        }

    def do(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind.gives_input_gradient:
            self._backward(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            later = self.alive.pop((action.micro_batch, action.chunk)).later
            if later is not None:
                later.accumulate()
        elif action.kind.is_send:
            self._send(action)
        else:
            arrived = self.activations if action.kind is Kind.RECEIVE_ACTIVATION else self.gradients
            arrived[action.micro_batch, action.chunk] = self._receive(action)

    def _forward(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        x = None if action.chunk == 0 else self.activations.pop(key).wait().requires_grad_()
        chunk, batch = self.chunks[action.chunk], self.micro_batches[action.micro_batch]
        later = DeferredWeights() if key in self.halved else None
        if later is None:
            y, objective = chunk(x, batch)
        else:
            with later:
                y, objective = chunk(x, batch)
        self.alive[key] = _Alive(x, [tensor for tensor in (y, objective) if tensor is not None], later)
        if y is not None:
            self._pass_on(Kind.SEND_ACTIVATION, action, action.chunk + 1, y.detach(), self.activations)

    def _backward(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        alive = self.alive[key]
        has_output = action.chunk < self.schedule.chunks - 1
        upstream: list[Tensor | None] = [self.gradients.pop(key).wait()] if has_output else []
        if (output := self.sent.pop((Kind.SEND_ACTIVATION, *key), None)) is not None:
            output.wait()  # not long: its gradient is here, so it has arrived
        upstream += [None] * (len(alive.outputs) - len(upstream))  # of the objective: one
        # Before the first thing that is trained nothing has a gradient: a first chunk may be frozen as a whole.
        trained = [pair for pair in zip(alive.outputs, upstream, strict=True) if pair[0].requires_grad]
        outputs, gradients = [pair[0] for pair in trained], [pair[1] for pair in trained]
        gradient = None
        if alive.later is None:
            del self.alive[key]
            if trained:
                torch.autograd.backward(outputs, gradients)
            gradient = None if alive.x is None else alive.x.grad
        elif trained:
            parameters = self.chunks[action.chunk].parameters()
            gradient = alive.later.input_gradient(outputs, gradients, alive.x, parameters)
        alive.outputs.clear()  # what is left of the graph is in `later`
        if alive.x is not None and gradient is not None:
            self._pass_on(Kind.SEND_GRADIENT, action, action.chunk - 1, gradient, self.gradients)

    def _pass_on(
        self, kind: Kind, action: Action, neighbour: int, tensor: Tensor, kept: dict[Key, _Tensor]
    ) -> None:
        """To the send that follows, or straight to the neighbouring chunk if it is on this stage, too."""
        if self.schedule.stage_of(neighbour, action.direction) == self.stage:
            kept[action.micro_batch, neighbour] = _Tensor(tensor)
        else:
            self.leaving[kind, action.micro_batch, action.chunk] = tensor.contiguous()

    def _send(self, action: Action) -> None:
        tensor = self.leaving.pop((action.kind, action.micro_batch, action.chunk))
        # What NCCL knows to be gone; gloo does not say before it is waited for.
        self.sent = {key: message for key, message in self.sent.items() if not message.is_over}
        assert self.transport is not None and action.peer is not None
        work = self.transport.send(tensor, action.peer)
        self.sent[action.kind, action.micro_batch, action.chunk] = _Tensor(tensor, work)

    def _receive(self, action: Action) -> _Tensor:
        assert self.transport is not None and action.peer is not None
        tensor = self.wire.empty()
        return _Tensor(tensor, self.transport.receive(tensor, action.peer))

    def wait_for_sends(self) -> None:
        for message in self.sent.values():
            message.wait()
