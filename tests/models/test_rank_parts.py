"""A rank loads exactly its part of a model, from every format: the boxes of the layout, and nothing besides."""

from pathlib import Path

import pytest
import torch

from cumulo.errors import ModelError
from cumulo.layout.serving import ServingLayout, held_parameters, rank_part
from cumulo.models.files.load import load_model
from cumulo.models.linear import Linear
from tests.engine.ranked_models import save_model
from tests.models import tiny
from tests.models.gguf_conversion import convert

LAYOUTS = [
    ServingLayout(tp=2),
    ServingLayout(tp=4),
    ServingLayout(tp=2, pp=2),
    ServingLayout(dp=2, tp=2, ep=4),
]
# Wide enough that halves of all matrices are whole blocks of 32 columns.
WIDE = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 64}


def parameters(path: Path, keep_quantised: bool = False, **options) -> dict[str, torch.Tensor]:
    """By name, packed ones as plain numbers."""
    decoder = load_model(path, with_tokenizer=False, keep_quantised=keep_quantised, **options).decoder
    found = {name: parameter.data for name, parameter in decoder.named_parameters() if parameter.numel()}
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            found[f"{name}.weight"] = module.packed.rows(torch.arange(module.shape[0]))
    return found


def check_parts(path: Path, layout: ServingLayout, keep_quantised: bool = False) -> None:
    spec = load_model(path, with_tokenizer=False).spec
    whole = parameters(path, keep_quantised)
    for rank in range(layout.world):
        part = rank_part(spec, layout, rank)
        held, own = held_parameters(part), parameters(path, keep_quantised, part=part)
        assert own.keys() == held.keys()
        for name, parameter in held.items():
            assert tuple(own[name].shape) == parameter.shape
            if name.endswith(("output.bias", "down.bias")) and not part.carries_stream:
                assert not own[name].any()  # added by one rank
                continue
            for box in parameter.boxes:
                assert torch.equal(own[name][box.held_slices], whole[parameter.source][box.whole_slices])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["dense", "tied", "experts", "latent"])
def test_a_rank_reads_its_boxes_of_safetensors(tmp_path: Path, name: str, layout: ServingLayout) -> None:
    if layout.ep > 1 and name in ("dense", "tied"):
        layout = ServingLayout(layout.tp, layout.pp, layout.dp)
    check_parts(save_model(name, tmp_path), layout)


def test_a_rank_reads_its_boxes_of_tensors_that_the_file_has_fused(tmp_path: Path) -> None:
    tiny.save("phi3", tmp_path)
    check_parts(tmp_path, ServingLayout(tp=2, pp=3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_reads_its_boxes_of_gguf_files_stored_in_other_orders(
    tmp_path: Path, layout: ServingLayout
) -> None:
    """Experts stacked, the latent projection in halves and transposed, llama's heads interleaved."""
    latent = convert(save_model("latent", tmp_path), tmp_path / "latent.gguf", latent="halves")
    check_parts(latent, layout)
    dense = convert(save_model("dense", tmp_path), tmp_path / "dense.gguf")
    check_parts(dense, ServingLayout(layout.tp, layout.pp))


def test_quantised_matrices_are_cut_between_blocks_and_stay_quantised(tmp_path: Path) -> None:
    path = convert(save_model("dense", tmp_path, **WIDE), tmp_path / "q.gguf", type_name="Q4_0")
    check_parts(path, ServingLayout(tp=2), keep_quantised=True)
    part = rank_part(load_model(path, with_tokenizer=False).spec, ServingLayout(tp=2), 1)
    decoder = load_model(path, with_tokenizer=False, part=part).decoder
    assert all(module.packed for module in decoder.modules() if isinstance(module, Linear))


def test_a_cut_through_a_block_is_refused_with_what_would_work(tmp_path: Path) -> None:
    path = convert(save_model("dense", tmp_path, **WIDE), tmp_path / "q.gguf", type_name="Q4_0")
    part = rank_part(load_model(path, with_tokenizer=False).spec, ServingLayout(tp=4), 1)
    with pytest.raises(ModelError, match=r"blocks of 32 columns.*use a smaller tp, pp instead of tp, or"):
        load_model(path, with_tokenizer=False, part=part)
