"""How much room an engine gets for adapters: asked by `LLM` and by the server before anything is loaded. Without
torch."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cumulo.engine.config import EngineConfig
from cumulo.errors import CumuloError
from cumulo.models.adapters.config import greatest_rank

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
