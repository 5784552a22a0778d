"""The training forward against the decoder that serves and against `transformers`: logits, losses, gradients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cumulo.models.decoder import Decoder
from cumulo.models.files import names_huggingface
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.train.data.packing import IGNORED, Batch, DeviceBatch, to_device
from cumulo.train.model.model import TrainingDecoder, cross_entropy_sum
from tests.models import tiny
from tests.models.stepper import Stepper

FAMILIES = ("llama", "qwen3", "mixtral", "mistral", "qwen3_moe_sparse", "deepseek_v2_lite", "deepseek_v3")


def documents_batch(rows: list[list[list[int]]]) -> DeviceBatch:
    """Rows of documents of tokens as the loader would make them; the last token of each has no target."""
    tokens = [[token for document in row for token in document] for row in rows]
    targets = [[t for document in row for t in (*document[1:], IGNORED)] for row in rows]
    positions = [[place for document in row for place in range(len(document))] for row in rows]
    lengths = [len(document) for row in rows for document in row]
    arrays = [np.array(part) for part in (tokens, targets, positions)]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    return to_device(Batch(*arrays, starts, int((arrays[1] != IGNORED).sum())), torch.device("cpu"))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str, **options: Any) -> Any:
        folder = root / name
        model = tiny.save(name, folder)
        spec = spec_from_config(json.loads((folder / "config.json").read_text()))
        training = TrainingDecoder(spec, **options)
        fill_decoder(training, FolderWeights(folder, spec))  # type: ignore[arg-type]
        decoder = Decoder(spec)
        fill_decoder(decoder, FolderWeights(folder, spec))
        return model, training, decoder

    return make


def logits_of(training: TrainingDecoder, rows: list[list[list[int]]]) -> torch.Tensor:
    """Of every token, from what the last norm gives to the loss."""
    given: list[torch.Tensor] = []
    hook = training.final_norm.register_forward_hook(lambda module, taken, found: given.append(found))
    training(documents_batch(rows))
    hook.remove()
    return torch.nn.functional.linear(given[0], training.output_weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_decoder_and_of_transformers(name: str, load: Any) -> None:
    model, training, decoder = load(name)
    first, second, third = tiny.prompt(40, seed=1), tiny.prompt(24, seed=2), tiny.prompt(64, seed=3)
    logits = logits_of(training, [[first, second], [third]])
    for document, rows in ((first, slice(0, 40)), (second, slice(40, 64)), (third, slice(64, 128))):
        scale = logits[rows].abs().max()
        torch.testing.assert_close(
            logits[rows] / scale, Stepper(decoder).feed(document, 64) / scale, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            logits[rows] / scale, tiny.reference_logits(model, document) / scale, atol=1e-5, rtol=0
        )


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_transformers(name: str, recompute: bool, load: Any) -> None:
    model, training, _ = load(name, recompute=recompute)
    documents = [tiny.prompt(40, seed=1), tiny.prompt(24, seed=2)]
    losses = training(documents_batch([documents]))
    (losses.token_sum / 62).backward()
    expected = sum(_reference_loss(model, document) for document in documents) / 62
    expected.backward()
    torch.testing.assert_close(losses.token_sum / 62, expected, atol=1e-5, rtol=1e-5)
    compare_gradients(training, model)


def _reference_loss(model: Any, document: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([document])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(document[1:]), reduction="sum")


def compare_gradients(training: TrainingDecoder, model: Any) -> None:
    """Every gradient, each in units of its own largest element."""
    own = dict(training.named_parameters())
    theirs = hub_gradients(model)
    compared = 0
    for placement in names_huggingface.placements(training.spec):
        if placement.target.endswith("selection_bias"):
            assert own[placement.target].grad is None
            continue
        expected = theirs[placement.source]
        actual = placement.region(own[placement.target].grad)
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(actual / scale, expected / scale, atol=1e-5, rtol=0, msg=placement.source)
        compared += 1
    assert compared > 10


def hub_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by the names of the checkpoint: transformers fuses experts in memory, one per tensor on disk."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in list(found):
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            gradient, stem = found.pop(name), name.rsplit(".", 1)[0]
            mixtral = model.config.model_type == "mixtral"
            stem = stem.replace(".mlp.", ".block_sparse_moe.") if mixtral else stem
            gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            for expert, own in enumerate(gradient):
                if "gate_up" in name:
                    found[f"{stem}.{expert}.{gate}.weight"], found[f"{stem}.{expert}.{up}.weight"] = (
                        own.chunk(2)
                    )
                else:
                    found[f"{stem}.{expert}.{down}.weight"] = own
        elif model.config.model_type == "mixtral" and ".mlp.gate." in name:
            found[name.replace(".mlp.", ".block_sparse_moe.")] = found.pop(name)
    return found


def test_the_balance_of_one_layer_and_row_is_that_of_transformers(tmp_path: Path) -> None:
    model = tiny.save("mixtral", tmp_path, num_hidden_layers=1)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    training = TrainingDecoder(spec)
    fill_decoder(training, FolderWeights(tmp_path, spec))  # type: ignore[arg-type]
    tokens = tiny.prompt(50, seed=4)
    losses = training(documents_batch([[tokens]]))
    expected = model(torch.tensor([tokens]), output_router_logits=True).aux_loss
    # theirs counts each of the two choices in full: even use is 2, ours 1
    torch.testing.assert_close(losses.balance_sum, expected / 2, atol=1e-6, rtol=1e-5)
    losses.balance_sum.backward()
    (expected / 2).backward()
    (theirs,) = (weight.grad for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight"))
    torch.testing.assert_close(training.layers["0"].ffn.router.weight.grad, theirs, atol=1e-6, rtol=1e-4)


def test_a_document_does_not_feel_its_neighbours(load: Any) -> None:
    _, training, _ = load("llama")
    kept, other, another = (tiny.prompt(20, seed=seed) for seed in (1, 2, 3))
    found = [logits_of(training, [[before, kept]])[20:] for before in (other, another)]
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits_of(training, [[other + kept]])[20:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunked_cross_entropy_is_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumulo.train.model.model._LOGIT_BYTES", 7 * 50 * 4)  # many small chunks
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=random).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (40,), generator=random)
    targets[::7] = IGNORED
    loss = cross_entropy_sum(x, weight, targets)
    grads = torch.autograd.grad(loss * 0.3, (x, weight))
    exact = [part.detach().double().requires_grad_() for part in (x, weight)]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected * 0.3, exact)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected, atol=0, rtol=tolerance)
    for actual, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(actual.double(), want, atol=tolerance * float(want.abs().max()), rtol=0)
