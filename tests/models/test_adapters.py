"""Low-rank adapters at the decoder: PEFT's own results, many adapters in one batch, folders that are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cumulo.errors import ModelError
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.config import greatest_rank, read_config
from cumulo.models.adapters.files import read_adapter
from cumulo.models.files.load import load_model
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.spec.from_huggingface import spec_from_config
from tests.models import tiny
from tests.models.adapter_files import ALL, write_adapter
from tests.models.stepper import Stepper
from tests.models.test_fused import MIXTURES, PLAIN, SPECS, random_decoder

TOKENS = [5, 17, 110, 3, 99, 42, 8, 61, 120, 77, 14, 2, 33]
# Per-module ranks and scales, as PEFT's users write them.
PATTERNS = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 3, r".*\.2\..*down_proj": 7, "v_proj": 2},
    "alpha_pattern": {"k_proj": 5, r"^model.layers.0.mlp.up_proj": 32},
}


@pytest.mark.parametrize("family", ["llama_biased", "qwen3", "phi3"])
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_are_those_of_peft(family: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny.save(family, tmp_path / "base")
    targets = [*ALL, "qkv_proj", "gate_up_proj"]  # the last two are Phi-3's
    config = peft.LoraConfig(r=6, lora_alpha=12, target_modules=targets, use_rslora=rslora, **PATTERNS)
    adapted = peft.get_peft_model(model.to(torch.float64), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = tiny.reference_logits(adapted, TOKENS)

    decoder = load_model(tmp_path / "base", dtype=torch.float64, with_tokenizer=False).decoder
    bank = AdapterBank(decoder, decoder.spec, slots=2, rank_max=8)
    bank.install(1, read_adapter(tmp_path / "adapter", decoder.spec, max_rank=8))
    stepper = Stepper(decoder)
    stepper.adapters = {"only": 1}
    # transformers computes norms and rotations in float32, whatever the model has.
    torch.testing.assert_close(stepper.feed(TOKENS, chunk=5), expected, rtol=0, atol=2e-5)
    plain = Stepper(decoder)
    with torch.no_grad(), adapted.disable_adapter():
        base = adapted(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(plain.feed(TOKENS, chunk=5), base, rtol=0, atol=2e-5)
    assert (expected - base).abs().max() > 0.1


@pytest.mark.parametrize("mixture", [(), MIXTURES["mixed"]], ids=["float base", "quantised base"])
@pytest.mark.parametrize("name", ["biased", "query and key norms"])
def test_rows_with_many_adapters_have_the_bits_of_each_alone(name: str, mixture, tmp_path: Path) -> None:
    """On the native kernels: mixed ranks, some modules only, rows without an adapter, prompts and single tokens."""
    spec = SPECS[name]
    decoder = random_decoder(spec, mixture)
    assert why_not(decoder) is None
    bank = AdapterBank(decoder, spec, slots=5, rank_max=24)
    chosen = [
        (4, ALL),
        (9, ("q_proj", "v_proj")),
        (24, ALL),
        (1, ("down_proj", "k_proj")),
        (16, ("up_proj",)),
    ]
    for slot, (rank, targets) in enumerate(chosen):
        folder = write_adapter(tmp_path / str(slot), spec, rank=rank, targets=targets, seed=slot)
        bank.install(slot, read_adapter(folder, spec, max_rank=24))
    sequences = {
        f"s{index}": [(7 * index + 3 * k) % spec.vocab_size for k in range(3 + 9 * (index % 4))]
        for index in range(9)
    }
    slots = {name: index % 6 - 1 for index, name in enumerate(sequences)}
    together = Stepper(FusedDecoder(decoder), blocks=256)
    together.adapters = slots
    rows = together.step(sequences)
    more = together.step({name: [11] for name in sequences})
    for name, tokens in sequences.items():
        alone = Stepper(FusedDecoder(decoder))
        alone.adapters = {"only": slots[name]} if slots[name] >= 0 else {}
        assert torch.equal(rows[name], alone.step({"only": tokens})["only"])
        assert torch.equal(more[name], alone.step({"only": [11]})["only"])
    # And they are what torch's operators make of the same adapters.
    by_torch = Stepper(decoder, blocks=256)
    by_torch.adapters = slots
    for name, logits in by_torch.step(sequences).items():
        torch.testing.assert_close(rows[name], logits, rtol=2e-3, atol=2e-3)


def test_a_slot_that_is_used_again_keeps_nothing_of_its_last_adapter(tmp_path: Path) -> None:
    decoder = random_decoder(PLAIN)
    bank = AdapterBank(decoder, PLAIN, slots=1, rank_max=16)
    bank.install(0, read_adapter(write_adapter(tmp_path / "a", PLAIN, rank=16, seed=1), PLAIN, 16))
    second = read_adapter(
        write_adapter(tmp_path / "b", PLAIN, rank=2, targets=("q_proj",), seed=2), PLAIN, 16
    )
    bank.install(0, second)
    used = Stepper(FusedDecoder(decoder))
    used.adapters = {"only": 0}
    logits = used.step({"only": TOKENS})["only"]
    fresh_decoder = random_decoder(PLAIN)
    AdapterBank(fresh_decoder, PLAIN, slots=1, rank_max=16).install(0, second)
    fresh = Stepper(FusedDecoder(fresh_decoder))
    fresh.adapters = {"only": 0}
    assert torch.equal(logits, fresh.step({"only": TOKENS})["only"])
    for matrix in bank.matrices.values():
        assert torch.count_nonzero(matrix.stack.a[0]) <= 2 * matrix.matrix.inputs


def test_equal_adapters_have_one_fingerprint_and_others_another(tmp_path: Path) -> None:
    prints = {
        name: read_adapter(write_adapter(tmp_path / name, PLAIN, **how), PLAIN, 16).fingerprint
        for name, how in {
            "one": {}, "same": {}, "seed": {"seed": 1}, "scale": {"alpha": 9.0}, "rslora": {"use_rslora": True}
        }.items()
    }  # fmt: skip
    assert prints["one"] == prints["same"]
    assert len(set(prints.values())) == 4


def _tensors(change):
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return apply


def _config(**fields):
    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED = {
    "DoRA": (_config(use_dora=True), "DoRA"),
    "saved modules": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (_config(bias="all"), "bias"),
    "an unknown field": (_config(use_moon=True), "use_moon"),
    "another method": (_config(peft_type="IA3"), "IA3"),
    "a start that changes the base": (_config(init_lora_weights="pissa_niter_4"), "pissa"),
    "a rank that is no number": (_config(r="four"), "whole number"),
    "an endless pattern": (_config(rank_pattern={"(a+)+b": 3}), "too complicated"),
    "a wrong pattern": (_config(alpha_pattern={"(": 3}), "pattern"),
    "another rank than its tensors": (_config(r=5), "another"),
    "an endless scale": (_config(lora_alpha=float("inf")), "a number"),
    "an embedding": (
        _tensors(
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)})
        ),
        "embedding",
    ),
    "the head": (
        _tensors(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 96)})),
        "lm_head",
    ),
    "a stray tensor": (_tensors(lambda t: t.update({"moon": torch.ones(2)})), "moon"),
    "another model's layer": (
        _tensors(lambda t: t.update({_Q.replace("layers.0", "layers.99"): torch.ones(4, 96)})),
        "does not have",
    ),
    "half a pair": (_tensors(lambda t: t.pop(_Q)), "another"),
    "numbers that are none": (_tensors(lambda t: t[_Q].fill_(float("nan"))), "undefined"),
    "whole numbers": (_tensors(lambda t: t.update({_Q: torch.ones(4, 96, dtype=torch.int32)})), "I32"),
    "a file cut short": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 40),
        "header",
    ),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "lacks"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "no folder": (shutil.rmtree, "no folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    folder = write_adapter(tmp_path / "adapter", PLAIN)
    change(folder)
    with pytest.raises(ModelError) as error:
        read_adapter(folder, PLAIN, max_rank=16)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.3.gate_proj"),
        ("qwen3_moe", "model.layers.0.mlp.gate"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj"),
    ],
)
def test_an_adapter_of_experts_or_of_absorbed_matrices_is_refused_by_name(family, module, tmp_path) -> None:
    spec = spec_from_config(tiny.build(family).config.to_dict())
    folder = write_adapter(tmp_path / "adapter", spec, targets=("o_proj",))
    more = {f"base_model.model.{module}.lora_A.weight": torch.ones(4, 48)}
    _tensors(lambda tensors: tensors.update(more))(folder)
    with pytest.raises(ModelError, match="cannot be served") as error:
        read_adapter(folder, spec, max_rank=16)
    assert module in str(error.value)


def test_a_rank_beyond_the_limit_is_refused_with_the_option_that_allows_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", PLAIN, rank=32)
    assert greatest_rank(folder) == 32
    with pytest.raises(ModelError, match="--max-lora-rank 32"):
        read_adapter(folder, PLAIN, max_rank=16)


def test_the_first_pattern_that_matches_counts_as_in_peft(tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    patterns = {"self_attn.q_proj": 2, "model.layers.0.self_attn.q_proj": 9, r".*layers\.1.*": 5, "q_proj": 3}
    folder = write_adapter(tmp_path / "adapter", PLAIN, alpha=7.0, alpha_pattern=patterns)
    config = read_config(folder)
    for module in (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.2.x.q_proj",
        "o_proj",
    ):
        key = get_pattern_key(patterns.keys(), module)
        assert config.alphas.value_for(module, 7.0) == patterns.get(key, 7.0)
