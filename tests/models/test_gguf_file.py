"""Opening GGUF files: the same content as the reference reader, and a clear error for all damage."""

import random
import struct
import sys
import tracemalloc

import gguf
import numpy as np
import pytest

from cumulo.errors import ModelError
from cumulo.models.files import gguf_file
from cumulo.models.files.gguf_blocks import float_array
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import built_in_model
from tests import thorough
from tests.models.cut_smollm import cut_smollm
from tests.models.gguf_writing import write_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "a.flag": True,
    "a.negative": -5,
    "a.text": "größe 日本",
    "a.numbers": [1, 2, 3],
    "a.floats": [0.5, -1.5],
    "a.strings": ["x", "", "żółw"],
}


def small_file(path, **options):
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    tensors = {
        "plain": (values, "F32"),
        "half": (values, "F16"),
        "brain": (values, "BF16"),
        "eight": (values, "Q8_0"),
        "four": (values, "Q4_1"),
        "stack": (np.stack([values, -values]), "Q8_0"),
        "vector": (values[0], "F32"),
    }
    return write_gguf(path, METADATA, tensors, **options)


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_those_of_the_reference_reader(tmp_path, alignment):
    path = small_file(tmp_path / "m.gguf", alignment=alignment)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.metadata) == len(theirs.fields) - 3
    assert ours.architecture == "llama"
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for expected in theirs.tensors:
        found = ours.tensors[expected.name]
        assert found.shape == tuple(reversed(expected.shape.tolist()))
        assert found.type_name == expected.tensor_type.name
        assert found.nbytes == expected.n_bytes
        assert np.array_equal(
            float_array(found).reshape(-1), gguf.dequantize(expected.data, expected.tensor_type).reshape(-1)
        )


@pytest.mark.long
def test_the_built_in_model_is_read_as_by_the_reference_reader(tmp_path):
    # The reference reader takes long for a large vocabulary.
    path = built_in_model() if thorough.chosen else cut_smollm(tmp_path / "cut.gguf", tokens=1024)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert {
        key: field.contents() for key, field in theirs.fields.items() if key[:5] != "GGUF."
    } == ours.metadata
    for expected in theirs.tensors:
        assert np.array_equal(
            ours.tensors[expected.name].raw.reshape(-1), expected.data.view(np.uint8).reshape(-1)
        )


def test_a_split_model_is_opened_as_one(tmp_path):
    values = np.ones((2, 32), np.float32)
    names = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        metadata = {"split.no": number, "split.count": 3, "split.tensors.count": 3, "a.number": number}
        write_gguf(tmp_path / name, metadata, {f"t{number}": (values * number, "F32")})
    file = open_gguf(tmp_path / names[1])
    assert list(file.tensors) == ["t0", "t1", "t2"]
    assert float_array(file.tensors["t2"])[0, 0] == 2
    assert file.metadata["a.number"] == 0
    (tmp_path / names[2]).unlink()
    with pytest.raises(ModelError, match="m-00003-of-00003"):
        open_gguf(tmp_path / names[0])
    (tmp_path / names[0]).rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="pieces"):
        open_gguf(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"safetensors!", "not a GGUF file"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(20), "runs past the end"),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + struct.pack("<Q", 1)
            + b"k"
            + struct.pack("<I", 99)
            + bytes(9),
            "99",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + struct.pack("<Q", 1)
            + b"k"
            + struct.pack("<IIQ", 9, 0, 2**50),
            "k",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + struct.pack("<Q", 1)
            + b"k"
            + struct.pack("<IIQ", 9, 9, 2**50),
            "k",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(9), "UTF-8"),
    ],
)
def test_a_wrong_header_is_a_model_error_that_names_the_file_and_the_fault(tmp_path, content, says):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says) as raised:
        open_gguf(path)
    assert "bad.gguf" in str(raised.value)


def test_a_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        open_gguf(tmp_path / "nowhere.gguf")


def test_a_tensor_past_the_end_of_the_file_is_named(tmp_path):
    path = small_file(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut short: tensor 'vector'.*download"):
        open_gguf(path)


def test_a_type_that_cannot_be_read_is_named_with_its_tensor_and_the_ones_that_can(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("odd", np.zeros((1, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'odd' is stored as IQ2_XXS.*Q4_K"):
        open_gguf(tmp_path / "m.gguf")


def test_types_have_the_numbers_names_and_block_sizes_of_the_gguf_package():
    for kind in gguf.GGMLQuantizationType:
        if kind.name in gguf_file.SUPPORTED_TYPES:
            assert gguf_file._TYPES[kind.value] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        else:
            assert gguf_file._OTHER_TYPES.get(kind.value, kind.name) == kind.name
            assert kind.value not in gguf_file._TYPES


def test_the_gguf_package_is_not_needed(tmp_path, monkeypatch):
    path = small_file(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "vector" in open_gguf(path).tensors


def test_a_type_of_the_future_is_named_by_its_number(tmp_path):
    path = small_file(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    place = content.index(b"vector") + len("vector") + 4 + 8  # the count of dimensions, and the one there is
    content[place : place + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"'vector' has the unknown type number 999"):
        open_gguf(path)


def test_no_truncation_or_flipped_byte_does_anything_but_open_or_raise_a_model_error(tmp_path):
    original = small_file(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    choose = random.Random(0)
    opened = refused = 0
    tracemalloc.start()
    attempts = 1500 if thorough.chosen else 400
    for attempt in range(attempts):
        content = bytearray(original)
        if attempt % 3 == 0:
            content = content[: choose.randrange(len(content))]
        else:
            header_end = 1100 if attempt % 3 == 1 else len(content)  # most of the trouble is in the header
            for _ in range(choose.choice((1, 1, 2, 5))):
                content[choose.randrange(header_end)] = choose.choice(
                    (0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256))
                )
        path.write_bytes(content)
        try:
            for tensor in open_gguf(path).tensors.values():
                float_array(tensor)
            opened += 1
        except ModelError as error:
            assert "damaged.gguf" in str(error)
            refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened > attempts / 30 and refused > attempts / 3
    assert peak < 20 * 2**20
