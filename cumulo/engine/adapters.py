"""AdapterStore: loads adapters into a running engine and drops them. Made by the assembly where adapters are
served; `LLM` and the engine's process ask."""

from collections.abc import Callable
from pathlib import Path

from cumulo.engine.decide.adapters import Adapter, AdapterSlots
from cumulo.errors import ModelError
from cumulo.models.adapters.files import AdapterWeights, read_adapter
from cumulo.spec.model import ModelSpec


class AdapterStore:
    def __init__(
        self,
        spec: ModelSpec,
        slots: AdapterSlots,
        max_rank: int,
        install: Callable[[int, AdapterWeights], None],
        model: Path | None = None,
    ) -> None:
        """`spec`: of the whole model. `install` puts an adapter's weights into a slot that nobody uses. `model`:
        the folder that it was loaded from."""
        self._spec, self.slots, self.max_rank, self._install = spec, slots, max_rank, install
        self._model = None if model is None else model.resolve()

    def read(self, folder: Path | str) -> AdapterWeights:
        """Takes time and changes nothing: it may be called beside the engine's loop."""
        if Path(folder).resolve().parent / "model" == self._model:
            raise ModelError(
                f"{self._model} contains the adapter {folder} already, merged by cumulo train: use that model "
                "without it, or the adapter with the model that it was trained from"
            )
        return read_adapter(folder, self._spec, self.max_rank)

    def add(self, key: str, weights: AdapterWeights, name: str = "") -> Adapter:
        """Between two steps: requests may name it from now on. InvalidRequest where there is no room."""
        adapter = self.slots.place(
            key, name or key, weights.rank, weights.fingerprint, str(weights.folder.absolute())
        )
        try:
            self._install(adapter.slot, weights)
        except BaseException:
            self.slots.drop(key)
            raise
        return adapter

    def drop(self, key: str) -> int:
        """It takes no more requests; how many still use it."""
        return self.slots.drop(key)
