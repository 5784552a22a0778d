"""Whole runs of a tiny model: the loss falls, a break changes nothing, what is wrong stops it, others load it."""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from cumulo.errors import ConfigError, TrainingError
from cumulo.models.files.load import load_model
from cumulo.train.decide.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)
from cumulo.train.run.log import TrainRecord, read_log
from cumulo.train.run.trainer import Silent, Trainer
from tests.models.stepper import Stepper

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "had", "hat", "of")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    drawn = random.Random(0)
    path = tmp_path / "texts.jsonl"
    texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(5, 40))) for _ in range(150)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tiny(folder: Path, source: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        folder=str(folder),
        steps=12,
        batch_sequences=8,
        micro_batch=8,
        device="cpu",
        model=ModelConfig(hidden=16, layers=2, heads=2, kv_heads=1, ffn_hidden=32),
        data=DataConfig((str(source),), sequence_length=32, workers=1, tokenizer=TokenizerConfig("bytes")),
        optimizer=OptimizerConfig(learning_rate=0.02, kind="muon"),
        schedule=ScheduleConfig("wsd", warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=4, keep=3),
        evaluate_sequences=4,
    )
    return dataclasses.replace(config, **changes)


def losses(records: tuple[TrainRecord, ...]) -> list[tuple[float, float]]:
    return [(record.loss, record.gradient_norm) for record in records]


class Interrupting(Silent):
    """Presses Ctrl-C while a step is computed; hears what is told."""

    def __init__(self, at_step: int = 0) -> None:
        self.at_step = at_step
        self.heard: list[str] = []

    def step(self, record: TrainRecord, memory_bytes: int) -> None:
        if record.step == self.at_step:
            signal.raise_signal(signal.SIGINT)

    def tell(self, message: str) -> None:
        self.heard.append(message)


@pytest.mark.long
@pytest.mark.parametrize("harm", [False, True], ids=["whole", "latest-checkpoint-damaged"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(harm: bool, tmp_path: Path, source: Path) -> None:
    whole = Trainer(tiny(tmp_path / "whole", source)).run()
    assert whole.finished
    config = tiny(tmp_path / "broken", source)
    stopped = Trainer(config, watcher=Interrupting(at_step=6)).run()
    assert (stopped.finished, stopped.steps) == (False, 6)
    if harm:
        data = next((tmp_path / "broken/checkpoints/step-000000006/tensors").glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    watcher = Interrupting()
    resumed = Trainer(config, resume=True, watcher=watcher).run()
    assert f"resuming after step {4 if harm else 6}" in watcher.heard[-1]
    assert any("step-000000006 is damaged" in message for message in watcher.heard) == harm
    assert losses(resumed.records) == losses(whole.records)
    assert losses(tuple(read_log(tmp_path / "broken/log.csv"))) == losses(whole.records)
    assert resumed.held_out_loss == whole.held_out_loss
    for own, expected in zip(*(_weights(result.model_folder) for result in (resumed, whole)), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.thorough
def test_compiled_layers_train_alike(tmp_path: Path, source: Path) -> None:
    plain, compiled = (
        Trainer(tiny(tmp_path / str(on), source, steps=3, compile=on)).run() for on in (False, True)
    )
    for one, other in zip(losses(plain.records), losses(compiled.records), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_products_in_8_bits_are_refused_where_there_are_none(tmp_path: Path, source: Path) -> None:
    config = tiny(tmp_path / "run", source, dtype="bfloat16", products="fp8")
    with pytest.raises(ConfigError, match="needs a GPU with 8-bit products"):
        Trainer(config).run()
    with pytest.raises(ConfigError, match="goes with dtype: bfloat16, and dtype is float32"):
        Trainer(dataclasses.replace(config, dtype="float32", folder=str(tmp_path / "other"))).run()


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(load_model(folder).decoder.parameters())


@pytest.mark.long
def test_the_loss_falls_and_others_can_load_the_model(tmp_path: Path, source: Path) -> None:
    result = Trainer(tiny(tmp_path / "run", source, steps=40)).run()
    records = result.records
    assert records[0].loss > 5.4  # knows nothing: ln 259
    assert records[-1].loss < 2.6
    assert result.held_out_loss is not None
    assert result.held_out_loss < 2.8
    assert [record.step for record in records] == list(range(1, 41))
    xml.etree.ElementTree.parse(result.plot)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(result.model_folder)
    loaded = load_model(result.model_folder)
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer.encode("the dog sat")
    assert AutoTokenizer.from_pretrained(result.model_folder).encode("the dog sat") == tokens
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Stepper(loaded.decoder).feed(tokens, 8), expected, atol=1e-4, rtol=0)
    # The exported model has the loss that training reported: the mean over a text is near, not that of chance.
    own = torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(tokens[1:]))
    assert own < 3.5
    with pytest.raises(ConfigError, match="already contains checkpoints"):
        Trainer(tiny(tmp_path / "run", source)).run()


def test_micro_batches_and_recomputation_change_nothing_in_float64(tmp_path: Path, source: Path) -> None:
    one = tiny(tmp_path / "one", source, dtype="float64", steps=5)
    many = dataclasses.replace(one, folder=str(tmp_path / "many"), micro_batch=2, recompute=True)
    results = [Trainer(config).run().records for config in (one, many)]
    for own, other in zip(*results, strict=True):
        assert own.loss == pytest.approx(other.loss, rel=1e-10)
        assert own.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-9)


@pytest.mark.long
def test_experts_are_trained_and_kept_even(tmp_path: Path, source: Path) -> None:
    moe = {"experts": 4, "experts_per_token": 2, "expert_hidden": 16}
    from cumulo.spec.model import MoESpec

    model = ModelConfig(family="qwen3_moe", hidden=16, layers=2, heads=2, moe=MoESpec(**moe))
    result = Trainer(tiny(tmp_path / "run", source, model=model, steps=25, balance_loss=0.05)).run()
    assert result.records[-1].loss < result.records[0].loss - 1.5
    assert 1.0 <= result.records[-1].balance < 1.3
    assert load_model(result.model_folder).spec.moe == dataclasses.replace(MoESpec(**moe), dense_layers=())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_with_master_weights_learns(tmp_path: Path, source: Path) -> None:
    config = tiny(tmp_path / "run", source, dtype="bfloat16", steps=12)
    stopped = Trainer(config).run(should_stop=lambda step: step == 5)
    resumed = Trainer(config, resume=True).run()
    assert len(resumed.records) == 12
    assert losses(resumed.records[:5]) == losses(stopped.records)
    assert resumed.records[-1].loss < resumed.records[0].loss - 1


def test_a_diverging_run_stops_and_says_why(tmp_path: Path, source: Path) -> None:
    wild = OptimizerConfig(learning_rate=1e4, clip_norm=0)
    config = tiny(tmp_path / "run", source, optimizer=wild, steps=60, guard=GuardConfig(window_steps=5))
    with pytest.raises(TrainingError, match=r"stopped at step \d+: the loss .*lower the learning rate"):
        Trainer(config).run()


@pytest.mark.long
def test_after_a_spike_the_run_goes_back_and_past_the_bad_data(tmp_path: Path) -> None:
    drawn = random.Random(0)
    source = tmp_path / "texts.jsonl"
    noise = "".join(chr(drawn.randint(33, 126)) for _ in range(70))
    texts = (["ab" * 100] * 40 + [noise]) * 4
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    guard = GuardConfig("rollback", spike_deviations=8, window_steps=10, most_rollbacks=20)
    config = tiny(
        tmp_path / "run", source, steps=60, guard=guard, evaluate_sequences=0,
        checkpoint=CheckpointConfig(every_steps=5, keep=2),
    )  # fmt: skip
    watcher = Interrupting()
    result = Trainer(config, watcher=watcher).run()
    back = [message for message in watcher.heard if "back to step" in message]
    assert len(back) >= 1
    assert "the loss jumped to" in back[0]
    assert result.finished
    assert [record.step for record in result.records] == list(range(1, 61))
    jumps = [float(message.split("jumped to ")[1].split(",")[0]) for message in back]
    assert max(record.loss for record in result.records[30:]) < max(jumps)


def test_other_data_is_refused_on_resume(tmp_path: Path, source: Path) -> None:
    config = tiny(tmp_path / "run", source)
    Trainer(config).run(should_stop=lambda step: step == 2)
    source.write_text(source.read_text() * 2)
    with pytest.raises(ConfigError, match=r"trained with other data: tokens, samples_per_epoch changed"):
        Trainer(config, resume=True).run()


@pytest.mark.long
def test_adapters_learn_answers_and_leave_the_model_as_it_was(tmp_path: Path, source: Path) -> None:
    base = Trainer(tiny(tmp_path / "base", source)).run().model_folder
    chats = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "yes " * 4}]}
        for n in range(60)
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(
        tmp_path / "chat", chats, steps=30, model=ModelConfig(start_from=str(base)), lora=LoraConfig(rank=4),
        optimizer=OptimizerConfig(learning_rate=0.02, weight_decay=0.0),
        data=DataConfig((str(chats),), "chat", sequence_length=32, workers=1),
    )  # fmt: skip
    trainer = Trainer(config)
    result = trainer.run()
    assert result.records[-1].loss < result.records[0].loss - 1.5
    before = dict(load_model(base).decoder.named_parameters())
    model = trainer.model_run.chunks[0]
    adapted = dict(model.named_parameters())
    assert all(torch.equal(adapted[name], before[name]) for name in before)
    merged = load_model(result.model_folder)
    assert merged.tokenizer is not None
    tokens = merged.tokenizer.encode("say yes")
    from tests.train.test_model import logits_of

    with torch.no_grad():
        expected = logits_of(model, [[tokens]])
    torch.testing.assert_close(Stepper(merged.decoder).feed(tokens, 8), expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="no projection 'qvk'; did you mean 'qkv'"):
        changed = dataclasses.replace(config, folder=str(tmp_path / "x"), lora=LoraConfig(targets=("qvk",)))
        Trainer(changed).run()


@pytest.mark.long
def test_training_needs_no_triton() -> None:
    """Where there is no GPU there is none."""
    program = (
        "import sys; sys.modules['triton'] = None; "
        "import cumulo.train.run.trainer, cumulo.train.run.verify, cumulo.train.head.trainer"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
