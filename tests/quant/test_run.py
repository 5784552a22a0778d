"""Runs of `cumulo quantize` on a tiny model: every method and format, interrupted runs, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cumulo.errors import ConfigError, ModelError
from cumulo.models.files.load import inspect_model, load_model
from cumulo.quant.decide.recipe import Recipe
from cumulo.quant.play.run import Calibration, quantise
from tests.models.stepper import Stepper
from tests.quant.folders import TEXT, calibration_file, logits, tiny_folder

RECIPES = {
    "rtn": Recipe("rtn"),
    "rtn-8": Recipe("rtn", bits=8, group=32),
    "rtn-gptq": Recipe("rtn", format="gptq", symmetric=False),
    "gptq": Recipe("gptq"),
    "gptq-gptq": Recipe("gptq", format="gptq", act_order=False),
    "awq": Recipe("awq"),
    "awq-awq": Recipe("awq", format="awq"),
    "int8": Recipe("int8"),
    "fp8": Recipe("fp8"),
    "fp8-static": Recipe("fp8", scheme="tensor", static_activations=True),
    "fp8-deepseek": Recipe("fp8", scheme="block", format="fp8"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_file(tmp_path_factory.mktemp("text"))


def run(source: Path, text: Path, output: Path, recipe: Recipe, **more: object) -> Path:
    calibration = Calibration(text if recipe.needs_calibration else None, 4, 64)
    return quantise(source, output, recipe, calibration, **more).folder  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_a_quantised_folder_is_served_as_it_stands_and_stays_near_the_model(
    name: str, source: Path, text: Path, tmp_path: Path
) -> None:
    recipe = RECIPES[name]
    folder = run(source, text, tmp_path / "out", recipe)
    files, loaded = inspect_model(folder), load_model(folder)
    assert loaded.quantised and files.quantised_parameters > 0.5 * files.parameters
    plain_bytes = 4 * (files.parameters - files.quantised_parameters)
    assert files.quantised_bytes + plain_bytes == pytest.approx(loaded.decoder.weight_bytes, rel=0.02)
    packed, plain, original = logits(folder), logits(folder, keep_quantised=False), logits(source)
    # W8A8 rounds activations to 8 bits; all else is the same weights by another kernel.
    assert float((packed - plain).abs().max()) < (0.5 if name == "int8" else 0.02)
    agreement = torch.cosine_similarity(packed.flatten(), original.flatten(), 0)
    assert float(agreement) > (0.99 if recipe.method in ("int8", "fp8") or recipe.bits == 8 else 0.9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("mixtral", "gptq"),
        ("deepseek_v2", "awq"),
        ("llama_biased", "awq"),
        ("phi3", "awq"),
        *(
            pytest.param(family, method, marks=pytest.mark.thorough)
            for family in ("qwen3", "mixtral", "deepseek_v2", "llama_biased", "phi3")
            for method in ("gptq", "awq", "fp8")
        ),
    ],
)
def test_other_architectures_go_through_every_kind_of_method(
    family: str, method: str, text: Path, tmp_path: Path
) -> None:
    sizes = (
        {"moe_intermediate_size": 32, "q_lora_rank": 32, "v_head_dim": 16} if family == "deepseek_v2" else {}
    )
    source = tiny_folder(tmp_path / "source", family, **sizes)
    recipe = Recipe(method, group=None if method == "fp8" else 32)  # type: ignore[arg-type]
    folder = run(source, text, tmp_path / "out", recipe)
    packed, plain = logits(folder), logits(folder, keep_quantised=False)
    assert float((packed - plain).abs().max()) < 0.05
    assert float(torch.cosine_similarity(packed.flatten(), logits(source).flatten(), 0)) > 0.7


@pytest.mark.parametrize("recipe", [
    Recipe("rtn", format="awq", layers=2), Recipe("rtn", format="gptq", layers=2, symmetric=True),
    Recipe("fp8", scheme="block", format="fp8", layers=2), Recipe("rtn", format="awq"),
], ids=lambda recipe: f"{recipe.format}-{recipe.layers}")  # fmt: skip
def test_readers_are_told_exactly_what_was_left_in_16_bits(recipe: Recipe, tmp_path: Path) -> None:
    """By part of a name (vLLM's and SGLang's awq), whole names (their fp8) or expressions (gptq). A mixture with a
    dense layer, whose gate_proj is no router, and a layer that stays as it is."""
    sizes = {"moe_intermediate_size": 32, "q_lora_rank": 32, "v_head_dim": 16, "num_hidden_layers": 3}
    recipe = recipe if recipe.method == "fp8" else replace(recipe, group=32)
    folder = quantise(
        tiny_folder(tmp_path / "source", "deepseek_v2", **sizes), tmp_path / "out", recipe
    ).folder
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    quantised = {name.rpartition(".")[0] for name in index if name.endswith(("qweight", "weight_scale_inv"))}
    linear = quantised | {
        name.removesuffix(".weight")
        for name in index
        if name.endswith(".weight") and "norm" not in name and "embed" not in name
    }
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.3.up_proj"} <= quantised < linear
    left_out = config["modules_to_not_convert"]
    by_whole = {
        one for one in linear if one in left_out or f"{one.partition('.experts.')[0]}.experts" in left_out
    }
    assert by_whole == linear - quantised
    by_part = {one for one in linear if any(name in one for name in left_out)}
    assert by_part == linear - quantised
    if recipe.format == "gptq":
        patterns = [one.removeprefix("-:") for one in config["dynamic"]]
        # Readers that fuse projections ask for the fused one.
        asked = {one: re.sub(r"\b(gate|up)_proj$", "gate_up_proj", one) for one in linear}
        by_expression = {one for one in linear if any(re.match(pattern, asked[one]) for pattern in patterns)}
        assert by_expression == linear - quantised


def test_an_interrupted_run_resumes_and_ends_with_the_same_files(
    source: Path, text: Path, tmp_path: Path
) -> None:
    recipe = Recipe("gptq")
    whole = run(source, text, tmp_path / "whole", recipe)

    class Killed(Exception):
        pass

    def kill_in_second_layer(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        run(source, text, tmp_path / "cut", recipe, progress=kill_in_second_layer)
    assert not (tmp_path / "cut").exists()
    stages: list[str] = []
    made = quantise(
        source,
        tmp_path / "cut",
        recipe,
        Calibration(text, 4, 64),
        lambda stage, done, total: stages.append(stage),
    )
    assert made.resumed_at == 1 and not any(stage.startswith("layer 1 ") for stage in stages)
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "cut").iterdir()
    }
    assert not (tmp_path / "cut.quantizing").exists()


def test_unfinished_work_of_other_options_is_refused_and_damaged_work_is_done_again(
    source: Path, text: Path, tmp_path: Path
) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(source, text, output, Recipe("gptq"), progress=stop)
    with pytest.raises(ConfigError, match="unfinished run with other options"):
        run(source, text, output, Recipe("rtn"))
    layer = tmp_path / "out.quantizing" / "layer-00000.safetensors"
    damaged = bytearray(layer.read_bytes())
    damaged[-1] ^= 1
    layer.write_bytes(damaged)
    made = quantise(source, output, Recipe("gptq"), Calibration(text, 4, 64))
    assert made.resumed_at == 0 and made.folder.is_dir()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Recipe("rtn", group=48),
            "--group 48 does not divide this model's rows of 64 and 128 weights; 64 and 32",
        ),
        (Recipe("rtn", group=4), "--group must be 8 or more, got 4"),
        (Recipe("rtn", group=-1), "--group must be 8 or more, got -1"),
        (Recipe("gguf"), "--method must be one of"),  # type: ignore[arg-type]
        (Recipe("rtn", bits=5), "--bits must be 2, 4 or 8"),
        (Recipe("rtn", format="awq", bits=8), "--format awq holds 4-bit"),
        (Recipe("int8", format="gptq"), "int8 is written as compressed-tensors"),
        (Recipe("fp8", format="fp8"), "add --scheme block"),
        (Recipe("gptq", damping=0.0), "--damping"),
        (Recipe("rtn", static_activations=True), "--static-activations exists for"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    recipe: Recipe, message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantise(source, tmp_path / "out", recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "group", "message"),
    [
        ((40, 56), None, "rows of 40 and 56 weights.* use --group 8, or --method int8 or fp8"),
        ((40, 56), 64, "--group 64 does not divide this model's rows of 40 and 56 weights; 8 would"),
        ((72, 100), None, "rows of 72 and 100 weights.* divide; use --method int8 or fp8"),
        (
            (72, 100),
            8,
            "--group 8 does not divide this model's rows of 72 and 100 weights; use --method int8",
        ),
    ],
)
def test_rows_of_other_lengths_are_told_with_the_groups_that_fit(
    sizes: tuple[int, int], group: int | None, message: str, tmp_path: Path
) -> None:
    odd = tiny_folder(tmp_path / "odd", hidden_size=sizes[0], intermediate_size=sizes[1])
    with pytest.raises(ConfigError, match=message):
        quantise(odd, tmp_path / "out", Recipe("rtn", group=group))


def test_bad_input_files_and_folders_are_refused(source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read: No such file"):
        quantise(source, tmp_path / "out", Recipe("gptq"), Calibration(Path("missing.txt")))
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ConfigError, match="calibration text has 9 tokens"):
        quantise(source, tmp_path / "out", Recipe("gptq"), Calibration(short))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": 1}\n')
    with pytest.raises(ConfigError, match="line 1: expected an object"):
        quantise(source, tmp_path / "out", Recipe("gptq"), Calibration(lines))
    with pytest.raises(ConfigError, match="does not use a calibration text"):
        quantise(source, tmp_path / "out", Recipe("rtn"), Calibration(text))
    with pytest.raises(ConfigError, match="exists already"):
        quantise(source, source, Recipe("rtn"))
    folder = run(source, text, tmp_path / "out", Recipe("rtn"))
    with pytest.raises(ModelError, match="quantized already"):
        quantise(folder, tmp_path / "again", Recipe("rtn"))


def test_damaged_quantised_folders_are_refused_in_one_line(source: Path, text: Path, tmp_path: Path) -> None:
    folder = run(source, text, tmp_path / "out", Recipe("rtn"))
    config = json.loads((folder / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for changes, message in (
        ({"group_size": 32}, "weight_scale is F16"),
        ({"num_bits": 8}, "weight_packed is I32"),
        ({"strategy": "spiral"}, "'spiral'"),
    ):
        kept = dict(weights)
        weights.update(changes)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=message) as raised:
            load_model(folder)
        assert "\n" not in str(raised.value)
        weights.clear()
        weights.update(kept)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).quantised
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not hold the weights"):
        load_model(folder)


def test_scales_that_are_no_numbers_are_refused(source: Path, text: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = run(source, text, tmp_path / "out", Recipe("rtn"))
    file = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj contains NaN or infinite"):
        load_model(folder)


def test_a_rank_of_two_loads_its_half_of_every_matrix(source: Path, text: Path, tmp_path: Path) -> None:
    from cumulo.layout.serving import ServingLayout, rank_part

    for recipe in (Recipe("rtn", group=32), Recipe("fp8")):
        folder = run(source, text, tmp_path / recipe.method, recipe)
        whole = load_model(folder, keep_quantised=False)
        for rank in (0, 1):
            part = rank_part(whole.spec, ServingLayout(tp=2), rank)
            kept, plain = load_model(folder, part=part), load_model(folder, keep_quantised=False, part=part)
            assert kept.quantised
            x = torch.randn(3, part.local.hidden, generator=torch.Generator().manual_seed(rank))
            for module in ("attention.qkv", "ffn.gate_up"):
                one, other = (model.decoder.layers[0].get_submodule(module) for model in (kept, plain))
                assert torch.allclose(one(x), other(x), atol=2e-3)


def test_the_stepper_agrees_with_the_fused_kernels(source: Path, text: Path, tmp_path: Path) -> None:
    from cumulo.models.play.fused import FusedDecoder, why_not

    folder = run(source, text, tmp_path / "out", Recipe("rtn"))
    loaded = load_model(folder)
    if why_not(loaded.decoder) is None:
        tokens = list(TEXT[:24].encode())
        fused = Stepper(FusedDecoder(loaded.decoder)).step({"a": tokens})["a"]
        assert float((fused - logits(folder)).abs().max()) < 0.02


def test_biases_that_gptq_writers_add_are_ignored_only_if_they_are_zero(
    source: Path, text: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = run(source, text, tmp_path / "out", Recipe("rtn", format="gptq"))
    (folder / "model.safetensors.index.json").unlink()
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder).quantised
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.bias is not zero"):
        load_model(folder)
