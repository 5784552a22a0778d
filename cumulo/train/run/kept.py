"""KeptActivations: counts what autograd keeps from forward to backward. The trainer measures a run's first step.

    with KeptActivations() as kept:
        run.gradients(batch, loss_tokens)
    kept.peak_bytes

Exact: every storage that some graph still needs counts once, however many tensors of it were saved; weights, which
are there anyway, do not. What a recomputed layer makes again in backward is not kept and does not count.
"""

from dataclasses import dataclass
from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(slots=True, eq=False)
class _Saved:
    """In a graph, instead of the tensor; gone when the graph lets it go."""

    tensor: Tensor
    counted_in: "KeptActivations"

    def __del__(self) -> None:
        self.counted_in.let_go(self.tensor)


def _tensor(saved: _Saved | Tensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.tensor


class KeptActivations:
    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        # Of each storage, by its address: it cannot change while it is in use.
        self._uses: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._keep, _tensor)

    def __enter__(self) -> "KeptActivations":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> _Saved | Tensor:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        address = tensor.untyped_storage().data_ptr()
        self._uses[address] = self._uses.get(address, 0) + 1
        if self._uses[address] == 1:
            self.bytes += tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return _Saved(tensor.detach(), self)  # detached: a graph that held its own output would never end

    def let_go(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self.bytes -= tensor.untyped_storage().nbytes()
