"""Our folders in transformers, and folders that compressed-tensors wrote in ours: the same logits.

transformers reads compressed-tensors folders with the package of that name, and fp8 folders by itself. Its AWQ and
GPTQ need kernels that are built for GPUs; those formats are checked bit by bit in test_formats.py.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cumulo.quant.decide.recipe import Recipe
from cumulo.quant.play.run import Calibration, quantise
from tests.quant.folders import TEXT, calibration_file, logits, tiny_folder

pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="compressed-tensors is missing"
)

RECIPES = [
    Recipe("rtn"),
    Recipe("gptq", bits=8, symmetric=False),
    Recipe("awq"),
    Recipe("int8"),
    Recipe("fp8"),
    Recipe("fp8", scheme="tensor", static_activations=True),
    Recipe("fp8", scheme="block"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", hidden_size=128, head_dim=32)


@torch.no_grad()
def their_logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """With activations rounded as the configuration says, and without."""
    from compressed_tensors.quantization import disable_quantization
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([list(TEXT[:24].encode())])
    rounded = model(tokens).logits[0]
    model.apply(disable_quantization)
    return rounded, model(tokens).logits[0]


@torch.no_grad()
def their_expanded_logits(folder: Path) -> torch.Tensor:
    """Of weights that are expanded to the folder's 16-bit type while they are loaded."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    expand = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=expand)
    return model(torch.tensor([list(TEXT[:24].encode())])).logits[0]


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.method}-{recipe.bits}-{recipe.scheme}"
)
def test_transformers_computes_the_same_logits(recipe: Recipe, source: Path, tmp_path: Path) -> None:
    calibration = Calibration(calibration_file(tmp_path) if recipe.needs_calibration else None, 4, 64)
    folder = quantise(source, tmp_path / "out", recipe, calibration).folder
    try:
        with_rounded_activations, theirs = their_logits(folder)
    except RuntimeError as error:
        # transformers 5.23.0 makes parameters for zero points that are not packed; no asymmetric folder has such.
        assert "ignore_mismatched_sizes" in str(error) and recipe.method in ("awq", "gptq")
        assert float((logits(folder) - their_expanded_logits(folder)).abs().max()) < 0.03
        return
    ours = float((logits(folder) - theirs).abs().max())
    if recipe.method != "int8":
        assert ours < 1e-2
        return
    # 8-bit activations have a scale per 32 columns here and one per token there.
    assert float((logits(folder, keep_quantised=False) - theirs).abs().max()) < 1e-2
    assert ours < float((with_rounded_activations - theirs).abs().max())


@torch.no_grad()
def test_transformers_reads_an_fp8_folder_whose_last_layer_stayed_as_it_was(
    source: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    recipe = Recipe("fp8", scheme="block", format="fp8", layers=1)
    folder = quantise(source, tmp_path / "out", recipe).folder
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), output_loading_info=True
    )
    assert not any(told.values())
    theirs = model.float()(torch.tensor([list(TEXT[:24].encode())])).logits[0]
    # It expands the weights to the folder's 16-bit type.
    assert float((logits(folder) - theirs).abs().max()) < 0.03
