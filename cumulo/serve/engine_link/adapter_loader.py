"""AdapterLoader: reads adapters beside the engine's loop, so that nobody's tokens wait for a file. Owned by
EngineLoop.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cumulo.engine.adapters import AdapterStore
from cumulo.engine.play.mailbox import Mailbox
from cumulo.errors import CumuloError
from cumulo.models.adapters.files import AdapterWeights
from cumulo.serve.engine_link.messages import AdapterReport, LoadAdapter


class AdapterLoader:
    def __init__(self, store: AdapterStore | None) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cumulo-adapters")
        self.done: Mailbox[tuple[LoadAdapter, Future[AdapterWeights]]] = Mailbox()

    def begin(self, order: LoadAdapter) -> None:
        reading = self._readers.submit(_read, self._store, order)
        reading.add_done_callback(lambda read: self.done.put((order, read)))

    def take_read(self) -> list[AdapterReport]:
        """Between two steps: put into the engine what has been read, in the order it was asked for."""
        return [_enter(self._store, order, read.result) for order, read in self.done.take_all()]

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)


def load_now(store: AdapterStore | None, order: LoadAdapter) -> AdapterReport:
    """Before the engine's loop begins: there is nobody to wait."""
    return _enter(store, order, lambda: _read(store, order))


def _read(store: AdapterStore | None, order: LoadAdapter) -> AdapterWeights:
    if store is None:
        raise CumuloError("this engine has no room for adapters")
    return store.read(order.folder)


def _enter(
    store: AdapterStore | None, order: LoadAdapter, read: Callable[[], AdapterWeights]
) -> AdapterReport:
    """Puts an adapter into the store, and reports; or reports why it could not be read."""
    try:
        weights = read()
        assert store is not None
        adapter = store.add(order.key, weights, order.name)
    except CumuloError as error:
        return AdapterReport(order.key, str(error))
    return AdapterReport(order.key, "", adapter.rank, adapter.fingerprint)
