"""Drafter: what it proposes for one sequence is what it proposes for it among others."""

import numpy as np
import pytest
import torch

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, StepPlan
from cumulo.engine.play.drafter import Drafter
from cumulo.engine.play.slot_table import SlotTable
from cumulo.kernels.cpu.library import native
from cumulo.models.batch import KVCache
from cumulo.models.heads.eagle import StreamTap
from cumulo.models.linear import Linear, TensorKind
from cumulo.models.play.fused_eagle import FusedEagle
from tests.models.test_fused_eagle import SPEC, random_head

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler")


def drafter_and_table(folder, sequences: int) -> tuple[Drafter, SlotTable]:
    """Sequences with the same tokens, each in blocks of its own."""
    generator = torch.Generator().manual_seed(4)
    embed = Linear(SPEC.hidden, SPEC.vocab_size, kind=TensorKind(torch.float32, "cpu"))
    embed.weight.data = torch.randn(SPEC.vocab_size, SPEC.hidden, generator=generator)
    tap = StreamTap((0, 1, 2), 8 * 16, SPEC.hidden, torch.float32, "cpu")
    tap.kept.copy_(torch.randn((4 * 16, 3 * SPEC.hidden), generator=generator).repeat(2, 1))
    table = SlotTable(sequences, 64, 16, [])
    tokens = torch.randint(0, SPEC.vocab_size, (20,), generator=generator).tolist()
    plan = StepPlan(0)
    for slot in range(sequences):
        blocks = [4 * slot + block for block in (2, 0, 3)]
        plan.begin.append(NewSlot(slot, tokens, 20, blocks, SamplingParams(), 0))
    table.apply(plan)
    drafter = Drafter(FusedEagle(random_head(folder), embed, tap), KVCache(SPEC, 8, 16), sequences, 64, tap)
    drafter.change(plan)
    return drafter, table


def test_alone_a_sequence_gets_the_proposals_it_gets_among_others(tmp_path) -> None:
    alone, both = drafter_and_table(tmp_path, 1), drafter_and_table(tmp_path, 2)
    # A prompt, one token behind it, several, none that is new, and more than there is room for.
    for new, count, floor in ((0, 2, 0.0), (1, 3, 0.0), (4, 1, 0.0), (0, 2, 0.0), (2, 4, 1.1), (20, 9, 0.0)):
        found = []
        for drafter, table in (alone, both):
            slots = range(len(table.lengths))
            for slot in slots:
                known = int(table.lengths[slot])
                table.tokens[slot, known : known + new] = np.arange(known, known + new)
                table.lengths[slot] += new
            found.append(drafter.propose([(slot, slot, count) for slot in slots], table, floor))
        (tokens, chances), (tokens_of_both, chances_of_both) = found
        for slot in tokens_of_both:
            assert tokens_of_both[slot] == tokens.get(0, [])
            assert chances_of_both[slot] == pytest.approx(chances.get(0, []), rel=1e-6)
        assert bool(tokens) == bool(tokens_of_both)
        assert all(len(one) <= count for one in tokens.values())
