"""`cumulo train` and `cumulo data` as a user types them."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from cumulo.cli import train_run
from cumulo.errors import ConfigError
from cumulo.train.decide.config import TrainConfig, config_from, load_config
from cumulo.train.head.config import read_head_config
from tests.cli.conftest import Run

SMALL = (
    "model: {hidden: 16, layers: 1, heads: 2}\nbatch_sequences: 4\nmicro_batch: 4\nsteps: 6\n"
    "schedule: {warmup_steps: 1}\nevaluate_sequences: 2\ndevice: cpu\n"
)


def configuration(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a quick brown fox jumps over the lazy dog. " * 60)
    (tmp_path / "more.txt").write_text("the lazy dog sleeps. " * 60)
    data = f"data: {{sources: ['{tmp_path}'], sequence_length: 16, workers: 1, tokenizer: {{kind: bytes}}}}\n"
    (tmp_path / "run.yaml").write_text(SMALL + data + f"folder: {tmp_path / 'run'}\n")
    return tmp_path / "run.yaml"


def test_a_run_reports_and_leaves_a_model_that_answers(cumulo: Run, tmp_path: Path) -> None:
    config, report = configuration(tmp_path), tmp_path / "report.json"
    ran = cumulo("train", str(config), "--json", str(report))
    assert ran.code == 0, ran.err
    assert "step 6/6" in ran.err
    assert "held-out loss" in ran.out
    assert f"cumulo chat {tmp_path / 'run' / 'model'}" in ran.out
    losses = json.loads(report.read_text())["losses"]
    assert len(losses) == 6
    again = cumulo("train", str(config), "--folder", str(tmp_path / "again"), "--json", "-")
    assert again.code == 0, again.err
    assert json.loads(again.out)["losses"] == losses  # to the last digit
    answer = cumulo("chat", str(tmp_path / "run"), "--max-tokens", "4", stdin="a quick")
    assert answer.code == 0, answer.err
    resumed = cumulo("train", str(config), "--resume")
    assert "all 6 steps are done already" in resumed.err and "held-out loss" in resumed.out
    refused = cumulo("train", str(config))
    assert refused.code == 2
    assert "already contains checkpoints; resume them with --resume" in refused.err


def test_ctrl_c_before_the_ranks_have_begun_is_no_success(
    cumulo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, changes = configuration(tmp_path), ("--set", "layout.dp=2", "--set", "micro_batch=2")
    monkeypatch.setattr(train_run, "launch", lambda *_: False)
    ran = cumulo("train", str(config), *changes)
    assert ran.code == 130 and "stopped before the ranks had begun: nothing was trained" in ran.err
    monkeypatch.setattr(train_run, "launch", lambda *_: (tmp_path / "run/loss.svg").write_text("") > 0)
    assert cumulo("train", str(config), *changes).code == 0


def test_a_mistake_in_the_configuration_is_one_line(cumulo: Run, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    ran = cumulo("train", str(config), "--set", "optimizer.learnin_rate=1")
    assert ran.code == 2
    assert "no setting 'learnin_rate'; did you mean 'learning_rate'?" in ran.err
    ran = cumulo("train", str(tmp_path / "text.txt"), "--set", "optimizer.learnin_rate=1")
    assert "config.optimizer has no setting 'learnin_rate'" in ran.err
    assert "NAME=VALUE" in cumulo("train", str(config), "--set", "steps").err
    assert "cannot read" in cumulo("train", str(tmp_path / "none.yaml")).err
    assert "contains no run to resume" in cumulo("train", "--resume", "--folder", str(tmp_path)).err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{a: [1", "line 1, column 7: expected ',' or ']', but got the end of the file"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("!!python/object:os.system x", "line 1, column 1: could not determine a constructor"),
        ("2024-99-99", "month must be in 1..12"),
        (9_999 * "[", "its brackets are nested too deeply"),
    ],
)
@pytest.mark.parametrize("head", [False, True])
def test_a_value_that_is_no_yaml_is_named_with_its_place(
    tmp_path: Path, value: str, said: str, head: bool
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("kind: eagle\n" if head else "steps: 3\n")
    read = read_head_config if head else load_config
    with pytest.raises(ConfigError) as error:
        read(config, {"steps": value})
    assert str(error.value).startswith(f"--set steps={value[:20]}") and said in str(error.value)


def test_the_whole_configuration_can_be_seen(cumulo: Run, tmp_path: Path) -> None:
    ran = cumulo("train", "--show-config", "--steps", "77", "--folder", str(tmp_path / "x"))
    shown = yaml.safe_load(ran.out)
    assert shown["steps"] == 77
    assert shown["data"]["sources"] == ["python-stdlib"]
    assert not (tmp_path / "x").exists()


def test_a_dataset_is_built_and_shown(cumulo: Run, tmp_path: Path) -> None:
    configuration(tmp_path)
    built = cumulo("data", "build", str(tmp_path / "set"), str(tmp_path / "more.txt"), "--vocab-size", "300")
    assert built.code == 0, built.err
    assert "in 1 documents" in built.out
    assert cumulo("data", "show", str(tmp_path / "set")).out.startswith("the lazy dog sleeps. the lazy")
    assert (
        "--document 3 does not exist" in cumulo("data", "show", str(tmp_path / "set"), "--document", "3").err
    )


def test_every_setting_is_explained_in_a_text_that_is_a_configuration(cumulo: Run) -> None:
    shown = cumulo("train", "--settings").out
    assert config_from(yaml.safe_load(shown)) == TrainConfig()
    assert "steps: 300  # optimizer steps" in shown and "#  rank: 8" in shown
    page = Path(__file__).parents[2] / "docs/train-settings.yaml"
    assert page.read_text("utf-8") == shown, (
        "write what `cumulo train --settings` prints into docs/train-settings.yaml"
    )


def test_own_text_and_own_conversations_get_a_configuration(cumulo: Run, tmp_path: Path) -> None:
    book, chats = tmp_path / "my book.txt", tmp_path / "chats.json"
    book.write_text("Once upon a time. " * 20_000)
    chats.write_text(json.dumps([{"instruction": "Add.", "input": "1 and 2", "output": "3"}] * 50))
    ran = cumulo("train", str(book), "--show-config")
    shown = yaml.safe_load(ran.out)
    assert shown["data"]["sources"] == [str(book)] and shown["data"]["format"] == "text"
    assert (
        shown["folder"] == "runs/my-book" and shown["model"]["start_from"] is None and shown["lora"] is None
    )
    assert "360,000 bytes of text in 1 file" in ran.err and shown["steps"] == 160
    assert yaml.safe_load(cumulo("train", str(book), "--steps", "3", "--show-config").out)["steps"] == 3
    ran = cumulo("train", str(chats), "--show-config")
    shown = yaml.safe_load(ran.out)
    assert shown["data"]["format"] == "chat" and shown["model"]["start_from"] == "built-in" and shown["lora"]
    assert "conversations" in ran.err
    both = cumulo("train", str(chats), str(book))
    assert both.code == 2 and "train on one kind at a time" in both.err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"title": "a", "story": "b"}\n')
    assert "the fields title, story" in " ".join(cumulo("train", str(rows)).err.split())
    assert "no dataset at" in cumulo("train", str(tmp_path / "missing.txt")).err


def test_own_text_is_trained_with_a_part_held_out(
    cumulo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "it",
        "reads",
        "another",
        "book",
    ]
    book = tmp_path / "book.txt"
    book.write_text(" ".join(words[number * number % len(words)] for number in range(9_000)))
    small = ("model.hidden=16", "model.layers=1", "model.heads=2", "model.ffn_hidden=32", "data.workers=1")
    sizes = (*small, "data.sequence_length=64", "evaluate_sequences=2")
    changes = [word for setting in sizes for word in ("--set", setting)]
    monkeypatch.chdir(tmp_path)
    ran = cumulo("train", str(book), "--steps", "2", *changes)
    assert ran.code == 0, ran.err
    assert "held-out loss" in ran.out and "nan" not in ran.out
    rows = int(re.findall(r"([\d,]+) sequences of 64", ran.err)[0].replace(",", ""))
    assert (
        f"2 steps of 768 tokens read {2 * 12 / rows:.1%} of them; --steps {math.ceil(rows / 12)} reads"
        in ran.err
    )
    assert re.search(r"step 1/2 · .* left", ran.err) and not re.search(r"step 2/2 · .* left", ran.err)
    more = cumulo("train", str(book), "--steps", "3", "--resume")
    assert "the run to resume: runs/book" in more.err and "resuming after step 2" in more.err
    assert "step 3/3" in more.err
    missing = cumulo("train", str(tmp_path / "other.txt"), "--resume")
    assert "--resume finds no run in runs/other: give the run's --folder" in missing.err
    refused = cumulo("train", str(book), "--model", str(tmp_path / "none"))
    assert refused.code == 2 and not Path("runs/book-2").exists()


def test_data_too_short_for_a_held_out_loss_says_so(cumulo: Run, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    ran = cumulo("train", str(config), "--set", "data.sequence_length=1500", "--steps", "2")
    assert "no held-out loss: " in ran.err and "one sequence takes 1,501" in ran.err
    assert "held-out loss" not in ran.out
