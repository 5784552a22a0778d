"""Decoders as ONNX files: onnxruntime says what transformers says, for each family and however a text is cut."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="not installed: onnx")
pytest.importorskip("onnxruntime", reason="not installed: onnxruntime")

import onnx

from cumulo.compile.onnx.decoder import export_decoder
from cumulo.compile.onnx.inspect import inspect
from cumulo.compile.onnx.play import OnnxDecoder
from cumulo.errors import ModelError
from cumulo.models.files.load import load_model
from tests.cli.conftest import Run
from tests.models import tiny

DENSE = [
    "llama", "llama_biased", "llama3_rope", "llama_linear_rope", "smollm2", "mistral", "qwen2", "qwen2_windowed",
    "qwen2_yarn", "qwen3",
]  # fmt: skip
SIZES = {"batch": 1, "new": 5, "past": 3}


def exported(name: str, folder: Path) -> tuple[Path, OnnxDecoder]:
    loaded = load_model(folder, with_tokenizer=False)
    path = export_decoder(loaded.decoder, folder / "onnx")
    return path, OnnxDecoder(path, loaded.spec, threads=1)


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_transformers_for_a_prompt_in_one_piece_or_several(
    name: str, tmp_path: Path
) -> None:
    oracle = tiny.save(name, tmp_path)
    prompt = tiny.prompt(40, seed=3)
    wanted = tiny.reference_logits(oracle, prompt).numpy().reshape(40, -1)
    _, player = exported(name, tmp_path)
    whole = player.step(np.array([prompt]))[0]
    np.testing.assert_allclose(whole, wanted, atol=2e-4)
    player.begin(1)
    pieces = [player.step(np.array([prompt[a:b]]))[0] for a, b in ((0, 17), (17, 18), (18, 40))]
    np.testing.assert_allclose(np.concatenate(pieces), wanted, atol=2e-4)
    player.begin(2)
    both = player.step(np.array([prompt, prompt[::-1]]))
    np.testing.assert_allclose(both[0], wanted, atol=2e-4)
    said, _ = player.generate(prompt, 12)
    assert said == tiny.reference_greedy(oracle, prompt, 12)


def test_what_is_not_exported_is_refused_by_name(tmp_path: Path) -> None:
    for name, reason in (("mixtral", "routed experts"), ("youtu", "latent attention")):
        tiny.save(name, tmp_path / name)
        loaded = load_model(tmp_path / name, with_tokenizer=False)
        with pytest.raises(ModelError, match=reason):
            export_decoder(loaded.decoder, tmp_path / "out")


def test_flops_bytes_and_shapes_are_counted_by_hand(tmp_path: Path) -> None:
    """A product, a bias and a sigmoid: the numbers anybody can check."""
    helper = onnx.helper
    number = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "product"),
        helper.make_node("Add", ["product", "b"], ["sum"], "sum"),
        helper.make_node("Sigmoid", ["sum"], ["y"], "y"),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.ones((8, 16), np.float32), "w"),
        onnx.numpy_helper.from_array(np.ones(16, np.float32), "b"),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", number, ["rows", 8])],
        [helper.make_tensor_value_info("y", number, ["rows", 16])], weights,
    )  # fmt: skip
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    found = inspect(path, {"rows": 4})
    assert [(one.kind, one.shape, one.flops) for one in found.operators] == [
        ("MatMul", (4, 16), 2 * 4 * 16 * 8), ("Add", (4, 16), 64), ("Sigmoid", (4, 16), 64),
    ]  # fmt: skip
    assert (found.operators[0].read_bytes, found.operators[0].written_bytes) == (4 * (4 * 8 + 8 * 16), 4 * 64)
    assert found.weight_bytes == 4 * (8 * 16 + 16) and found.unknown_shapes == 0
    assert [(one.kinds, one.count, one.saved_bytes) for one in found.candidates] == [
        (("MatMul", "Add", "Sigmoid"), 1, 2 * 2 * 4 * 64)
    ]
    with pytest.raises(ModelError, match="--set rows=NUMBER"):
        inspect(path, {})


def test_the_flops_of_a_decoder_are_those_of_the_specs_own_count(tmp_path: Path) -> None:
    from cumulo.spec.counting import flops_per_token

    tiny.save("qwen3", tmp_path)
    path, _ = exported("qwen3", tmp_path)
    spec = load_model(tmp_path, with_tokenizer=False).spec
    found = inspect(path, {"batch": 1, "new": 1, "past": 63})
    products = sum(one.flops for one in found.operators if one.kind == "MatMul")
    assert products == flops_per_token(spec, 64)


def test_compile_model_with_onnx_exports_it(cumulo: Run, tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path / "mixture")
    refused = cumulo("compile", str(tmp_path / "mixture"), "--onnx", str(tmp_path / "out"))
    assert refused.code == 2 and "routed experts" in refused.err
    assert "No such command" in cumulo("compile", "stage", "x").err


def test_a_damaged_or_foreign_file_is_refused_in_a_line(cumulo: Run, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\x08\x09 no graph")
    refused = cumulo("compile", "onnx", str(tmp_path / "x.onnx"))
    assert refused.code == 2 and "is no valid ONNX file" in refused.err and "Traceback" not in refused.err
    assert "there is no file" in cumulo("compile", "onnx", str(tmp_path / "y.onnx")).err
    assert "a size is a whole number" in cumulo("compile", "onnx", "--set", "new=many").err


@pytest.mark.long
def test_two_hundred_tokens_of_the_built_in_model_are_torchs(cumulo: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = cumulo("compile", "onnx", "--out", str(tmp_path / "out"), "--tokens", "200", "--json", str(report))
    assert done.code == 0 and "200 of 200 greedy tokens of onnxruntime are torch's" in done.out
    onnx.checker.check_model(str(tmp_path / "out/model.onnx"), full_check=True)
    assert "MatMul → Mul → Add → Softmax" in done.out
    assert json.loads(report.read_text())["operators"]
