"""Configurations: what is wrong is refused by name before anything is allocated."""

from pathlib import Path

import pytest
import yaml

from cumulo.errors import ConfigError
from cumulo.train.builtin import builtin_config, free_folder
from cumulo.train.config import TrainConfig, config_from, config_text, load_config

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
        ({"batch_sequences": 16, "micro_batch": 5}, "no multiple of micro_batch 5; micro_batch 4 would fit"),
        ({"model": {"hidden": 100, "heads": 3}}, "100 does not divide by model.heads 3"),
        ({"model": {"heads": 6, "kv_heads": 4}}, "6 does not divide by model.kv_heads 4"),
        ({"model": {"family": "mixtral"}}, "'mixtral' needs a table model.moe"),
        ({"model": {"family": "mixtral", "moe": {"experts": 4}}}, "config.model.moe lacks experts_per_token"),
        ({"schedule": {"warmup_steps": 300}}, "must be fewer than steps 300"),
        ({"guard": {"action": "rollback"}, "checkpoint": {"every_steps": 0}}, "rollback needs checkpoints"),
        ({"lora": {"rank": 4}}, "set model.start_from"),
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


def test_a_new_run_takes_a_folder_that_is_free(tmp_path: Path) -> None:
    name = str(tmp_path / "run")
    assert free_folder(name) == name
    (tmp_path / "run").mkdir()
    assert free_folder(name) == f"{name}-2"
