"""Configurations: what is wrong is refused by name before anything is allocated."""

from pathlib import Path

import pytest
import yaml

from cumulo.errors import ConfigError
from cumulo.train.decide.config import TrainConfig, config_from, config_text, load_config
from cumulo.train.run.configuration import builtin_config, free_folder

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("train-*.yaml"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stpes": 3}, "no setting 'stpes'; did you mean 'steps'"),
        ({"optimizer": {"learning_rat": 1}}, "config.optimizer has no setting 'learning_rat'; did you mean"),
        ({"optimizer": {"kind": "muno"}}, "cannot be muno; did you mean 'muon'"),
        ({"steps": "many"}, "config.steps must be a whole number, got 'many'"),
        ({"steps": True}, "must be a whole number"),
        ({"optimizer": {"learning_rate": "fast"}}, "must be a number, got 'fast'"),
        ({"data": 3}, "config.data must be a table"),
        (
            {"batch_sequences": 16, "micro_batch": 5},
            "of 5 over dp 1; a batch of 15 or 20 can, or micro-batches of 4",
        ),
        ({"model": {"hidden": 100, "heads": 3}}, "100 does not divide by model.heads 3"),
        ({"model": {"heads": 6, "kv_heads": 4}}, "6 does not divide by model.kv_heads 4"),
        ({"model": {"family": "mixtral"}}, "'mixtral' needs a table model.moe"),
        ({"model": {"family": "mixtral", "moe": {"experts": 4}}}, "config.model.moe lacks experts_per_token"),
        ({"schedule": {"warmup_steps": 300}}, "must be fewer than steps 300"),
        ({"guard": {"action": "rollback"}, "checkpoint": {"every_steps": 0}}, "rollback needs checkpoints"),
        ({"lora": {"rank": 4}}, "set model.start_from"),
        ({"layout": {"shedule": "1f1b"}}, "config.layout has no setting 'shedule'; did you mean 'schedule'"),
        (
            {"layout": {"dp": 2}},
            "micro-batches of 16 over dp 2; a batch of 32 can, or micro-batches of 8",
        ),
        ({"layout": {"dp": 3}, "micro_batch": 4}, "micro-batches of 4 over dp 3; a batch of 12 or 24 can"),
        ({"layout": {"tp": 4}}, "tp 4 cannot share 6 attention heads evenly; tp 3 can"),
        (
            {"layout": {"tp": 3}},
            "tp 3 cannot share the vocabulary of 2048 evenly; fill it up with model.vocab_mul",
        ),
        (
            {"layout": {"pp": 8}, "micro_batch": 1},
            "4 layers cannot fill the 8 chunks of 8 stages under 1f1b",
        ),
        ({"layout": {"pp": 2, "schedule": "zb-w"}}, "no schedule 'zb-w'; did you mean zb-v"),
        (
            {"layout": {"pp": 2, "schedule": "dualpipe"}, "micro_batch": 8},
            "use 4 or more, or zb-v (micro-batches are",
        ),
        ({"layout": {"cp": 3, "ulysses": 2}}, "layout.ulysses 2 does not divide cp 3; 1 would"),
        (
            {"layout": {"cp": 3}},
            "cp 3 cannot share 256 tokens of a sequence evenly; cp 2 can, or a sequence",
        ),
        (
            {"layout": {"cp": 4, "ulysses": 4}},
            "ulysses 4 cannot share 6 attention heads evenly; a ring needs no",
        ),
        (
            {"layout": {"dp": 2, "ep": 2}, "micro_batch": 8},
            "ep 2 spreads experts, and this model has none",
        ),
        (
            {
                "layout": {"tp": 2, "sequence_parallel": True},
                "data": {"sequence_length": 7},
                "micro_batch": 1,
            },
            "cannot share 7 tokens of a micro-batch over tp 2; make the sequence length or",
        ),
        ({"steps": 0, "micro_batch": 0}, "steps must be 1 or more, got 0; micro_batch must be 1 or more"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_with_its_name(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(settings)
    assert words in str(caught.value)


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = builtin_config("runs/x")
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_config(tmp_path / "config.yaml") == config
    changed = load_config(tmp_path / "config.yaml", {"optimizer.learning_rate": "3e-4", "steps": "40"})
    assert (changed.optimizer.learning_rate, changed.steps) == (3e-4, 40)
    assert changed.optimizer.kind == config.optimizer.kind


def test_yaml_numbers_without_a_point_are_numbers() -> None:
    assert config_from(yaml.safe_load("optimizer: {learning_rate: 1e-3}")).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), TrainConfig)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_a_new_run_takes_a_folder_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [Path("my texts.txt")]
    assert free_folder(texts) == "runs/my-texts" and free_folder() == "runs/python"
    Path("runs/my-texts").mkdir(parents=True)
    assert free_folder(texts) == "runs/my-texts-2"
