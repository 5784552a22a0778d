"""AdapterSlots: which adapters an engine has, in which slot, and how many requests use each. An extension of the
scheduler.

An adapter that is dropped takes no new requests from then on; its slot is free when its last request has ended. A
name can be loaded again meanwhile: it is another adapter, in another slot.
"""

from dataclasses import dataclass

from cumulo.base.nearest import did_you_mean
from cumulo.engine.decide.core.extension import Extension
from cumulo.engine.decide.core.request import Request
from cumulo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Adapter:
    key: str  # by which requests name it to the engine
    name: str  # by which people call it
    slot: int
    rank: int  # the greatest of its modules
    fingerprint: str  # of its weights
    folder: str


def salted(salt: str, fingerprint: str) -> str:
    """Where the hash chains of an adapter's KV blocks begin. Keys and values depend on its weights, not on its
    name: a name that was loaded anew with other weights finds none of the old blocks, and equal weights find theirs
    anywhere."""
    return f"{salt}\0adapter {fingerprint}" if fingerprint else salt


class AdapterSlots(Extension):
    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        self.loaded: dict[str, Adapter] = {}  # by key: those that take requests
        self.leaving: dict[int, Adapter] = {}  # by slot: dropped, with requests that have not ended
        self._requests = [0] * slots  # by slot

    def place(self, key: str, name: str, rank: int, fingerprint: str, folder: str) -> Adapter:
        """Give an adapter a free slot, or raise InvalidRequest."""
        if key in self.loaded:
            raise InvalidRequest(
                f"an adapter {name!r} is loaded already: drop it first, or choose another name"
            )
        taken = {adapter.slot for adapter in self.loaded.values()} | set(self.leaving)
        slot = next((slot for slot in range(self.slots) if slot not in taken), None)
        if slot is None:
            raise InvalidRequest(self._full())
        self.loaded[key] = adapter = Adapter(key, name, slot, rank, fingerprint, folder)
        return adapter

    def _full(self) -> str:
        if not self.slots:
            return "this engine serves no adapters: start it with max_loras=1 or more"
        leaving = ", ".join(adapter.name for adapter in self.leaving.values())
        waits = f" ({leaving} has requests that have not ended)" if leaving else ""
        return f"all {self.slots} places for adapters are taken{waits}: drop one, or start with a larger max_loras"

    def drop(self, key: str) -> int:
        """It takes no more requests. How many still use it."""
        adapter = self.find(key)
        del self.loaded[key]
        running = self._requests[adapter.slot]
        if running:
            self.leaving[adapter.slot] = adapter
        return running

    def find(self, key: str) -> Adapter:
        if key not in self.loaded:
            known = [adapter.name for adapter in self.loaded.values()]
            hint = did_you_mean(key, known, quoted=True) if known else "; none is loaded"
            raise InvalidRequest(f"there is no adapter {key!r}{hint}")
        return self.loaded[key]

    def of_print(self, fingerprint: str) -> Adapter:
        """The adapter of another engine's order, whatever it is called there."""
        found = next((one for one in self.loaded.values() if one.fingerprint == fingerprint), None)
        if found is None:
            raise InvalidRequest("the adapter of this request is not loaded here")
        return found

    def in_slot(self, slot: int) -> Adapter:
        """The adapter of a request that has not ended."""
        return self.leaving.get(slot) or next(one for one in self.loaded.values() if one.slot == slot)

    # -- requests ---------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        if request.adapter >= 0:
            adapter = self.in_slot(request.adapter)
            request.story.add(request.arrived_s, "adapter", name=adapter.name, rank=adapter.rank)
            self._requests[adapter.slot] += 1

    def request_ended(self, request: Request, now_s: float) -> None:
        if request.adapter >= 0:
            self._requests[request.adapter] -= 1
            if not self._requests[request.adapter]:
                self.leaving.pop(request.adapter, None)

    def running(self, key: str) -> int:
        """Requests of a loaded adapter that have not ended."""
        return self._requests[self.find(key).slot]
