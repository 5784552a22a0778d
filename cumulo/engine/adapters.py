"""AdapterStore: loads adapters into a running engine and drops them. Made by the assembly where adapters are
served; `LLM` and the engine's process ask."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.adapters.book import Adapter, AdapterBook
from cumulo.errors import CumuloError
from cumulo.models.adapters.files import AdapterWeights, greatest_rank, read_adapter
from cumulo.spec.model import ModelSpec

DEFAULT_PLACES = 8  # where adapters are named and max_loras is not


def room_for(config: EngineConfig, folders: Iterable[str | Path]) -> EngineConfig:
    """The configuration with room for the adapters in these folders and, unless it says how many, for a few
    more."""
    ranks = [greatest_rank(Path(folder)) for folder in folders]
    if not ranks:
        return config
    if config.max_loras and config.max_loras < len(ranks):
        raise CumuloError(
            f"{len(ranks)} adapters were named, and max_loras is {config.max_loras}: set it higher"
        )
    return replace(
        config,
        max_loras=config.max_loras or max(DEFAULT_PLACES, len(ranks)),
        max_lora_rank=max(config.max_lora_rank, *ranks),
    )


class AdapterStore:
    def __init__(
        self,
        spec: ModelSpec,
        book: AdapterBook,
        max_rank: int,
        install: Callable[[int, AdapterWeights], None],
    ) -> None:
        """`spec`: of the whole model. `install` puts an adapter's weights into a slot that nobody uses."""
        self._spec, self.book, self.max_rank, self._install = spec, book, max_rank, install

    def read(self, folder: Path | str) -> AdapterWeights:
        """Takes time and changes nothing: it may be called beside the engine's loop."""
        return read_adapter(folder, self._spec, self.max_rank)

    def add(self, key: str, weights: AdapterWeights, name: str = "") -> Adapter:
        """Between two steps: requests may name it from now on. InvalidRequest where there is no room."""
        adapter = self.book.place(
            key, name or key, weights.rank, weights.fingerprint, str(weights.folder.absolute())
        )
        try:
            self._install(adapter.slot, weights)
        except BaseException:
            self.book.drop(key)
            raise
        return adapter

    def drop(self, key: str) -> int:
        """It takes no more requests; how many still use it."""
        return self.book.drop(key)
