"""Storage formats: written and read again, and read from bits that were laid out by hand."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cumulo.errors import ModelError
from cumulo.models.files.placement import Placement
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import Float8Matrix, IntegerMatrix
from cumulo.models.files.weights_safetensors import stored_matrices
from cumulo.quant.rounding import float8
from cumulo.spec.quantisation import Quantisation, quantisation_from_config

ROWS, COLUMNS, GROUP = 16, 64, 32


def matrix(bits: int = 4, symmetric: bool = False, groups: int = COLUMNS // GROUP) -> IntegerMatrix:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    scale = torch.rand(ROWS, groups, generator=generator).half()
    zero = torch.randint(0, 1 << bits, (ROWS, groups), generator=generator, dtype=torch.uint8)
    if symmetric:
        zero.fill_(1 << (bits - 1))
    return IntegerMatrix(codes, scale, zero, bits)


def gptq_of(bits: int, stores_zero_minus_one: bool = True) -> Quantisation:
    return Quantisation("gptq", bits, "group", GROUP, stores_zero_minus_one=stores_zero_minus_one)


def equal(one: IntegerMatrix, other: IntegerMatrix) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("codes", "scale", "zero"))


def test_awq_keeps_a_matrix_and_its_words_are_in_the_order_of_the_gemm_kernel() -> None:
    before = matrix()
    tensors = awq.write(before)
    assert equal(awq.read(tensors, ROWS, COLUMNS, Quantisation("awq", 4, "group", GROUP)), before)
    word = int(tensors["qweight"][3, 1]) & 0xFFFFFFFF
    # AutoAWQ's GEMM packing: nibbles from the lowest are outputs 0, 2, 4, 6, 1, 3, 5, 7.
    outputs = [8 + offset for offset in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert [(word >> 4 * place) & 15 for place in range(8)] == [int(before.codes[row, 3]) for row in outputs]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_keeps_a_matrix_and_stores_zero_points_one_too_small(bits: int) -> None:
    before = matrix(bits)
    tensors = gptq.write(before)
    after = gptq.read(tensors, ROWS, COLUMNS, gptq_of(bits))
    assert equal(after, before) and torch.equal(after.dequantise(), before.dequantise())
    per_word, mask = 32 // bits, (1 << bits) - 1
    word = int(tensors["qweight"][1, 5]) & 0xFFFFFFFF
    assert [(word >> bits * place) & mask for place in range(per_word)] == before.codes[
        5, per_word : 2 * per_word
    ].tolist()
    stored = gptq.read(tensors, ROWS, COLUMNS, gptq_of(bits, False))
    assert torch.equal((stored.zero + 1) & mask, before.zero)


def test_act_order_gives_each_column_the_scale_of_its_own_group() -> None:
    before = matrix()
    of_column = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2)) // GROUP
    tensors = gptq.write(before) | {"g_idx": of_column.to(torch.int32)}
    after = gptq.read(tensors, ROWS, COLUMNS, gptq_of(4))
    expected = torch.stack(
        [
            (before.codes[:, column].float() - before.zero[:, group].float()) * before.scale[:, group].float()
            for column, group in enumerate(of_column.tolist())
        ],
        1,
    )
    assert torch.equal(after.dequantise(), expected)
    blocks = after.affine_blocks()
    assert blocks.order is not None
    assert torch.allclose(torch.from_numpy(blocks.dequantize()), expected, atol=1e-5)
    with pytest.raises(ModelError, match="act-order cannot be cut by columns"):
        after.sliced(slice(0, ROWS), slice(0, GROUP))


def test_a_group_outside_the_matrix_is_refused() -> None:
    tensors = gptq.write(matrix()) | {"g_idx": torch.full((COLUMNS,), 7, dtype=torch.int32)}
    with pytest.raises(ModelError, match="outside"):
        gptq.read(tensors, ROWS, COLUMNS, gptq_of(4))


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False), (2, False)])
def test_compressed_tensors_keeps_a_packed_matrix(bits: int, symmetric: bool) -> None:
    before = matrix(bits, symmetric)
    tensors = compressed_tensors.write_packed(before, symmetric)
    assert ("weight_zero_point" in tensors) != symmetric
    how = Quantisation("pack-quantized", bits, "group", GROUP)
    after = compressed_tensors.read(tensors, ROWS, COLUMNS, how)
    assert isinstance(after, IntegerMatrix) and equal(after, before)


def test_int8_and_float8_keep_their_weights() -> None:
    before = matrix(8, symmetric=True, groups=1)
    tensors = compressed_tensors.write_int8(before)
    assert tensors["weight"].dtype == torch.int8
    expected = tensors["weight"].float() * tensors["weight_scale"].float()
    how = Quantisation("int-quantized", 8, "channel", activation_bits=8)
    after = compressed_tensors.read(tensors, ROWS, COLUMNS, how)
    assert torch.equal(after.dequantise(), expected)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    for scheme in ("channel", "tensor", "block"):
        kept = float8(weight, scheme)  # type: ignore[arg-type]
        tensors = compressed_tensors.write_float8(kept, scheme == "tensor", deepseek=scheme == "block")
        how = Quantisation("fp8" if scheme == "block" else "float-quantized", 8, scheme, block=(128, 128))  # type: ignore[arg-type]
        again = compressed_tensors.read(tensors, ROWS, COLUMNS, how)
        assert isinstance(again, Float8Matrix) and torch.equal(again.dequantise(), kept.dequantise())


def test_float8_may_have_a_scale_per_group_of_columns() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(ROWS, COLUMNS // GROUP, generator=generator)
    how = Quantisation("float-quantized", 8, "group", GROUP, symmetric=True)
    matrix = compressed_tensors.read({"weight": codes, "weight_scale": scale}, ROWS, COLUMNS, how)
    assert torch.equal(matrix.dequantise(), codes.float() * scale.repeat_interleave(GROUP, 1))


def test_parts_are_parts_of_the_dequantised_matrix() -> None:
    rows, columns = slice(4, 9), slice(32, 64)
    whole = matrix()
    assert torch.equal(whole.sliced(rows, columns).dequantise(), whole.dequantise()[rows, columns])
    with pytest.raises(ModelError, match="cannot be cut at column 16"):
        whole.sliced(rows, slice(16, 48))
    generator = torch.Generator().manual_seed(2)
    for groups, cut in ((1, slice(36, 128)), (1, slice(50, 100)), (2, slice(32, 96)), (2, slice(64, 128))):
        codes = torch.randint(0, 256, (12, 128), generator=generator, dtype=torch.uint8)
        zero = torch.randint(0, 256, (12, groups), generator=generator, dtype=torch.uint8)
        wide = IntegerMatrix(codes, torch.rand(12, groups, generator=generator), zero, 8)
        assert torch.equal(wide.sliced(rows, cut).dequantise(), wide.dequantise()[rows, cut])
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    for scheme in ("channel", "tensor", "block"):
        kept = float8(weight, scheme)  # type: ignore[arg-type]
        part = kept.sliced(slice(100, 200), slice(128, 256))
        assert torch.equal(part.dequantise(), kept.dequantise()[100:200, 128:256])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_kernels_form_has_the_file_s_own_weights(bits: int, symmetric: bool) -> None:
    before = matrix(bits, symmetric)
    blocks = torch.from_numpy(before.affine_blocks().dequantize())
    assert torch.allclose(blocks, before.dequantise(), rtol=1e-6, atol=1e-4)


CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def compressed(
    weights: dict[str, object], storage: str = "pack-quantized", **more: object
) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
    } | more


def rotated(location: str) -> dict[str, object]:
    """A transform_config as SpinQuant's modifier writes it, with one rotation."""
    apply = [{"targets": ["re:.*down_proj$"], "location": location, "inverse": False, "ignore": []}]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": apply, "randomize": False}}}


def test_rotations_that_are_in_the_weights_need_nothing() -> None:
    config = compressed({}, transform_config=rotated("weight_input"))
    assert quantisation_from_config({"quantization_config": config}) is not None


def test_zero_points_are_where_the_configuration_says_that_there_are_some() -> None:
    place = Placement("q.weight", "q.weight", (ROWS, COLUMNS))
    found = {"q.weight": ("I8", (ROWS, COLUMNS)), "q.weight_scale": ("BF16", (ROWS, 1))}
    balanced, shifted = (
        quantisation_from_config({"quantization_config": compressed(one, "int-quantized")})
        for one in ({}, {"symmetric": False})
    )
    assert balanced is not None and shifted is not None
    assert list(stored_matrices(balanced, [place], found)) == [place.source]
    with pytest.raises(ModelError, match=r"q\.weight_zero_point is missing"):
        stored_matrices(shifted, [place], found)
    found |= {"q.weight_zero_point": ("I8", (ROWS, 1)), "q.input_zero_point": ("I8", (1,))}
    (matrix,) = stored_matrices(shifted, [place], found).values()
    assert "q.input_zero_point" in matrix.sources  # of activations that are rounded in another way here


def test_configurations_of_the_known_writers_are_understood() -> None:
    found = {name: quantisation_from_config({"quantization_config": one}) for name, one in CONFIGS.items()}
    assert found["awq"] == Quantisation("awq", 4, "group", 32)
    assert found["gptq"] == Quantisation(
        "gptq", 4, "group", 32, stores_zero_minus_one=True, act_order=True, symmetric=True
    )
    assert found["fp8"] == Quantisation("fp8", 8, "block", block=(128, 128), activation_bits=8)
    second = quantisation_from_config(
        {"quantization_config": CONFIGS["gptq"] | {"checkpoint_format": "gptq_v2"}}
    )
    assert second is not None and not second.stores_zero_minus_one
    assert quantisation_from_config({}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported"),
        ("gptq", "must be a table"),
        (CONFIGS["awq"] | {"version": "marlin"}, "only version 'gemm'"),
        (CONFIGS["gptq"] | {"bits": 3}, "3 bits; supported are 2, 4 and 8"),
        (CONFIGS["gptq"] | {"bits": "4"}, "must be a whole number"),
        (CONFIGS["gptq"] | {"group_size": 0}, "group_size"),
        (CONFIGS["fp8"] | {"weight_block_size": [0, 128]}, "two sizes"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "no config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "nvfp4-pack-quantized",
        ),
        (
            compressed({}, transform_config=rotated("input")),
            r"activations that are rotated .*location 'input'",
        ),
        (compressed({}, transform_config=rotated("k_cache")), "location 'k_cache'"),
        (compressed({"type": "float"}), "float numbers stored as pack-quantized"),
        (compressed({"type": "float", "symmetric": False}, "float-quantized"), "symmetric=False"),
        (
            compressed({"strategy": "block", "block_structure": [64, 64]}, "int-quantized"),
            "scales by 'block'",
        ),
    ],
)
def test_unknown_and_damaged_configurations_are_refused_in_one_line(config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        quantisation_from_config({"quantization_config": config})
    assert "\n" not in str(raised.value)


def test_tensors_that_do_not_fit_the_configuration_are_refused_by_name() -> None:
    how = Quantisation("gptq", 4, "group", GROUP, stores_zero_minus_one=True)
    place = Placement("layer.q_proj.weight", "q.weight", (ROWS, COLUMNS))
    right = {
        f"layer.q_proj.{name}": ({torch.float16: "F16", torch.int32: "I32"}[one.dtype], tuple(one.shape))
        for name, one in gptq.write(matrix()).items()
    }
    assert list(stored_matrices(how, [place], right)) == [place.source]
    for change, message in (
        ({"layer.q_proj.qweight": ("I32", (9, 16))}, "qweight is I32"),
        ({"layer.q_proj.scales": ("I32", (2, 16))}, "scales is I32"),
    ):
        with pytest.raises(ModelError, match=message):
            stored_matrices(how, [place], right | change)
    missing = {name: one for name, one in right.items() if not name.endswith("qzeros")}
    with pytest.raises(ModelError, match=r"q_proj\.qzeros is missing"):
        stored_matrices(how, [place], missing)
    unordered = {name: one for name, one in right.items() if not name.endswith("g_idx")}
    assert stored_matrices(how, [place], unordered)  # its groups are runs of columns
    with pytest.raises(ModelError, match=r"q_proj\.g_idx is missing"):
        stored_matrices(replace(how, act_order=True), [place], unordered)
    with pytest.raises(ModelError, match="groups of 48 do not divide"):
        stored_matrices(Quantisation("gptq", 4, "group", 48), [place], right)


ODD: tuple[object, ...] = (
    None, -1, 0, 1 << 40, 1.5, float("nan"), "x", [], {}, True, [[1]], [0, 0], [-1, 128], {"a": []},
)  # fmt: skip


def paths(table: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    for name, value in table.items() if isinstance(table, dict) else ():
        yield from paths(value, (*path, name))


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS.values(),
        compressed({"group_size": 32, "strategy": "group"}, transform_config=rotated("weight_input")),
    ],
    ids=[*CONFIGS, "compressed-tensors"],
)
def test_an_odd_value_anywhere_is_refused_or_understood(config: dict[str, object]) -> None:
    understood = refused = 0
    for path, value in itertools.product(paths(config), ODD):
        changed = place = copy.deepcopy(config)
        for name in path[:-1]:
            place = place[name]  # type: ignore[assignment]
        place[path[-1]] = value
        try:
            quantisation_from_config({"quantization_config": changed})
            understood += 1
        except ModelError as error:
            assert "\n" not in str(error)
            refused += 1
    assert understood and refused
