"""AdapterRegistry: the adapters that a server has, by the names that clients use. Owned by Service; engines that
start are told which it holds.

A dropped adapter takes no new calls. Its engines keep it until its last call has ended, engines that are restarted
meanwhile included, so that no call fails because of it.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cumulo.engine.decide.adapters import salted
from cumulo.errors import CumuloError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AdapterRefused(CumuloError):
    """An adapter cannot be loaded or dropped; the message says why."""


def split_lora(text: str) -> tuple[str, str]:
    """NAME=FOLDER, or a folder alone, which has the name of its last part."""
    name, equals, folder = text.partition("=")
    if not equals:
        name, folder = Path(text).name, text
    if not name or not folder:
        raise CumuloError(f"--lora takes NAME=DIR, for example --lora poet=runs/poet/adapter; got {text!r}")
    return name, str(Path(folder).absolute())


def named_loras(texts: Iterable[str]) -> dict[str, str]:
    """The folders of --lora by name; a name that is given twice would hide the first folder."""
    found: dict[str, str] = {}
    for name, folder in map(split_lora, texts):
        if name in found:
            raise CumuloError(
                f"--lora names {name!r} twice, for {found[name]} and {folder}: choose another name"
            )
        found[name] = folder
    return found


@dataclass(slots=True)
class ServedAdapter:
    name: str
    folder: str
    key: str  # what the engines call it: a name that is loaded anew is another adapter
    ready: bool = False  # every engine has it
    dropped: bool = False
    error: str = ""  # why a restarted engine could not load it again
    rank: int = 0
    fingerprint: str = ""
    calls: int = 0  # that have not ended
    answered: int = 0  # calls in all
    loaded_s: float = field(default_factory=time.time)


class AdapterRegistry:
    def __init__(self, most: int, base: str = "") -> None:
        """`most`: places that engines have. `base`: the model's own name, which no adapter can have."""
        self.most, self._base = most, base
        self.all: dict[str, ServedAdapter] = {}  # by key, those that are leaving included
        self.on_free: Callable[[ServedAdapter], None] = lambda adapter: None  # its last call has ended
        self._numbers = itertools.count(1)

    @property
    def served(self) -> dict[str, ServedAdapter]:
        """The adapters that calls can name, by name."""
        return {one.name: one for one in self.all.values() if one.ready and not one.dropped}

    def named(self, name: str) -> ServedAdapter | None:
        return self.served.get(name)

    # -- they come and go ---------------------------------------------------------------------------------
    def put(self, name: str, folder: str) -> ServedAdapter:
        """Add a new adapter, which is not ready yet."""
        if not self.most:
            raise AdapterRefused(
                "this server was started without room for adapters: start it with --max-loras 8, or with --lora"
            )
        if not _NAME.fullmatch(name):
            raise AdapterRefused(
                f"an adapter's name is 1 to 128 letters, digits and . _ : / -, beginning with a letter or a digit; "
                f"got {name[:140]!r}"
            )
        if name == self._base:
            raise AdapterRefused(f"{name!r} is the name of the model itself: choose another name")
        if any(one.name == name and one.error for one in self.all.values()):
            self.drop(name)  # the engines do not have it
        if any(one.name == name and not one.dropped for one in self.all.values()):
            raise AdapterRefused(
                f"an adapter {name!r} is loaded already: drop it first, or choose another name"
            )
        if len(self.all) >= self.most:
            leaving = [one.name for one in self.all.values() if one.dropped]
            waits = f"; {', '.join(leaving)} waits for its last request" if leaving else ""
            raise AdapterRefused(
                f"all {self.most} places for adapters are taken{waits}: drop one, or start with a "
                "larger --max-loras"
            )
        adapter = ServedAdapter(name, folder, f"{name}@{next(self._numbers)}")
        self.all[adapter.key] = adapter
        return adapter

    def remove(self, adapter: ServedAdapter) -> None:
        self.all.pop(adapter.key, None)

    def drop(self, name: str) -> ServedAdapter:
        """It takes no new calls; once it has none it is gone."""
        found = (one for one in self.all.values() if one.name == name and not one.dropped)
        adapter = next((one for one in found if one.ready or one.error), None)
        if adapter is None:
            known = ", ".join(self.served) or "none"
            raise AdapterRefused(f"there is no adapter {name[:140]!r}; loaded: {known}")
        adapter.dropped = True
        self._free_if_unused(adapter)
        return adapter

    def _free_if_unused(self, adapter: ServedAdapter) -> None:
        if adapter.dropped and not adapter.calls and adapter.key in self.all:
            self.remove(adapter)
            self.on_free(adapter)

    # -- calls --------------------------------------------------------------------------------------------
    def hold(self, adapter: ServedAdapter) -> None:
        adapter.calls += 1
        adapter.answered += 1

    def release(self, adapter: ServedAdapter) -> None:
        adapter.calls -= 1
        self._free_if_unused(adapter)

    def salted(self, salt: str, key: str) -> str:
        """What the KV blocks of a request are hashed with, as its engine does it."""
        adapter = self.all.get(key)
        return salt if adapter is None else salted(salt, adapter.fingerprint)
