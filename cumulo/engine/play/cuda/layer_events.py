"""LayerEvents: says when the device has computed a layer of a step, while it computes the next ones. A prefill
engine whose KV goes over a network has one; CudaRunner marks the layers."""

import queue
import threading
from collections.abc import Callable

import torch

Tell = Callable[[int], None]


class LayerEvents:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marked: queue.SimpleQueue[tuple[torch.cuda.Event, Tell, int]] = queue.SimpleQueue()
        if self._on_gpu:
            threading.Thread(target=self._watch, name="cumulo-layer-events", daemon=True).start()

    def mark(self, tell: Tell, layer: int) -> None:
        """Everything of this layer has been launched: `tell` is called with it when it has been computed."""
        if not self._on_gpu:
            tell(layer)
            return
        event = torch.cuda.Event()
        event.record()
        self._marked.put((event, tell, layer))

    def _watch(self) -> None:
        while True:
            event, tell, layer = self._marked.get()
            event.synchronize()
            tell(layer)
