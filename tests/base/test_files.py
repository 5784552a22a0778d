"""Whether two files are the same, told from pieces: a change of more than a thousandth of one in a row is seen."""

import os
import random
from pathlib import Path

from cumulo.base.files import sampled_digest
from cumulo.engine.config import EngineConfig
from cumulo.engine.play.disk_tier import kv_fingerprint
from tests.engine.tiny_engine import SPECS

SIZE = 20_000_000


def test_a_change_in_the_middle_is_seen_wherever_it_is(tmp_path: Path) -> None:
    path, rng = tmp_path / "model.safetensors", random.Random(0)
    with path.open("wb") as file:
        file.truncate(SIZE)
    before = sampled_digest(path)
    for _ in range(6):
        start = rng.randrange(SIZE - 20_000)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * 20_000)
            file.flush()
            assert sampled_digest(path) != before
            file.seek(start)
            file.write(bytes(20_000))
    assert sampled_digest(path) == before


def test_small_files_are_read_whole_and_sizes_count(tmp_path: Path) -> None:
    path, digests = tmp_path / "file", set()
    for content in (
        b"",
        b"a",
        b"b",
        bytes(1),
        bytes(2),
        bytes(300_000),
        bytes(150_000) + b"x" + bytes(149_999),
    ):
        path.write_bytes(content)
        digests.add(sampled_digest(path))
    assert len(digests) == 7


def test_a_weight_file_that_was_written_again_has_kv_blocks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))

    def fingerprint() -> bytes:
        return kv_fingerprint(tmp_path, SPECS["dense"], EngineConfig(device="cpu"), "operators")

    before = fingerprint()
    assert fingerprint() == before
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert fingerprint() != before
