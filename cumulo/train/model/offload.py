"""Activations in the host's memory between forward and backward. Applied to a model from outside, by the run.

    offload_activations(model)

What autograd keeps of a forward is copied away as it is saved and comes back when backward nears it; on a GPU both
on a stream of their own, behind the arithmetic. With recomputation only each layer's input is kept, and goes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1 << 20  # what is smaller stays: it frees little
_FETCH_AHEAD = 4  # tensors under way while backward computes


@dataclass(slots=True, eq=False)
class _Away:
    """A saved tensor in the host's memory."""

    host: Tensor
    device: torch.device
    left: torch.cuda.Event | None  # when the copy is complete
    before: "_Away | None"  # saved just before: backward needs it next
    back: Tensor | None = None
    used: bool = False
    arrived: torch.cuda.Event | None = None


def offload_activations(module: nn.Module, least_bytes: int = LEAST_BYTES) -> "Offloading":
    """From now on, in every forward of `module` that is differentiated. Returns what counts the bytes."""
    offloading = Offloading(least_bytes)
    module.register_forward_pre_hook(offloading.begin)
    module.register_forward_hook(offloading.end, always_call=True)
    return offloading


class Offloading:
    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.moved_bytes = 0  # copied away since the beginning
        self._active: list[saved_tensors_hooks] = []
        self._latest: _Away | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, module: nn.Module, args: Any) -> None:
        hooks = saved_tensors_hooks(self._send, self._receive)
        self._active.append(hooks)
        self._latest = None
        hooks.__enter__()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._active.pop().__exit__(None, None, None)
        self._latest = None

    def _send(self, tensor: Tensor) -> Tensor | _Away:
        # Weights and views of them are in memory anyway.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        if not tensor.is_floating_point() or tensor.nbytes < self.least_bytes:
            return tensor
        self.moved_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        left = None
        if tensor.is_cuda:
            stream = self._side_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
                left = stream.record_event()
            tensor.record_stream(stream)  # its memory is not given to others before it is copied
        else:
            host.copy_(tensor)
        self._latest = _Away(host, tensor.device, left, self._latest)
        return self._latest

    def _receive(self, saved: Tensor | _Away) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved)
        saved.used, ahead = True, saved.before
        for _ in range(_FETCH_AHEAD):
            if ahead is None:
                break
            if not ahead.used:
                self._fetch(ahead)
            ahead = ahead.before
        back, saved.back = saved.back, None
        assert back is not None
        if saved.arrived is not None:
            stream = torch.cuda.current_stream(saved.device)
            stream.wait_event(saved.arrived)
            back.record_stream(stream)
        return back

    def _fetch(self, away: _Away) -> None:
        if away.back is not None:
            return
        if away.left is None:
            away.back = away.host.to(away.device, copy=True)
            return
        stream = self._side_stream(away.device)
        stream.wait_event(away.left)
        with torch.cuda.stream(stream):
            away.back = away.host.to(away.device, non_blocking=True)
            away.arrived = stream.record_event()

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
