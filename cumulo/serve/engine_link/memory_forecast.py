"""Forecasts of what the engines of models would take, by the engine's own memory ledger. Asked for by ModelTable.

The ledger reads models' headers with torch, which this process does not import: a process of its own does it, once
for many models.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import cumulo
from cumulo.engine.config import EngineConfig
from cumulo.errors import CumuloError
from cumulo.serve.engine_link.messages import Ready


class MemoryForecast(msgspec.Struct):
    """`problem`: why the model cannot be loaded here; what is not known is then 0 or empty."""

    need_bytes: int = 0
    kv_blocks: int = 0
    max_context: int = 0
    problem: str = ""
    # What its files say of it
    format: str = ""
    family: str = ""
    number_format: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    hidden: int = 0

    def take_plan(self, info: Ready) -> None:
        """What its engine has planned when it was loaded counts more."""
        self.need_bytes, self.kv_blocks = info.ledger["predicted_bytes"], info.kv_blocks
        self.max_context, self.problem = info.max_context, ""


_Asked = tuple[Sequence[str | None], EngineConfig, int | None]
_Answer = tuple[int, list[MemoryForecast]]


async def forecast(models: Sequence[str | None], config: EngineConfig, budget_bytes: int | None) -> _Answer:
    """The memory that engines may take together (where none is given: what is free now), and what each of these
    models would take of it."""
    paths = [str(Path(cumulo.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cumulo.serve.engine_link.memory_forecast",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        told, _ = await process.communicate(msgspec.json.encode((models, config, budget_bytes)))
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise CumuloError(f"the memory of {len(models)} models could not be predicted; the log says why")
    answer: _Answer = msgspec.json.decode(told, type=_Answer)
    return answer


def main() -> None:
    from cumulo.engine.assembly import device_kind, free_memory, predict_memory
    from cumulo.models.files.load import inspect_model

    models, config, budget_bytes = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    if budget_bytes is None:
        budget_bytes = free_memory(config.settled(device_kind(config.device)))
    found = list[MemoryForecast]()
    for model in models:
        told = MemoryForecast()
        found.append(told)
        try:
            files = inspect_model(model)
            told.format, told.family, told.hidden = files.format, files.spec.family, files.spec.hidden
            told.number_format, told.parameters = files.number_format, files.parameters
            told.weight_bytes = files.weight_bytes
            memory = predict_memory(files, config, budget_bytes)
        except CumuloError as error:
            told.problem = str(error)
        else:
            told.need_bytes, told.kv_blocks = memory.ledger.predicted_bytes, memory.kv_blocks
            told.max_context = memory.max_context
    sys.stdout.buffer.write(msgspec.json.encode((budget_bytes, found)))


if __name__ == "__main__":
    main()
