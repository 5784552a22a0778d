"""What must hold of a scheduler between any two of its calls: every block, slot and sequence is where it is said to
be, and nowhere else."""

from collections.abc import Iterable, Sequence

from cumulo.engine.decide.core.block_pool import BlockPool
from cumulo.engine.decide.core.request import State
from cumulo.engine.decide.core.scheduler import CoreScheduler
from cumulo.engine.decide.kv_tiers import HostTier, Tiers
from cumulo.engine.decide.scheduler import Scheduler


def problems(scheduler: CoreScheduler) -> list[str]:
    """Everything inconsistent; empty when all is well."""
    batch, owned, found = scheduler.batch, list[list[int]](), list[str]()
    if isinstance(scheduler, Scheduler):
        owned += [one.blocks for one in scheduler.transfers.incoming.values()]
        owned += [one.blocks for one in scheduler.prefilling.outgoing.values()]
        if scheduler.tiers is not None:
            found += tier_problems(scheduler.tiers.host, _on_their_way(scheduler.tiers))
    requests = list(batch.requests.values())
    sequences = [one for request in requests for one in request.sequences]
    seated = [one for one in sequences if one.slot >= 0]
    found += pool_problems(batch.pool, [*(one.blocks for one in seated), *owned])
    reserved = [slot for request in requests for slot in request.reserved_slots]
    slots = sorted([one.slot for one in seated] + batch.kv.free_slots + reserved)
    if slots != list(range(batch.config.max_running)):
        found.append(f"slots are lost or doubled: {slots}")
    waiting = sum(one.state == State.WAITING for one in sequences)
    if waiting != batch.queue.count:
        found.append(f"{waiting} sequences wait, {batch.queue.count} counted")
    running = sum(one.state == State.RUNNING for one in sequences)
    if running != sum(one.state == State.RUNNING for one in batch.running):
        found.append(f"{running} sequences have blocks, and the list of those that run has others")
    return found


def pool_problems(pool: BlockPool, owners: Iterable[Sequence[int]]) -> list[str]:
    """Everything wrong with a pool, given the block tables of all owners."""
    expected, found = [0] * pool.blocks, list[str]()
    for table in owners:
        for block in table:
            expected[block] += 1
        if len({pool.rank_of(block) for block in table}) > 1:
            found.append(f"a sequence's blocks lie in several ranks: {table}")
    for block, (references, owned) in enumerate(zip(pool.references, expected, strict=True)):
        if references != owned:
            found.append(f"block {block}: {references} references, {owned} owners")
        free = block in pool._free[pool.rank_of(block)]
        if (references == 0) != free:
            found.append(f"block {block}: references {references} but free={free}")
    for block_hash, block in pool.block_of.items():
        if pool.hash_of[block] != block_hash:
            found.append(f"block {block}: the hash table and the block disagree")
    if len(pool.block_of) != sum(block_hash is not None for block_hash in pool.hash_of):
        found.append("a block carries a hash that the hash table does not know")
    return found


def tier_problems(tier: HostTier, on_their_way: int) -> list[str]:
    """`on_their_way`: blocks taken that hold nothing yet."""
    held = [*tier.block_of.values(), *tier.free]
    if len(set(held)) != len(held) or len(held) + on_their_way != tier.count:
        return [f"host tier blocks are lost or doubled: {len(held)} and {on_their_way} of {tier.count}"]
    return []


def _on_their_way(tiers: Tiers) -> int:
    moved = sum(len(one.spilled) for one in tiers._moves.values())
    return moved + sum(len(one.order.blocks) for one in tiers.reading.values())
