"""Engines and ranks of several hosts name a model by its folder. Other weights under the same name are noticed."""

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cumulo.base.files import weights_digest
from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.transfer.orders import PeerLost
from cumulo.engine.play.rank_player import RankSetup, _check_weights
from cumulo.errors import ModelError
from tests.engine.ranked_models import save_model


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One model, a copy of it, and a fine-tune of a single matrix: all three are called dense."""
    made = []
    for host in ("one", "same", "other"):
        (tmp_path / host).mkdir()
        made.append(save_model("dense", tmp_path / host))
    weights = load_file(made[2] / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] += 0.01
    save_file(weights, made[2] / "model.safetensors", metadata={"format": "pt"})
    return made


def start(folder: Path, **options: object) -> Assembly:
    usual = {"device": "cpu", "kv_blocks": 32, "max_context": 64, "max_running": 4, "overlap": False}
    return assemble(folder, EngineConfig(**(usual | options)), True, None)  # type: ignore[arg-type]


def test_a_decode_engine_takes_no_kv_of_other_weights_of_the_same_name(
    folders: list[Path], tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/prefill.sock"
    prefill = start(folders[0], role="prefill", transfer_address=address)
    same = start(folders[1], role="decode", prefill_engines=(f"p={address}",))
    other = start(folders[2], role="decode", prefill_engines=(f"p={address}",))
    while not same.engine.scheduler.transfers.peers:
        for one in (prefill, same):
            one.engine.link.exchange(one.engine.scheduler, time.monotonic())  # type: ignore[union-attr]
    news = other.engine.link.news  # type: ignore[union-attr]
    lost: list[PeerLost] = []
    while not lost:
        news.wait(1.0)
        lost = [one for one in news.take_all() if isinstance(one, PeerLost)]
    assert "its model is dense (weights" in lost[0].why and "the same model" in lost[0].why
    for one in (same, other, prefill):
        one.engine.link.close()  # type: ignore[union-attr]
        one.player.runner.close()


def test_a_rank_of_another_host_with_other_weights_is_refused(folders: list[Path]) -> None:
    setup = RankSetup.__new__(RankSetup)
    values = {"model": folders[1], "weights": weights_digest(folders[0])}
    for name, value in values.items():
        object.__setattr__(setup, name, value)
    _check_weights(setup)
    object.__setattr__(setup, "model", folders[2])
    with pytest.raises(ModelError, match=r"has other weights .*copy the same files to all hosts"):
        _check_weights(setup)
