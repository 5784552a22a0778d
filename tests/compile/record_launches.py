"""A pytest plugin that notes how our kernels are launched while their tests run on a GPU.

CUMULO_LAUNCHES=folder python3 -m tests.on_gpu -p tests.compile.record_launches
python -m tests.compile.record_launches folder       # writes cumulo/compile/stages/launches.json
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumulo.compile.stages.launch import KernelLaunch, recording

MOST = 1  # launch of a kernel that is kept


@pytest.fixture(scope="session", autouse=True)
def noted() -> Iterator[None]:
    found: dict[str, KernelLaunch] = {}
    with recording(found, "cumulo.kernels."):
        yield
    folder = Path(os.environ["CUMULO_LAUNCHES"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_text(json.dumps([one.as_json() for one in found.values()]))


def keep(folder: Path) -> list[dict[str, object]]:
    """Of each kernel the launches with the most work: large constants."""
    by_kernel: dict[str, list[dict[str, object]]] = {}
    for path in sorted(folder.glob("*.json")):
        for raw in json.loads(path.read_text()):
            launches = by_kernel.setdefault(raw["kernel"], [])
            if raw not in launches:
                launches.append(raw)
    kept = []
    for name in sorted(by_kernel):
        kept += sorted(by_kernel[name], key=lambda raw: (-_size(raw), json.dumps(raw)))[:MOST]
    return kept


def _size(raw: dict[str, object]) -> int:
    constants = raw.get("constants", {})
    assert isinstance(constants, dict)
    return sum(value for value in constants.values() if isinstance(value, int) and value < 1 << 16)


if __name__ == "__main__":
    from cumulo.compile.stages import launch as module

    kept = keep(Path(sys.argv[1]))
    lines = ",\n".join(json.dumps(raw) for raw in kept)
    module._RECORDED.write_text(f"[\n{lines}\n]\n")
    print(f"{len(kept)} launches of {len({raw['kernel'] for raw in kept})} kernels")
