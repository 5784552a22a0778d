"""What a rank's runner does besides its own part of a step: it takes the tokens that another stage drew, computes
only the sequences whose keys and values it holds, and asks one rank what guides allow. A TorchRunner with a
RankPlay plays every plan of the engine."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.params import Guide
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.guides.guided import GuidedSlots
from cumulo.engine.play.slot_table import SlotTable, StepRows
from cumulo.engine.sampling.distribution import Ints
from cumulo.engine.sampling.sampler import TokenMasks
from cumulo.layout.serving import RankPart
from cumulo.models.play.rank_links import RankLinks

if TYPE_CHECKING:  # it needs Triton
    from cumulo.models.play.cuda_stage import FarStage, RankStage

_MOST_EXPECTED = (
    8  # steps whose tokens lie with the first stage: fewer than there is room for (cuda_stage.py)
)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A step's rows that this rank computes, and what it takes to put all ranks' results together."""

    rows: StepRows
    wanted: Ints  # of the wanted tokens those computed here, counted among the tokens of `rows`
    shares: tuple[int, ...]  # tokens of the step by data-parallel rank
    owners: Ints  # by wanted token: the data-parallel rank that computes it
    here: Ints  # the numbers of those computed here
    place: Ints  # by row of the step: its number in `rows`; -1: it is elsewhere
    most_rows: int  # of one rank


class SequenceSplit:
    """Data-parallel attention: which rank has the blocks of which sequence, and what of a plan that leaves here."""

    def __init__(self, part: RankPart, max_slots: int, blocks: int) -> None:
        """`blocks`: of this rank's cache; each rank's are numbered after another's."""
        self.part, self._blocks = part, blocks
        self._owner = np.zeros(max_slots, dtype=np.int64)  # by slot

    def own_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with blocks numbered as in this rank's cache, and without what happens to others' blocks."""
        if self.part.layout.dp == 1:
            return plan
        first = self.part.place.dp * self._blocks
        inside = range(first, first + self._blocks)
        for new in plan.begin:
            if new.blocks:
                self._owner[new.slot] = new.blocks[0] // self._blocks
        for slot, block in plan.extend:
            self._owner[slot] = block // self._blocks
        return replace(
            plan,
            begin=[new._replace(blocks=[block - first for block in new.blocks]) for new in plan.begin],
            extend=[(slot, block - first) for slot, block in plan.extend],
            replace=[(slot, index, block - first) for slot, index, block in plan.replace],
            copies=[(source - first, target - first) for source, target in plan.copies if source in inside],
            swap_out=[(block - first, host) for block, host in plan.swap_out if block in inside],
            swap_in=[(host, block - first) for host, block in plan.swap_in if block in inside],
        )

    def own_rows(self, rows: StepRows, wanted: Ints) -> OwnRows | None:
        """None: all of them."""
        layout, own = self.part.layout, self.part.place.dp
        if layout.dp == 1:
            return None
        owners_of = self._owner[rows.slots]
        mine = np.flatnonzero(owners_of == own)
        kept = StepRows.from_columns(rows.slots[mine], rows.starts[mine], rows.counts[mine])
        row_of = np.searchsorted(rows.query_starts, wanted, side="right") - 1
        owners = owners_of[row_of]
        here = np.flatnonzero(owners == own)
        place = np.full(len(rows.slots), -1, dtype=np.int64)
        place[mine] = np.arange(len(mine))
        local = kept.query_starts[place[row_of[here]]] + wanted[here] - rows.query_starts[row_of[here]]
        shares = np.bincount(owners_of, weights=rows.counts, minlength=layout.dp).astype(np.int64)
        most_rows = int(np.bincount(owners_of, minlength=layout.dp).max())
        return OwnRows(kept, local, tuple(shares.tolist()), owners, here, place, most_rows)


class RankPlay:
    def __init__(self, part: RankPart, links: RankLinks, max_slots: int, blocks: int) -> None:
        """`blocks`: of this rank's cache."""
        self.part, self.links, self.split = part, links, SequenceSplit(part, max_slots, blocks)
        self._expected: deque[tuple[Ints, Ints]] = deque()  # slots and positions of tokens drawn elsewhere

    # -- pipeline -------------------------------------------------------------------------------------
    def take_tokens(self, plan: StepPlan, table: SlotTable) -> None:
        """Tokens drawn by the last stage in earlier plans, as far as this plan could meet their slots."""
        if not self._expected:
            return
        touched = {*plan.slots, *plan.end, *(new.slot for new in plan.begin)}
        while any(not touched.isdisjoint(slots.tolist()) for slots, _ in self._expected):
            slots, positions = self._expected.popleft()
            table.write_drawn(slots, positions, self.links.receive_tokens(len(slots)))

    def expect_tokens(self, slots: Ints, positions: Ints, table: SlotTable) -> None:
        """These will be drawn by the last stage. The first embeds them; the others need only know that they are."""
        if self.part.first and len(slots):
            self._expected.append((slots, positions))
        else:
            table.write_drawn(slots, positions, np.zeros(len(slots), dtype=np.int64))

    def send_tokens(self, tokens: Ints) -> None:
        if not self.part.first:
            self.links.send_tokens(tokens)

    # -- data-parallel attention ----------------------------------------------------------------------
    def all_hidden(self, own: OwnRows, hidden: Tensor) -> Tensor:
        """The hidden states of all wanted tokens, of which every rank computed some."""
        counts = np.bincount(own.owners, minlength=self.part.layout.dp)
        gathered = self.links.gather_rows(hidden, tuple(counts.tolist()))
        whole = torch.empty_like(gathered)
        whole[torch.from_numpy(np.argsort(own.owners, kind="stable"))] = gathered
        return whole


class DeviceRank:
    """The same for a CudaRunner, which waits for nobody: what other stages say is waited for on the device."""

    def __init__(
        self,
        part: RankPart,
        stage: "RankStage | FarStage | None",
        split: SequenceSplit,
        links: RankLinks,
    ) -> None:
        self.part, self._stage, self.split, self.links = part, stage, split, links
        self._expected: deque[list[int]] = deque()  # slots of tokens drawn elsewhere, by step

    def take_tokens(self, plan: StepPlan, tokens: Tensor) -> None:
        """Launch what enters the tokens drawn by the last stage, as far as this plan could meet their slots."""
        if not self._expected or self._stage is None:
            return
        touched = {*plan.slots, *plan.end, *(new.slot for new in plan.begin)}
        # The last stage waits once too many lie here.
        while len(self._expected) > _MOST_EXPECTED or any(
            not touched.isdisjoint(slots) for slots in self._expected
        ):
            self._expected.popleft()
            self._stage.take_tokens(tokens)

    def expect_tokens(self, slots: Ints) -> None:
        """The last stage draws tokens for these."""
        if self.part.first and len(slots):
            self._expected.append(slots.tolist())

    def send_tokens(self, draws: Tensor, tokens: Tensor) -> None:
        """`draws`: of the step, on the device; `tokens`: by slot and position, those drawn among them."""
        if self._stage is not None and len(draws):
            self._stage.send_tokens(draws, tokens)

    def all_states(self, own: Tensor) -> Tensor:
        """Hidden states of which one data-parallel rank has some and the others zeros: on all of them."""
        if self.links.data is None:
            return own
        return self.links.data.sum(own.float().cpu()).to(own)


class SharedGuides(GuidedSlots):
    """Guides on several ranks: one of them asks the matchers, which it would cost to keep everywhere and which may
    give up by the clock, and all mask by its answer."""

    def __init__(self, guided: GuidedSlots | None, links: RankLinks) -> None:
        """`guided`: on the rank that asks."""
        super().__init__(None)
        self._guided, self._links = guided, links
        self._slots: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def begin(self, slot: int, guide: Guide | None) -> None:
        self._slots.discard(slot)
        if guide is not None:
            self._slots.add(slot)
        if self._guided is not None:
            self._guided.begin(slot, guide)

    def end(self, slot: int) -> None:
        self._slots.discard(slot)
        if self._guided is not None:
            self._guided.end(slot)

    def masks(
        self, slots: Ints, output_before: Callable[[int], NDArray[np.int32]], vocabulary: int
    ) -> TokenMasks | None:
        draws = np.flatnonzero([slot in self._slots for slot in slots.tolist()])
        if not len(draws):
            return None
        words = -(-vocabulary // 32)
        told = np.zeros((len(draws), words + 1), dtype=np.int32)  # the last column: whether its guide failed
        errors: dict[int, str] = {}
        if self._guided is not None:
            found = self._guided.masks(slots, output_before, vocabulary)
            assert found is not None
            told[:, :words], errors = found.bits, found.errors
            told[:, words] = [draw in errors for draw in draws.tolist()]
        self._links.share_with_stage(torch.from_numpy(told))
        if self._guided is None:
            errors = {int(draw): "its guide failed" for draw in draws[told[:, words] != 0]}
        return TokenMasks(draws, np.ascontiguousarray(told[:, :words]), errors)
