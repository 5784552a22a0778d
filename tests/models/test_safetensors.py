"""Loading safetensors: complete, in place, and honest about damaged or wrong files."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cumulo.errors import ModelError
from cumulo.models.decoder import Decoder
from cumulo.models.files.safetensors_file import INDEX_NAME, read_directory
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from tests import thorough
from tests.models import tiny

INDEX = INDEX_NAME


def saved(folder: Path, name: str = "llama", **options: str) -> ModelSpec:
    tiny.save(name, folder, **options)
    return spec_from_config(json.loads((folder / "config.json").read_text()))


def refusal(folder: Path, spec: ModelSpec) -> str:
    with pytest.raises(ModelError) as caught:
        fill_decoder(Decoder(spec), FolderWeights(folder, spec))
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_all_named_at_once(tmp_path: Path) -> None:
    spec = saved(tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.bonus"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(7, 48)

    rewrite(tmp_path, damage)
    message = refusal(tmp_path, spec)
    assert "missing (2): model.layers.1.self_attn.k_proj.weight; model.norm.weight" in message
    assert "unexpected (1): model.layers.0.self_attn.bonus" in message
    assert "misshapen (1): lm_head.weight is [7, 48], should be [199, 48]" in message


def test_a_model_with_fewer_layers_than_configured_gets_a_bounded_message(tmp_path: Path) -> None:
    saved(tmp_path)
    spec = saved(tmp_path / "deeper", num_hidden_layers=20)  # type: ignore[arg-type]
    message = refusal(tmp_path, spec)
    assert "missing (153)" in message and "and 133 more" in message and len(message) < 3000


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    spec = saved(tmp_path, "llama3_rope")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    rewrite(tmp_path, add)
    fill_decoder(Decoder(spec), FolderWeights(tmp_path, spec))

    spec = saved(tmp_path / "v3", "deepseek_v3")
    rewrite(
        tmp_path / "v3", lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.zeros(3)})
    )
    fill_decoder(Decoder(spec), FolderWeights(tmp_path / "v3", spec))
    rewrite(
        tmp_path / "v3", lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(3)})
    )
    assert "model.layers.3.eh_proj.weight" in refusal(tmp_path / "v3", spec)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_types_are_converted_to_the_type_of_the_decoder(tmp_path: Path, stored: torch.dtype) -> None:
    spec = saved(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda tensors: tensors.update({k: v.to(stored) for k, v in original.items()}))
    decoder = Decoder(spec, torch.float32)
    fill_decoder(decoder, FolderWeights(tmp_path, spec))
    expected = original["model.layers.2.mlp.up_proj.weight"].to(stored).float()
    assert torch.equal(decoder.get_parameter("layers.2.ffn.gate_up.weight")[80:], expected)


def test_a_decoder_without_memory_is_given_it(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    decoder = Decoder(spec, device="meta")
    fill_decoder(decoder, FolderWeights(tmp_path, spec))
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(decoder.get_parameter("embed.weight"), stored)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    assert "lm_head.weight is I8" in refusal(tmp_path, spec)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    spec = saved(tmp_path, "qwen3", max_shard_size="60KB")
    seen: list[tuple[int, int]] = []
    fill_decoder(
        Decoder(spec),
        FolderWeights(tmp_path, spec),
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(tensor.nbytes for tensor in read_directory(tmp_path).values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and len({t for _, t in seen}) == 1


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by a file: a memory map of the weights is not counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not report RssAnon")
    raise AssertionError


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_no_second_copy_of_the_model_is_made(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4000}
    spec = saved(tmp_path, **sizes)  # type: ignore[arg-type]
    decoder = Decoder(spec)
    model_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    assert model_bytes > 80e6
    for parameter in decoder.parameters():
        parameter.zero_()  # its pages are in memory now; what grows from here on is a copy
    before = anonymous_bytes()
    peak = 0

    def watch(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    fill_decoder(decoder, FolderWeights(tmp_path, spec), progress=watch)
    assert peak - before < 0.15 * model_bytes
    assert decoder.get_parameter("head.weight").abs().sum() > 0


# -- damaged files ---------------------------------------------------------------------------------------
def test_a_truncated_file_is_named_with_what_is_missing(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 5, 200, -100):
        file.write_bytes(content[:length])
        message = refusal(tmp_path, spec)
        assert str(file) in message and "cut short" in message


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[1, 2]",
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": 3}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes) -> None:
    spec = saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert "is damaged or cut short" in refusal(tmp_path, spec)


@given(st.data())
@settings(
    max_examples=thorough.examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_flipped_byte_of_the_header_escapes_as_anything_but_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flips"
    if not folder.exists():
        saved(folder)
        (folder / "model.safetensors").rename(folder / "original")
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    content = bytearray((folder / "original").read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    position = data.draw(st.integers(0, header_end - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        fill_decoder(Decoder(spec), FolderWeights(folder, spec))
    except ModelError as error:
        assert str(folder) in str(error)


def test_indexes_that_lie_are_refused(tmp_path: Path) -> None:
    spec = saved(tmp_path, "qwen3", max_shard_size="60KB")
    index = tmp_path / INDEX
    good = json.loads(index.read_text())
    name, shard = next(iter(good["weight_map"].items()))
    other = next(file for file in good["weight_map"].values() if file != shard)

    def with_map(**changes: object) -> str:
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], **changes}}))
        return refusal(tmp_path, spec)

    assert f"{name!r} is in {other}, but it is not there" in with_map(**{name: other})
    assert "lacks gone.safetensors" in with_map(extra="gone.safetensors")
    assert "not a plain file name" in with_map(extra="../../secret.safetensors")
    assert "not a plain file name" in with_map(extra=5)
    for text in ("{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{}"):
        index.write_text(text)
        assert f"{index} is not a valid safetensors index" in refusal(tmp_path, spec)
    index.unlink()
    assert f"no {INDEX}" in refusal(tmp_path, spec)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    spec = saved(tmp_path, "qwen3", max_shard_size="60KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    second = load_file(files[1]) | dict([next(iter(load_file(files[0]).items()))])
    save_file(second, files[1])
    assert "which is also in" in refusal(tmp_path, spec)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "contains no .safetensors file" in refusal(tmp_path, spec)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert them" in refusal(tmp_path, spec)
