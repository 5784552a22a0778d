"""GGUF weights in the decoder: equal to the safetensors of the same model for every architecture, packed
weights equal to dequantised ones, and the real SmolLM2 against transformers."""

import json
from pathlib import Path

import gguf
import pytest
import torch

from cumulo.errors import ModelError
from cumulo.models.decoder import Decoder
from cumulo.models.files.gguf_blocks import float_array
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import built_in_model
from cumulo.models.files.names_gguf import spec_of
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_gguf import GgufWeights
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from cumulo.spec.from_gguf import spec_from_gguf
from cumulo.spec.from_huggingface import spec_from_config
from tests import peers
from tests.engine.pooled_reference import engine_embeddings, reference_embedding
from tests.models import tiny
from tests.models.cut_smollm import cut_smollm
from tests.models.gguf_conversion import convert
from tests.models.gguf_writing import write_gguf
from tests.models.stepper import Stepper

_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# name -> (tiny family, what must differ because GGUF has no words for it, options of the conversion)
CASES = {
    "llama": ("llama", {}, {}),
    "llama_biased": ("llama_biased", {}, {}),
    "llama3_rope": ("llama3_rope", {}, {}),
    "llama_linear_rope": ("llama_linear_rope", {}, {}),
    "smollm2": ("smollm2", {}, {}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2_yarn": ("qwen2_yarn", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "mixtral_single_experts": ("mixtral", {}, {"experts": "single"}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": []}, {}),
    "deepseek_v2": ("deepseek_v2", {}, {}),
    "deepseek_v2_lite": ("deepseek_v2_lite", {}, {"latent": "halves"}),
    "deepseek_v3": ("deepseek_v3", _PLAIN_ROPE, {"latent": "halves"}),
    "deepseek_v3_both": ("deepseek_v3", _PLAIN_ROPE, {"latent": "both"}),
}


def make(case: str, folder: Path, **overrides):
    family, changes, options = CASES[case]
    model = tiny.save(family, folder, **{**changes, **overrides})
    return model, options


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_gives_the_model_that_its_safetensors_give(case, tmp_path):
    model, options = make(case, tmp_path)
    file = open_gguf(convert(tmp_path, tmp_path / "m.gguf", **options))
    spec = spec_of(file)
    decoder = Decoder(spec)
    seen = []
    fill_decoder(decoder, GgufWeights(file, spec), progress=lambda done, total: seen.append((done, total)))
    original = Decoder(spec_from_config(json.loads((tmp_path / "config.json").read_text())))
    fill_decoder(original, FolderWeights(tmp_path, original.spec))
    found, expected = dict(decoder.named_parameters()), dict(original.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
    assert seen[-1][0] == seen[-1][1] > 0 and seen == sorted(seen)
    prompt = tiny.prompt(40)
    logits = Stepper(decoder).feed(prompt, chunk=17)
    assert (logits - tiny.reference_logits(model, prompt)).abs().max() <= 2e-4


def test_rows_left_interleaved_for_an_interleaved_rotation_give_the_same_logits(tmp_path):
    model, options = make("llama", tmp_path)
    file = open_gguf(convert(tmp_path, tmp_path / "m.gguf", **options))
    spec = spec_from_gguf(file.metadata, file.tensors.keys())
    assert spec.rope_interleaved
    decoder = Decoder(spec)
    fill_decoder(decoder, GgufWeights(file, spec))
    prompt = tiny.prompt(40)
    assert (Stepper(decoder).feed(prompt, 40) - tiny.reference_logits(model, prompt)).abs().max() <= 2e-4


@pytest.mark.long
@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("case", ["llama_biased", "mixtral"])
def test_packed_weights_are_the_dequantised_ones(case, type_name, tmp_path):
    make(case, tmp_path, hidden_size=64, intermediate_size=96)
    check_packing(convert(tmp_path, tmp_path / "m.gguf", type_name=type_name), type_name[0] == "Q")


@pytest.mark.long
@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_packed_k_weights_are_the_dequantised_ones(case, type_name, tmp_path):
    overrides = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    if case == "qwen3_moe":
        overrides["moe_intermediate_size"] = 256
    make(case, tmp_path, **overrides)
    check_packing(convert(tmp_path, tmp_path / "m.gguf", type_name=type_name), True)


def check_packing(path: Path, packs: bool) -> None:
    """Identity through a packed matrix gives the rows back; all parameters are packed exactly where they
    can be, and one fused matrix may have parts of different types."""
    file = open_gguf(path)
    spec = spec_of(file)
    packed, plain = Decoder(spec), Decoder(spec)
    fill_decoder(packed, GgufWeights(file, spec), keep_quantised=True)
    fill_decoder(plain, GgufWeights(file, spec), keep_quantised=False)
    left = dict(packed.named_parameters())
    replaced = [name for name in dict(plain.named_parameters()) if name not in left]
    assert bool(replaced) is packs
    assert all(plain.can_pack(name) for name in replaced)
    for name, parameter in plain.named_parameters():
        if name in left:
            assert torch.equal(left[name], parameter), name
            continue
        path_to, _, attribute = name.rpartition(".")
        owner = packed.get_submodule(path_to)
        held = owner.packed[attribute] if isinstance(owner.packed, dict) else [owner.packed]
        matrices = parameter if parameter.ndim == 3 else parameter[None]
        for weight, matrix in zip(held, matrices, strict=True):
            assert tuple(weight.shape) == tuple(matrix.shape)
            rows = weight.rows(torch.arange(matrix.shape[0]))
            assert (rows - matrix).abs().max() <= 1e-6 * matrix.abs().max(), name


def test_one_fused_matrix_may_have_parts_of_different_types(tmp_path):
    make("qwen3", tmp_path, hidden_size=256, intermediate_size=256, head_dim=64)
    source = open_gguf(convert(tmp_path, tmp_path / "m.gguf"))
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "ffn_gate": "Q8_0"}
    tensors = {}
    for name, tensor in source.tensors.items():
        kind = next(
            (kinds[part] for part in kinds if f"{part}.weight" in name),
            "Q4_1" if len(tensor.shape) > 1 else "F32",
        )
        tensors[name] = (float_array(tensor), kind)
    check_packing(write_gguf(tmp_path / "mixed.gguf", source.metadata, tensors), True)


def test_a_fused_matrix_with_one_plain_part_is_kept_plain(tmp_path):
    make("llama", tmp_path, hidden_size=64, intermediate_size=96)
    source = open_gguf(convert(tmp_path, tmp_path / "m.gguf"))
    tensors = {
        name: (float_array(tensor), "Q8_0" if "attn_q" in name or "attn_k" in name else "F32")
        for name, tensor in source.tensors.items()
    }
    check_packing(write_gguf(tmp_path / "mixed.gguf", source.metadata, tensors), False)


def test_weights_can_be_dequantised_into_float64(tmp_path):
    make("llama", tmp_path, hidden_size=64, intermediate_size=96)
    file = open_gguf(convert(tmp_path, tmp_path / "m.gguf", type_name="Q4_1"))
    spec = spec_of(file)
    decoder = Decoder(spec, torch.float64)
    fill_decoder(decoder, GgufWeights(file, spec), keep_quantised=False)
    embedding = file.tensors["token_embd.weight"]
    expected = gguf.dequantize(embedding.raw, gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(decoder.embed.weight, torch.from_numpy(expected).double())


def test_missing_extra_and_misshapen_tensors_are_reported_together_before_anything_is_loaded(tmp_path):
    make("llama", tmp_path)
    source = open_gguf(convert(tmp_path, tmp_path / "m.gguf"))
    tensors = {name: (float_array(tensor), "F32") for name, tensor in source.tensors.items()}
    del tensors["blk.1.attn_k.weight"]
    tensors["blk.0.surprise.weight"] = tensors["blk.0.ffn_up.weight"]
    tensors["blk.2.ffn_down.weight"] = (tensors["blk.2.ffn_down.weight"][0][:-1], "F32")
    file = open_gguf(write_gguf(tmp_path / "bad.gguf", source.metadata, tensors))
    spec = spec_of(file)
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        parameter.fill_(7)
    with pytest.raises(ModelError) as raised:
        fill_decoder(decoder, GgufWeights(file, spec))
    message = str(raised.value)
    for part in (
        "bad.gguf",
        "blk.1.attn_k.weight",
        "blk.0.surprise.weight",
        "blk.2.ffn_down.weight is [47, 80]",
    ):
        assert part in message
    assert all((parameter == 7).all() for parameter in decoder.parameters())


# -- the real model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["first layers", pytest.param("whole", marks=pytest.mark.thorough)])
def smollm(request, tmp_path_factory):
    path = built_in_model()
    if request.param == "first layers":
        path = cut_smollm(tmp_path_factory.mktemp("cut") / "cut.gguf")
    file = open_gguf(path)
    spec = spec_of(file)
    decoder = Decoder(spec)
    fill_decoder(decoder, GgufWeights(file, spec), keep_quantised=False)
    reference = peers.transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return decoder, reference.eval(), tokenizer_from_gguf(file.metadata)


PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "日本の首都はどこですか？ Answer with an emoji 😀.",
]


@pytest.mark.long
def test_smollm2_logits_are_those_of_transformers_loading_the_same_file(smollm):
    decoder, reference, tokenizer = smollm
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        difference = Stepper(decoder, blocks=64, block_size=16).feed(ids, len(ids)) - tiny.reference_logits(
            reference, ids
        )
        assert difference.abs().max() <= 2e-4


@pytest.mark.long
def test_64_greedy_tokens_of_smollm2_are_those_of_transformers(smollm):
    decoder, reference, tokenizer = smollm
    for prompt in PROMPTS[1:]:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        found = Stepper(decoder, blocks=64, block_size=16).greedy(ids, 64, chunk=len(ids))
        assert found == tiny.reference_greedy(reference, ids, 64)


@pytest.mark.long
def test_smollm2_embeddings_are_the_pooled_hidden_states_of_transformers(smollm):
    decoder, reference, tokenizer = smollm
    prompts = [tokenizer.encode(PROMPTS[2])]
    for (index, pooling), embedding in engine_embeddings(decoder, prompts).items():
        expected = reference_embedding(reference, prompts[index], pooling)
        assert abs(expected - embedding).max() <= 2e-4
