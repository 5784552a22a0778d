"""What several engines say, put together as if one engine said it. Called by Fleet."""

from collections.abc import Sequence

import msgspec

from cumulo.serve.engine_link.messages import BlockMap, FairnessReport, Ready, Stats, TierStats


def merged_stats(reports: Sequence[Stats], news: Stats | None = None) -> Stats | None:
    """The sums; None where there is no report. `news`: the report whose steps nobody has been told yet."""
    if not reports:
        return None
    return Stats(
        steps=sum(one.steps for one in reports),
        received=sum(one.received for one in reports),
        running=sum(one.running for one in reports),
        waiting=sum(one.waiting for one in reports),
        blocks_used=sum(one.blocks_used for one in reports),
        blocks_total=sum(one.blocks_total for one in reports),
        blocks_cached=sum(one.blocks_cached for one in reports),
        evictions=sum(one.evictions for one in reports),
        guides_checked=sum(one.guides_checked for one in reports),
        records=news.records if news is not None else [],
        fairness=news.fairness if news is not None else None,
        tiers=merged_tiers([one.tiers for one in reports if one.tiers is not None]),
    )


def merged_tiers(reports: Sequence[TierStats]) -> TierStats | None:
    """The sums; what is on disk is all engines' together."""
    if not reports:
        return None
    shared = {"disk_blocks", "disk_bytes"}
    return TierStats(
        *(
            (max if name in shared else sum)(getattr(one, name) for one in reports)
            for name in TierStats.__struct_fields__
        )
    )


def with_worst_index(report: FairnessReport, indices: Sequence[float]) -> FairnessReport:
    """Each engine is fair by itself; the fleet is as fair as its least fair engine."""
    return FairnessReport(min([report.index, *indices]), report.served)


def merged_blocks(maps: Sequence[BlockMap]) -> BlockMap:
    """One map after the other."""
    owners: list[str] = []
    owner_of: list[int] = []
    for one in maps:
        first = len(owners)
        owners += one.owners
        owner_of += [owner + first if owner >= 0 else -1 for owner in one.owner_of]
    return BlockMap(owners, owner_of, b"".join(one.cached for one in maps))


def merged_info(fleet: Ready | None, replica: Ready) -> Ready:
    """What is true of all: the context that the smallest KV cache holds."""
    if fleet is None or replica.max_context >= fleet.max_context:
        return fleet or replica
    return msgspec.structs.replace(fleet, max_context=replica.max_context)


def unlike(fleet: Ready, replica: Ready) -> str:
    """How a replica's model differs, so that it cannot continue what others began; empty: it does not."""
    for name, what in (
        ("model_name", "another model"),
        ("vocab_size", "another vocabulary"),
        ("eos_ids", "other end tokens"),
        ("block_size", "another block size"),
    ):
        ours, theirs = getattr(fleet, name), getattr(replica, name)
        if ours != theirs:
            return f"has {what} than the fleet ({theirs}, not {ours}); restart the server"
    return ""


def lacks_adapter(replica: Ready) -> str:
    """Which adapter a replica could not load, so that it cannot take all requests; empty: it has all."""
    return next((f"could not load an adapter: {one.error}" for one in replica.adapters if one.error), "")
