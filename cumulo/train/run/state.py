"""What a checkpoint of a run holds, so that going on gives the bits of never having stopped. For the trainer."""

from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cumulo.checkpoint.play.store import Checkpoint, Store
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.train.run.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a run is. `samples` is global: it does not say who read them, so any number of readers can go on."""

    step: int = 0
    samples: int = 0
    tokens: int = 0  # learnt
    rollbacks: int = 0

    def after(self, samples: int, tokens: int) -> "Progressed":
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)


def saved_facts(run: "Trainer") -> dict[str, Any]:
    generators = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if run.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(run.device).numpy().tobytes().hex()
    return {
        "progress": asdict(run.progress),
        "data": _data_facts(run),
        "recent_losses": list(run.guard.losses),
        "random_states": generators,
    }


def restore(run: "Trainer", checkpoint: Checkpoint, store: Store) -> Progressed:
    """Put the run back to where the checkpoint was taken, in place."""
    found, own = checkpoint.facts["data"], _data_facts(run)
    if changed := [name for name in own if found.get(name) != own[name]]:
        raise ConfigError(
            f"{checkpoint.path} was trained with other data: {', '.join(changed)} changed, so its place in the "
            "data means nothing; restore the data, or begin in another folder with model.start_from"
        )
    store.load(checkpoint, run.model_run.state())
    run.model_run.loaded()
    run.guard.losses = deque(checkpoint.facts["recent_losses"], run.config.guard.window_steps)
    for kind, text in checkpoint.facts["random_states"].items():
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif run.device.type == "cuda":
            torch.cuda.set_rng_state(state, run.device)
    return Progressed(**checkpoint.facts["progress"])


def _data_facts(run: "Trainer") -> dict[str, Any]:
    """What the meaning of a sample number rests on."""
    return {
        "seed": run.config.seed,
        "sequence_length": run.config.data.sequence_length,
        "tokens": run.packing.tokens,
        "samples_per_epoch": run.packing.samples_per_epoch,
    }
