"""What a sequence that waits gets from disk, and what changes when files arrive. Called by the scheduler on arrival
and by the engine's loop with the mover's news.
"""

from cumulo.engine.decide.books import Books
from cumulo.engine.decide.request import Sequence, State
from cumulo.engine.decide.tiers.choice import choose_fetch
from cumulo.engine.decide.tiers.tiers import FilesRead, FilesSeen, FileWritten, TierEvent, Tiers


def order_fetch(books: Books, sequence: Sequence, now_s: float) -> bool:
    """Have the sequence's prefix read from disk where that is sooner than computing it; True: it waits for that."""
    tiers, residency = books.residency.tiers, books.residency
    if tiers is None or not (tiers.on_disk or tiers.reading) or not books.pool.prefix_cache:
        return False
    size, story = books.config.block_size, sequence.request.story
    hashes = sequence.extend_hashes(residency.usable_blocks(sequence), size)
    device = len(books.pool.cached_prefix(hashes))
    wanted, held = list[bytes](), list[int]()
    for block_hash in hashes[device:]:
        if (block := tiers.host.find(block_hash)) is not None:
            held.append(block)
            tiers.host.touch(block_hash)
        elif block_hash in tiers.on_disk:
            wanted.append(block_hash)
        else:
            break
    if (joined := _being_read(tiers, wanted)) is not None:
        tiers.reading[joined].waiters.append(sequence)
        story.wait_for(now_s, "kv_fetch")
        return True
    waiting = sum(len(one.order.blocks) for one in tiers.reading.values())
    choice = choose_fetch(
        blocks=len(wanted), block_size=size,
        move_s_per_block=tiers.costs.disk_s_per_block + residency.costs.swap_s_per_block,
        compute_s_per_token=residency.costs.recompute_s_per_token,
        ahead_s=waiting * tiers.costs.disk_s_per_block,
    )  # fmt: skip
    if not wanted:
        return False
    tokens = len(wanted) * size
    if not choice.fetch:
        story.add(
            now_s,
            "not_fetched",
            tokens=tokens,
            fetch_ms=1e3 * choice.fetch_s,
            compute_ms=1e3 * choice.compute_s,
        )
        return False
    for block in held:  # what is here already must not make room for what comes
        tiers.host.pin(block)
    ordered = tiers.order_reading(wanted, sequence, tokens, choice.compute_s)
    for block in held:
        tiers.host.unpin(block)
    if ordered:
        story.wait_for(now_s, "kv_fetch")
    return ordered


def _being_read(tiers: Tiers, wanted: list[bytes]) -> int | None:
    """A reading under way that begins as this would."""
    for number, one in tiers.reading.items():
        if wanted and wanted[0] in one.order.hashes:
            return number
    return None


def enter_tier_event(books: Books, event: TierEvent, now_s: float) -> None:
    tiers = books.residency.tiers
    assert tiers is not None
    if isinstance(event, FileWritten):
        tiers.enter_written(event)
    elif isinstance(event, FilesSeen):
        tiers.enter_seen(event)
    else:
        _enter_read(books, tiers, event, now_s)


def _enter_read(books: Books, tiers: Tiers, event: FilesRead, now_s: float) -> None:
    reading = tiers.enter_read(event)
    size = books.config.block_size
    good = sum(event.good)
    for sequence in reading.waiters:
        if sequence.state != State.WAITING or sequence.queued:
            continue  # it has ended meanwhile
        story = sequence.request.story
        if good:
            tiers.counts.disk_hit_tokens += good * size
            story.add(
                now_s, "fetched", where="on disk", tokens=good * size, fetch_ms=1e3 * event.seconds,
                compute_ms=1e3 * reading.compute_s * good / len(event.good),
            )  # fmt: skip
        if good < len(event.good):
            story.add(now_s, "bad_files", files=len(event.good) - good)
        books.queue.push(sequence)
        story.wait_for(now_s, "behind_others")
