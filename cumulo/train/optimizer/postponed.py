"""PostponedUpdates: a step's weights move when the next forward needs them, layer by layer, instead of all at its
end. So the next forward begins while gradients of later layers still travel (ByteScheduler, Peng et al. 2019).
Owned by the run, where `gradient_order: priority` asks for it; the weights are those of a plain step, bit by bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cumulo.train.optimizer.data_parallel import DataParallel, PendingBucket
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.optimizer.sink import layers_of


class PostponedUpdates:
    def __init__(self, model: nn.Module, sink: DataParallel, optimizer: Optimizer) -> None:
        """`model`: the one chunk of this rank; its layers are called in their order."""
        self._sink, self._optimizer = sink, optimizer
        self._pending: list[PendingBucket] = []
        self._share: float | None = None
        self._squares: list[Tensor] = []
        self.norm = 0.0  # of the gradients that were used last
        layers = list(layers_of(model))
        places = {name: _place(name, len(layers)) for name, _ in model.named_parameters()}
        sink.use_places(places)
        self._places = places
        model.register_forward_pre_hook(self._hook(0))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(number + 1))
        layers[-1].register_forward_hook(lambda *_: self._settle(len(layers) + 1))

    def take_gradients(self) -> None:
        """After backward: they are on their way."""
        self._pending = self._sink.finish_later()

    def step(self, share: float) -> None:
        """From now on a forward moves what it needs."""
        self._share = share

    def settle(self) -> None:
        """Move all weights: somebody looks at them."""
        self._settle(len(self._places) + 1)

    def forget(self) -> None:
        """The gradients, without a step."""
        for bucket in self._pending:
            bucket.wait()
            self._sink.begin_bucket(bucket)
        self._pending, self._share, self._squares = [], None, []

    def _hook(self, place: int) -> Callable[..., None]:
        def settle(*_: object) -> None:
            self._settle(place)

        return settle

    @torch.no_grad()
    def _settle(self, place: int) -> None:
        """Everything that is needed up to this place of forward."""
        if self._share is None:
            return
        due = [bucket for bucket in self._pending if bucket.needed <= place]
        for bucket in due:
            gradients = bucket.wait()
            self._squares += [part.float().square().sum() for part in gradients.values()]
            self._optimizer.take_gradients(gradients)
            self._optimizer.step_some(gradients, self._share)
            self._sink.begin_bucket(bucket)
        if due:
            self._pending = [bucket for bucket in self._pending if bucket.needed > place]
        if not self._pending:
            if self._squares:
                self.norm = float(torch.stack(self._squares).sum().sqrt())
            self._share, self._squares = None, []


def _place(name: str, layers: int) -> int:
    """When forward needs a parameter: the embedding first, then the layers, then norm and head."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith("embed") else layers + 1
