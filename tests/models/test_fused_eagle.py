"""FusedEagle against the same head in PyTorch's operators."""

import pytest
import torch

from cumulo.engine.play.drafter import EagleDraft
from cumulo.kernels.cpu.library import native
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.heads.eagle import EagleHead, StreamTap
from cumulo.models.heads.files import load_eagle, save_eagle
from cumulo.models.linear import Linear, TensorKind
from cumulo.models.play.fused_eagle import FusedEagle, why_not_head
from cumulo.spec.model import ModelSpec

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler")

SPEC = ModelSpec("llama", 300, 64, 1, 4, 2, 16, 96, 256)


def random_head(folder) -> EagleHead:
    """As it comes from a file, packed."""
    generator = torch.Generator().manual_seed(1)
    head = EagleHead(SPEC, 3 * SPEC.hidden, 150)
    for parameter in head.parameters():
        scale, offset = (0.15, 0.0) if parameter.dim() > 1 else (0.2, 1.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    head.token_of = torch.randperm(SPEC.vocab_size, generator=generator)[:150].sort().values
    save_eagle(folder, head)
    loaded = load_eagle(folder, SPEC)
    loaded.rotary.serve(SPEC.max_context)
    return loaded


def step(first: int, count: int, wanted: list[int], generator: torch.Generator) -> ForwardBatch:
    """`count` tokens of one sequence, whose blocks are 2, 0, 3, ..."""
    table = torch.tensor([[2, 0, 3, 1, 4, 5]], dtype=torch.int32)
    positions = torch.arange(first, first + count)
    return ForwardBatch(
        token_ids=torch.randint(0, SPEC.vocab_size, (count,), generator=generator),
        positions=positions,
        slots=table[0, positions // 16].to(torch.int64) * 16 + positions % 16,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lengths=torch.tensor([first + count], dtype=torch.int32),
        block_tables=table,
        logit_rows=torch.tensor(wanted),
    )


def test_a_fused_head_proposes_what_the_head_proposes(tmp_path) -> None:
    generator = torch.Generator().manual_seed(2)
    head = random_head(tmp_path)
    embed = Linear(SPEC.hidden, SPEC.vocab_size, kind=TensorKind(torch.float32, "cpu"))
    embed.weight.data = torch.randn(SPEC.vocab_size, SPEC.hidden, generator=generator)
    tap = StreamTap((0, 1, 2), 96, SPEC.hidden, torch.float32, "cpu")
    tap.kept.copy_(torch.randn(tap.kept.shape, generator=generator))
    assert why_not_head(head, embed) is None
    models = (EagleDraft(head, embed.rows, tap.stream_at), FusedEagle(head, embed, tap))
    caches = [KVCache(SPEC, 6, 16) for _ in models]
    previous: list[torch.Tensor | None] = [None, None]
    # A prompt, known tokens behind it, then proposals behind proposals, and a longer chunk than any before.
    for batch, own in (
        (step(0, 5, [4], generator), False),
        (step(5, 2, [0, 1], generator), False),
        (step(7, 2, [0, 1], generator), True),
        (step(9, 40, [7, 39], generator), False),
    ):
        found = [
            model.follow(batch, cache, before if own else None)
            for model, cache, before in zip(models, caches, previous, strict=True)
        ]
        (hidden, (tokens, chances)), (fused_hidden, (fused_tokens, fused_chances)) = found
        torch.testing.assert_close(
            fused_hidden, hidden, rtol=0.02, atol=0.02
        )  # activations are rounded to 8 bits
        assert fused_tokens.tolist() == tokens.tolist()
        assert fused_chances == pytest.approx(chances, rel=0.05)
        previous = [one[0] for one in found]
    torch.testing.assert_close(caches[1].key_storage, caches[0].key_storage, rtol=0.02, atol=0.02)


def test_a_head_that_is_not_packed_is_not_fused() -> None:
    embed = Linear(SPEC.hidden, SPEC.vocab_size, kind=TensorKind(torch.float32, "cpu"))
    assert why_not_head(EagleHead(SPEC, 3 * SPEC.hidden, 150), embed) == "its matrices are not packed"


def test_one_sequence_is_followed_as_it_is_in_a_batch(tmp_path) -> None:
    """In arrays that are used again: the same bits, behind known tokens and behind the head's own proposals."""
    generator = torch.Generator().manual_seed(3)
    embed = Linear(SPEC.hidden, SPEC.vocab_size, kind=TensorKind(torch.float32, "cpu"))
    embed.weight.data = torch.randn(SPEC.vocab_size, SPEC.hidden, generator=generator)
    tap = StreamTap((0, 1, 2), 96, SPEC.hidden, torch.float32, "cpu")
    tap.kept.copy_(torch.randn(tap.kept.shape, generator=generator))
    head = random_head(tmp_path)
    batched, single = FusedEagle(head, embed, tap), FusedEagle(head, embed, tap)
    caches = KVCache(SPEC, 6, 16), KVCache(SPEC, 6, 16)
    previous = None
    for first, count, own in ((0, 13, False), (13, 1, False), (14, 1, True), (15, 1, True), (15, 3, False)):
        batch = step(first, count, [count - 1], generator)
        previous, (tokens, chances) = batched.follow(batch, caches[0], previous if own else None)
        blocks = batch.block_tables[0].numpy()
        found = single.follow_one(batch.token_ids.tolist(), first, blocks, caches[1], own)
        assert found == (tokens[0], chances[0])
    assert torch.equal(caches[1].key_storage, caches[0].key_storage)
    assert torch.equal(caches[1].value_storage, caches[0].value_storage)
