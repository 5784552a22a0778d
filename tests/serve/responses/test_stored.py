"""StoredResponses: bounded by count and bytes, and nobody touches what others keep."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cumulo.serve.stored_responses import StoredResponse, StoredResponses
from tests import thorough

CALLERS = st.sampled_from(["ann", "bob", "eve"])


def kept(size_bytes: int) -> StoredResponse:
    return StoredResponse(b"x" * size_bytes, b"", b"")


class Shelves(RuleBasedStateMachine):
    """Against a plain model: a list per caller, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = StoredResponses(most=4, most_bytes=100)
        self.model: dict[str, list[tuple[str, int]]] = {"ann": [], "bob": [], "eve": []}
        self.made = 0

    @rule(caller=CALLERS, size_bytes=st.integers(1, 120))
    def put(self, caller: str, size_bytes: int) -> None:
        self.made += 1
        self.stored.put(caller, f"resp_{self.made}", kept(size_bytes))
        if size_bytes > 100:
            return
        self.model[caller].append((f"resp_{self.made}", size_bytes))
        while self.count > 4:
            del self.model[max(self.model, key=lambda name: (len(self.model[name]), name))][0]
        while self.size_bytes > 100:
            del self.model[max(self.model, key=lambda name: (self.owned_bytes(name), name))][0]

    def owned_bytes(self, caller: str) -> int:
        return sum(size for _, size in self.model[caller])

    @property
    def count(self) -> int:
        return sum(map(len, self.model.values()))

    @property
    def size_bytes(self) -> int:
        return sum(map(self.owned_bytes, self.model))

    @rule(caller=CALLERS, back=st.integers(0, 6))
    def get(self, caller: str, back: int) -> None:
        name = f"resp_{self.made - back}"
        found = [entry for entry in self.model[caller] if entry[0] == name]
        assert (self.stored.get(caller, name) is not None) == bool(found)
        for entry in found:
            self.model[caller].remove(entry)
            self.model[caller].append(entry)

    @rule(caller=CALLERS, back=st.integers(0, 6))
    def delete(self, caller: str, back: int) -> None:
        name = f"resp_{self.made - back}"
        found = [entry for entry in self.model[caller] if entry[0] == name]
        assert self.stored.delete(caller, name) == bool(found)
        for entry in found:
            self.model[caller].remove(entry)

    @invariant()
    def counts_agree(self) -> None:
        assert self.stored.count == self.count <= 4
        assert self.stored.size_bytes == self.size_bytes <= 100


Shelves.TestCase.settings = settings(
    max_examples=thorough.examples(40), stateful_step_count=25, deadline=None
)


class TestShelves(Shelves.TestCase):  # type: ignore[name-defined, misc]
    pass


@given(st.integers(0, 40))
def test_a_flood_of_one_caller_leaves_anothers_alone(flood: int) -> None:
    stored = StoredResponses(most=10)
    stored.put("ann", "resp_ann", kept(50))
    for number in range(flood):
        stored.put("eve", f"resp_{number}", kept(500))
    assert stored.get("ann", "resp_ann") is not None
    assert stored.get("eve", "resp_ann") is None and not stored.delete("eve", "resp_ann")


def test_none_are_kept_where_none_are_wanted() -> None:
    stored = StoredResponses(most=0)
    stored.put("ann", "resp_1", kept(1))
    assert stored.get("ann", "resp_1") is None and stored.count == stored.size_bytes == 0
