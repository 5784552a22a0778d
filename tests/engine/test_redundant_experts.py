"""An engine with redundant experts says what one rank says, while experts move between its ranks."""

import random
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import ConfigError, CumuloError
from cumulo.models.play.rank_decoder import RankDecoder
from tests.engine.ranked_models import save_model
from tests.engine.test_ranks import compare, started
from tests.engine.tiny_engine import run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("experts", tmp_path_factory.mktemp("models"))


def routed(runner: RankedRunner) -> list[int]:
    runner._states_s = 0.0
    return [one.routed_tokens for one in runner.rank_states()]


def test_experts_that_move_between_ranks_change_no_token_and_even_the_load(model: Path) -> None:
    options = {"ep": 2, "redundant_experts": 2, "expert_balance_steps": 20}
    with started(model) as one, started(model, **options) as several:
        runner = several.player.runner
        assert isinstance(runner, RankedRunner) and isinstance(runner.runner, TorchRunner)
        decoder = runner.runner.model
        assert isinstance(decoder, RankDecoder) and decoder.spread is not None
        first = list(decoder.spread.placed)
        compare(one.engine, several.engine, rounds=1, seed=7, count=4)
        # A text whose tokens are few: some experts get most of them.
        rng = random.Random(3)
        for _ in range(6):
            prompt = [rng.choice((5, 9)) for _ in range(40)]
            several.engine.add(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        run(several.engine)
        assert decoder.spread.placed != first
        assert all(len({len(held) for held in layer.places}) == 1 for layer in decoder.spread.placed)
        assert all(count > 0 for count in routed(runner))
        compare(one.engine, several.engine, rounds=1, seed=11, count=4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ep": 2, "redundant_experts": 1}, "cannot be shared evenly by ep 2; 2, 4, 6 can"),
        ({"tp": 2, "redundant_experts": 2}, "add ep, or omit it"),
    ],
)
def test_copies_that_cannot_be_placed_are_refused(model: Path, options: dict[str, int], reason: str) -> None:
    with pytest.raises((ConfigError, CumuloError), match=reason), started(model, **options):
        pass
