"""A process that is a rank of an engine on another host: `cumulo serve --rank-of HOST:PORT`. When that engine ends,
as it does when one of its ranks fails, the next one is joined."""

import logging
import multiprocessing
from dataclasses import replace

from cumulo.engine.play.rank_player import play_rank
from cumulo.errors import CumuloError
from cumulo.ranks.remote import host_and_port, join_door
from cumulo.ranks.start import be_rank

log = logging.getLogger(__name__)

_REFUSED = 3  # exit status: joining again would not help


def serve_rank(address: str, key: str, model: str | None, threads: int | None) -> None:
    """Until it is interrupted. `model`: where it lies on this host; None: where the engine's lies on its own."""
    host_and_port(address)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the next engine is joined without importing torch again
    while True:
        # A process for each engine: what one leaves in torch must not meet the next.
        one = context.Process(target=_be_rank_once, args=(address, key, model, threads), daemon=True)
        one.start()
        one.join()
        if one.exitcode == _REFUSED:
            raise CumuloError(f"the engine at {address} refused this rank; the line above says why")


def _be_rank_once(address: str, key: str, model: str | None, threads: int | None) -> None:
    try:
        connection, rank, setup, own_host = join_door(address, key)
    except CumuloError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(_REFUSED) from error
    print(f"rank {rank} of the engine at {address}", flush=True)
    setup = replace(setup, model=model or setup.model, threads=threads or setup.threads, host=own_host)
    be_rank(connection, play_rank, rank, (setup,), setup.threads)
