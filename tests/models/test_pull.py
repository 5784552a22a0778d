"""Models are pulled from a hub: what is chosen, resumed, checked and kept."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cumulo.errors import ModelError
from cumulo.models.files import pull as pulling
from cumulo.models.files.hub import resolve
from cumulo.models.files.pull import PullProgress
from cumulo.models.files.pulled import (
    PulledModel,
    find_pulled,
    models_folder,
    pulled_models,
    remove_pulled,
    short_name,
)
from tests.models.hub_server import Hub, running_hub

WEIGHTS = os.urandom(3 << 20)
QUANTIZED = {f"model-{tag}.gguf": tag.encode() * 1000 for tag in ("Q2_K", "Q4_K_M", "Q8_0")}


def pull(name: str, hub: str, tell: Callable[[PullProgress], None] = lambda progress: None) -> PulledModel:
    for progress in pulling.pull(name, hub, every_s=0):
        tell(progress)
    pulled = find_pulled(name)
    assert pulled is not None
    return pulled


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pulling, "_PAUSE_S", 0.0)
    with running_hub() as running:
        running.models["poet/small"] = {
            "config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b'{"a": 1}', "README.md": b"no",
            "onnx/model.safetensors": b"no", "pytorch_model.bin": b"no",
        }  # fmt: skip
        running.models["poet/quantized"] = {**QUANTIZED, "README.md": b"no"}
        yield running


def test_a_folder_is_pulled_without_what_is_not_read(hub: Hub) -> None:
    told: list[PullProgress] = []
    model = pull("poet/small", hub.url, told.append)
    files = {path.name for path in model.path.iterdir() if not path.name.startswith(".")}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "model.json"}
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (model.license, model.revision, model.size_bytes) == ("apache-2.0", "c0ffee", len(WEIGHTS) + 10)
    assert told[-1].done_bytes == told[-1].total_bytes == model.size_bytes
    assert resolve("poet/small").path == model.path
    assert find_pulled("hf.co/poet/small") == model


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("poet/quantized", "model-Q4_K_M.gguf"),
        ("poet/quantized:q8_0", "model-Q8_0.gguf"),
        ("poet/quantized/model-Q2_K.gguf", "model-Q2_K.gguf"),
        ("https://huggingface.co/poet/quantized:Q2_K", "model-Q2_K.gguf"),
    ],
)
def test_one_quantization_of_a_gguf_model_is_pulled(hub: Hub, name: str, file: str) -> None:
    model = pull(name, hub.url)
    assert model.path.name == file
    assert model.path.read_bytes() == QUANTIZED[file]
    assert [path.name for path in model.folder.glob("*.gguf")] == [file]
    source = resolve(name)
    assert (source.path, source.format, source.name) == (model.path, "gguf", model.name)


def test_an_interrupted_download_is_resumed(hub: Hub) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(progress: PullProgress) -> None:
        if progress.file.path == "model.safetensors":
            raise Interrupted

    with pytest.raises(Interrupted):
        pull("poet/small", hub.url, interrupt)
    assert pulled_models() == [] and find_pulled("poet/small") is None
    hub.asked.clear()
    model = pull("poet/small", hub.url)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = dict(hub.asked)
    assert ranges["/poet/small/resolve/c0ffee/model.safetensors"] == f"bytes={1 << 20}-"
    assert "/poet/small/resolve/c0ffee/config.json" not in ranges


def test_a_model_that_is_named_and_not_here_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = resolve("poet/quantized")
    assert (source.format, source.path.name) == ("gguf", "model-Q4_K_M.gguf")
    assert "poet/quantized: 0 of 0 MB" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"'poet/none' is not a folder or file here.*does not exist there"):
        resolve("poet/none")
    # What Hugging Face's own tools have downloaded is not downloaded again.
    cache = tmp_path / "hf" / "hub" / "models--poet--other"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    for name in ("model.safetensors", "q8.gguf"):
        (cache / "snapshots" / "abc" / name).touch()
    assert resolve("poet/other").path == cache / "snapshots" / "abc"
    assert resolve("poet/other/q8.gguf").path.name == "q8.gguf"


@pytest.mark.parametrize("resumes", [True, False])
def test_connections_that_end_early_are_opened_again(hub: Hub, resumes: bool) -> None:
    hub.cut_after, hub.resumes = 1 << 20, resumes
    if resumes:
        assert (pull("poet/small", hub.url).path / "model.safetensors").read_bytes() == WEIGHTS
    else:  # it begins anew each time, and is given up
        with pytest.raises(ModelError, match="ask again"):
            pull("poet/small", hub.url)


def test_a_file_with_another_checksum_is_refused_and_fetched_anew(hub: Hub) -> None:
    hub.spoils = "model.safetensors"
    with pytest.raises(ModelError, match="checksum"):
        pull("poet/small", hub.url)
    assert find_pulled("poet/small") is None
    hub.spoils = "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json.*checksum"):
        pull("poet/small", hub.url)
    hub.spoils = ""
    assert (pull("poet/small", hub.url).path / "model.safetensors").read_bytes() == WEIGHTS


def test_no_path_of_a_list_leads_out_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    hub.models["poet/evil"] = {"../../evil.json": b"1", "/tmp/evil.json": b"1", "model.safetensors": b"2"}
    model = pull("poet/evil", hub.url)
    assert not list(tmp_path.rglob("evil.json"))
    assert sorted(path.name for path in model.path.glob("[!.]*")) == ["model.json", "model.safetensors"]
    with pytest.raises(ModelError, match="no name of a model"):
        pull("../evil", hub.url)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("poet/none", "does not exist there, or needs a token"),
        ("poet/quantized:Q6_K", "has no files of Q6_K; it has model-Q2_K.gguf"),
        ("poet/quantized/other.gguf", "no such file; it has"),
        ("no-name", "owner/name"),
    ],
)
def test_what_cannot_be_pulled_is_said_in_words(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pull(name, hub.url)


def test_a_hub_that_is_none_or_not_there_is_said_in_words(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"cannot be reached.*--hub"):
        pull("poet/small", "http://127.0.0.1:9")
    free = shutil.disk_usage(models_folder().parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(free)(free.total, free.used, 1000))
    with pytest.raises(ModelError, match="has room for"):
        pull("poet/small", hub.url)


def test_a_removed_model_is_gone(hub: Hub) -> None:
    model = pull("poet/quantized:Q2_K", hub.url)
    assert remove_pulled("poet/quantized:Q2_K") == model
    assert not model.folder.exists() and pulled_models() == []
    with pytest.raises(ModelError, match="has not been pulled"):
        remove_pulled("poet/quantized:Q2_K")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf.co/a/b:Q4", "a/b:Q4"), ("a/b", "a/b"), ("a/b/c/d.gguf", "a/b/c/d.gguf"), ("a", None), ("a/..", None),
        ("../b", None), ("a/b/../c.gguf", None), ("/a/b", None), ("a/b/c", None),
    ],
)  # fmt: skip
def test_names_of_a_hub_are_known(text: str, name: str | None) -> None:
    assert short_name(text) == name
