"""The ranks of a host that belong to an engine on another one: `cumulo serve --rank-of HOST:PORT --rank-count N`.
When that engine ends, as it does when one of its ranks fails, the next one is joined."""

import logging
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from cumulo.engine.play.rank_player import play_rank
from cumulo.errors import CumuloError
from cumulo.ranks.remote import host_and_port, join_door
from cumulo.ranks.start import be_rank

log = logging.getLogger(__name__)

_REFUSED = 3  # exit status: joining again would not help


def serve_ranks(address: str, key: str, model: str | None, threads: int | None, count: int = 1) -> None:
    """So many ranks, a process each, until it is interrupted. `model`: where it lies on this host; None: where the
    engine's lies on its own."""
    host_and_port(address)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the next engine is joined without importing torch again
    ranks: dict[int, BaseProcess] = {}  # by place: on GPUs, which of this host's it takes
    while True:
        for place in set(range(count)) - set(ranks):
            # A process for each engine: what one leaves in torch must not meet the next.
            given = (address, key, model, threads, place)
            ranks[place] = context.Process(target=_be_rank_once, args=given, daemon=True)
            ranks[place].start()
        wait([one.sentinel for one in ranks.values()])
        ended = [one for one in ranks.values() if one.exitcode is not None]
        ranks = {place: one for place, one in ranks.items() if one.exitcode is None}
        if any(one.exitcode == _REFUSED for one in ended):
            raise CumuloError(f"the engine at {address} refused this rank; the line above says why")


def _be_rank_once(address: str, key: str, model: str | None, threads: int | None, place: int) -> None:
    try:
        connection, rank, setup, own_host = join_door(address, key)
    except CumuloError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(_REFUSED) from error
    print(f"rank {rank} of the engine at {address}", flush=True)
    threads = threads or setup.threads
    setup = replace(setup, model=model or setup.model, threads=threads, host=own_host, place=place)
    be_rank(connection, play_rank, rank, (setup,), setup.threads)
