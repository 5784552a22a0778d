"""One server with keys and a folder of files for all tests of this folder that do not end it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cumulo.serve.access.keys import new_key
from tests.serve.batches.help import Bench
from tests.serve.running_server import running_server
from tests.serve.tiny_model import save_tiny_model

CONTEXT = 512


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("batches"), CONTEXT)


@pytest.fixture(scope="session")
def bench(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("desk")
    path = folder / "keys.json"
    keys = {
        "ann": new_key(path, "ann"),
        "bob": new_key(path, "bob"),
        "slow": new_key(path, "slow", tokens_per_minute=6000),
    }
    with running_server(
        str(tiny), "--api-keys", str(path), "--files", str(folder / "files"), "--max-running", "4",
        "--max-file-mib", "1", "--max-files-mib", "3",
    ) as server:  # fmt: skip
        yield Bench(server, keys, folder / "files")
