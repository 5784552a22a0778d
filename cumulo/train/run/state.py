"""RunState: what a checkpoint of a run holds, so that resuming gives the bits of never having stopped. Owned by the
trainer."""

import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from cumulo.checkpoint.play.store import Checkpoint, Store
from cumulo.errors import ConfigError
from cumulo.train.data.packing import Packing
from cumulo.train.decide.config import TrainConfig
from cumulo.train.decide.schedule import SpikeGuard
from cumulo.train.run.model_run import ModelRun


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a run is. `samples` is global: it does not say who read them, so any number of readers can resume."""

    step: int = 0
    samples: int = 0
    tokens: int = 0  # with a loss
    rollbacks: int = 0

    def after(self, samples: int, tokens: int) -> "Progressed":
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)


@dataclass(slots=True, eq=False)
class RunState:
    config: TrainConfig
    packing: Packing  # of the training data
    model_run: ModelRun
    guard: SpikeGuard
    progress: Progressed = field(default_factory=Progressed)

    def facts(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        generators = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
        if (device := self.model_run.device).type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
        return {
            "progress": asdict(self.progress),
            "data": self._data_facts(),
            "recent_losses": list(self.guard.losses),
            "random_states": generators,
        }

    def restore(self, checkpoint: Checkpoint, store: Store) -> None:
        """Put the run back to where the checkpoint was taken, in place."""
        found, own = checkpoint.facts["data"], self._data_facts()
        if changed := [name for name in own if found.get(name) != own[name]]:
            raise ConfigError(
                f"{checkpoint.path} was trained with other data: {', '.join(changed)} changed, so its place in the "
                "data means nothing; restore the data, or begin in another folder with model.start_from"
            )
        store.load(checkpoint, self.model_run.state())
        self.model_run.loaded()
        self.guard.losses = deque(checkpoint.facts["recent_losses"], self.config.guard.window_steps)
        for kind, text in checkpoint.facts["random_states"].items():
            state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            if kind == "cpu":
                torch.set_rng_state(state)
            elif self.model_run.device.type == "cuda":
                torch.cuda.set_rng_state(state, self.model_run.device)
        self.progress = Progressed(**checkpoint.facts["progress"])

    def _data_facts(self) -> dict[str, Any]:
        """What the meaning of a sample number rests on."""
        return {
            "seed": self.config.seed,
            "sequence_length": self.config.data.sequence_length,
            "tokens": self.packing.tokens,
            "samples_per_epoch": self.packing.samples_per_epoch,
        }


class StopRequest:
    """While entered, the first signal sets `asked`; the second does what it always did."""

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        """`heard` is called at the first signal, so that the person who sent it can be told."""
        self.asked = False
        self._heard = heard
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        self._heard()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
