"""The small kernels of a step: norm, SwiGLU, rotation and pages, a step's inputs, drawing a token."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cumulo.engine.sampling.sampler import DRAW_COLUMNS, DrawBatch, draw
from cumulo.kernels.cuda.elementwise import rms_norm, rope_cache, step_inputs, swiglu
from cumulo.kernels.cuda.sampling import sample
from tests import thorough
from tests.kernels.cuda.tolerance import check_close, poisoned, relative_error

DTYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 576)])
def test_a_norm_is_as_exact_as_torchs(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (
        random(*shape, dtype=dtype, device=device),
        random(shape[1], dtype=dtype, device=device, seed=1),
    )
    out = poisoned(*shape, dtype=dtype, device=device)
    rms_norm.rms_norm(x, weight, 1e-5, out=out)
    check_close(out, lambda a, w: rms_norm.reference(a, w, 1e-5), x, weight)


def test_a_norm_adds_the_residual_and_keeps_the_sum(device: torch.device) -> None:
    wide = random(6, 80, dtype=torch.float32, device=device)
    x, residual = wide[:, :40], random(6, 40, dtype=torch.float32, device=device, seed=2)  # x is strided
    weight, before = random(40, dtype=torch.float32, device=device, seed=3), residual.clone()
    out = rms_norm.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, before + x)
    check_close(out, lambda a, w, r: rms_norm.reference(a, w, 1e-6, r), x, weight, before)
    picked = torch.tensor([4, 0], dtype=torch.int32, device=device)
    before = residual.clone()
    some = rms_norm.rms_norm(x, weight, 1e-6, residual, rows=picked)
    assert torch.equal(residual, before)
    check_close(some, lambda a, w, r: rms_norm.reference(a, w, 1e-6, r)[picked.long()], x, weight, residual)


def gradients(function, grad_out: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, grad_out.to(leaves[0].dtype)))


@pytest.mark.long
def test_the_norms_gradient_is_torchs(device: torch.device) -> None:
    x, weight = (
        random(70, 24, dtype=torch.float32, device=device),
        random(24, dtype=torch.float32, device=device, seed=1),
    )
    grad_out = random(70, 24, dtype=torch.float32, device=device, seed=9)
    ours = rms_norm.backward(x, weight, grad_out, 1e-5)
    again = rms_norm.backward(x, weight, grad_out, 1e-5)
    exact = gradients(lambda a, w: rms_norm.reference(a, w, 1e-5), grad_out, x.double(), weight.double())
    for found, repeated, right in zip(ours, again, exact, strict=True):
        assert torch.equal(found, repeated)
        assert relative_error(found, right) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_its_gradient_are_torchs(dtype: torch.dtype, device: torch.device) -> None:
    x = random(3, 2 * 1030, dtype=dtype, device=device)
    out = poisoned(3, 1030, dtype=dtype, device=device)
    swiglu.swiglu(x, out)
    check_close(out, swiglu.reference, x)
    grad_out = random(3, 1030, dtype=dtype, device=device, seed=9)
    check_close(swiglu.backward(x, grad_out), lambda a: gradients(swiglu.reference, grad_out, a)[0], x)


@pytest.mark.long
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_heads_are_normed_and_turned_and_keys_and_values_reach_their_pages(
    heads: tuple[int, int], normed: bool, interleaved: bool, device: torch.device
) -> None:
    (queries, kv_heads), dim, size, dtype = heads, 16, 4, torch.float16
    width = (queries + 2 * kv_heads) * dim
    qkv = random(5, width + 8, dtype=dtype, device=device)[:, :width]  # rows of a wider buffer
    angles = torch.rand(20, dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    positions = torch.tensor([3, 0, 19, 7, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([9, 2, 21, 4, -1], dtype=torch.int32, device=device)  # the last one goes nowhere
    norms = [random(dim, dtype=dtype, device=device, seed=s) for s in (4, 5)] if normed else [None, None]
    before = qkv.clone()
    keys, values = (poisoned(6, kv_heads, size, dim, dtype=dtype, device=device) for _ in range(2))
    rope_cache.rope_cache(qkv, cos, sin, positions, slots, keys, values, queries, *norms, 1e-5, interleaved)

    def expected(part: int, x: Tensor) -> Tensor:
        widened = [None if n is None else n.to(x.dtype) for n in norms]
        return rope_cache.reference(
            x, cos.to(x.dtype), sin.to(x.dtype), positions, queries, kv_heads, *widened, 1e-5, interleaved
        )[part][:4]

    written = slots[:4].long()
    turned = qkv.view(5, -1, dim)[:4, :queries]
    check_close(turned, lambda x: expected(0, x), before)
    check_close(keys.transpose(1, 2).flatten(0, 1)[written], lambda x: expected(1, x), before)
    assert torch.equal(values.transpose(1, 2).flatten(0, 1)[written], expected(2, before))
    untouched = [s for s in range(24) if s not in written.tolist()]
    assert keys.transpose(1, 2).flatten(0, 1)[untouched].isnan().all()
    assert torch.equal(qkv[4], before[4])


@pytest.mark.long
def test_in_invariant_mode_a_token_is_turned_to_the_same_bits_alone_and_among_many(
    device: torch.device,
) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 128, 66
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    together = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    alone = together[:1].clone()
    angles = torch.rand(tokens, dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    norms = [random(dim, dtype=dtype, device=device, seed=s) for s in (4, 5)]
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    found = []
    for qkv in (together, alone):
        keys, values = (torch.zeros(8, kv_heads, 16, dim, dtype=dtype, device=device) for _ in range(2))
        rope_cache.rope_cache(
            qkv,
            cos,
            sin,
            places[: len(qkv)],
            places[: len(qkv)],
            keys,
            values,
            heads,
            *norms,
            1e-5,
            invariant=True,
        )
        found.append((qkv[0], keys[0, :, 0], values[0, :, 0]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    # Which only a GPU can get wrong: the interpreter sums in one order.
    for norm in (True, False):
        alone, many = (rope_cache._heads_at_once(count, heads, kv_heads, True, norm) for count in (1, tokens))
        assert alone == many
    assert rope_cache._heads_at_once(tokens, 8, 4, True, True) == rope_cache._heads_at_once(
        tokens, 4, 2, True, True
    )


def test_a_steps_inputs_are_read_off_the_slots_and_padding_goes_nowhere(device: torch.device) -> None:
    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 99, (4, 300), generator=generator, dtype=torch.int32).to(device)
    tables = torch.randperm(4 * 80, generator=generator).view(4, 80).int().to(device)
    slots, starts, query_starts = column(2, 0, 3), column(200, 0, 7), column(0, 1, 151, 152)
    padded = (column(2, 0, 3, -1), column(200, 0, 7, 0), column(0, 1, 151, 152, 152))
    new_indices, new_blocks = column(50, -1, -1, -1), column(999, -1, -1, -1)  # row 0 gains block 999
    ids, positions, kv_slots = (torch.full((160,), 55, dtype=torch.int32, device=device) for _ in range(3))
    contexts, step_tables = torch.empty(4, dtype=torch.int32, device=device), torch.full_like(tables, -7)
    step_inputs.step_inputs(
        *padded, new_indices, new_blocks, tokens, tables, 4, ids, positions, kv_slots, contexts, step_tables
    )
    assert tables[2, 50] == 999
    expected = step_inputs.reference(slots, starts, query_starts, tokens, tables, 4)
    for found, right in zip((ids, positions, kv_slots), expected, strict=False):
        assert torch.equal(found[:152].cpu(), right)
    assert (kv_slots[152:] == -1).all() and (ids[152:] == 0).all()
    assert torch.equal(contexts.cpu(), torch.cat((expected[3], torch.zeros(1, dtype=torch.int32))))
    assert torch.equal(step_tables[0, :51], tables[2, :51]) and (step_tables[0, 51:] == -7).all()


def test_slots_begin_and_gain_blocks(device: torch.device) -> None:
    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = torch.zeros(3, 6, dtype=torch.int32, device=device)
    step_inputs.fill_rows(column(5, 6, 7, 8), column(0, 1), column(1, 3), column(2, 0), table)
    step_inputs.scatter(column(1, -1, 2), column(4, 0, 5), column(9, 9, 8), table)
    assert table.tolist() == [[6, 7, 8, 0, 0, 0], [0, 0, 0, 0, 9, 0], [5, 0, 0, 0, 0, 8]]


def draws_for(
    device: torch.device, temperatures: list[float], seeds: list[int], positions: list[int]
) -> Tensor:
    draws = np.zeros((len(seeds), sample.COLUMNS), dtype=np.int32)
    draws[:, sample.TEMPERATURE] = np.array(temperatures, np.float32).view(np.int32)
    words = np.array(seeds, np.uint64).view(np.int32).reshape(-1, 2)
    draws[:, sample.SEED_LOW], draws[:, sample.SEED_HIGH] = words[:, 0], words[:, 1]
    draws[:, sample.SAMPLE_INDEX], draws[:, sample.POSITION] = np.arange(len(seeds)) % 3, positions
    draws[:, sample.SLOT] = np.arange(len(seeds))
    return torch.from_numpy(draws).to(device)


@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_a_drawn_token_is_the_one_the_same_random_number_picks_on_a_cpu(
    vocabulary: int, device: torch.device
) -> None:
    rows = 7
    logits = 3 * random(rows, vocabulary, dtype=torch.float32, device=device)
    temperatures = [0.0, 1.0, 0.6, 5.0, 0.01, 1.0, 1.0]
    seeds, positions = [3, 1, 2**63 + 5, 17, 4, 99, 2**40], [1, 0, 2, 2, 3, 1, 0]
    logits[5, 7:] = -torch.inf
    logits[6, :-2] = -torch.inf
    draws = draws_for(device, temperatures, seeds, positions)
    picked = torch.full((rows,), -9, dtype=torch.int32, device=device)
    tokens = torch.zeros((rows, 4), dtype=torch.int32, device=device)
    sample.sample(logits, draws, sample.SampleBuffers(rows, vocabulary, device), picked, tokens)
    columns = np.zeros(rows, dtype=DRAW_COLUMNS)
    columns["seed"], columns["sample_index"] = np.array(seeds, np.uint64), np.arange(rows) % 3
    columns["greedy"] = np.array(temperatures) == 0
    columns["temperature"] = np.where(columns["greedy"], 1.0, temperatures)
    columns["top_p"], columns["repetition_penalty"], columns["logprobs"] = 1.0, 1.0, -1
    expected = draw(logits.cpu().clone(), DrawBatch(np.arange(rows), np.array(positions), columns)).tokens
    assert picked.cpu().tolist() == expected.tolist()
    assert tokens[range(rows), positions].cpu().tolist() == expected.tolist()


def drawn(logits: Tensor, draws: Tensor) -> Tensor:
    picked = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    buffers = sample.SampleBuffers(*logits.shape, logits.device)
    sample.sample(logits, draws, buffers, picked, torch.zeros((len(logits), 1), dtype=torch.int32).to(picked))
    return picked


def test_logits_that_are_not_finite_give_no_token(device: torch.device) -> None:
    logits = torch.zeros(4, 5000, device=device)
    logits[0, 4500], logits[1, 3] = torch.nan, torch.inf
    logits[2] = -torch.inf
    draws = draws_for(device, [1.0, 0.0, 1.0, 1.0], [1, 2, 3, 4], [0, 0, 0, 0])
    picked = drawn(logits, draws)
    assert picked[:3].tolist() == [-1, -1, -1] and picked[3] >= 0


@pytest.mark.long
def test_drawing_follows_the_distribution(device: torch.device) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    rows = 400 if thorough.chosen else 80
    logits = probabilities.log().expand(rows, 4).contiguous().to(device)
    draws = draws_for(device, [1.0] * rows, list(range(rows)), [0] * rows)
    picked = drawn(logits, draws)
    counts = torch.bincount(picked.cpu().long(), minlength=4)
    chi_squared = ((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum()
    assert chi_squared < 16.3  # 3 degrees of freedom, p = 0.001
