"""Scheduler: decides what every step computes. Called by the engine loop; its plans are played by any Runner.

It is the core with all extensions. An extension that is left out here is missed by nobody: its feature is gone, and
the rest works as before. At each point of a step they are called in the order of the list below.
"""

from cumulo.engine.decide.adapters import AdapterSlots
from cumulo.engine.decide.beams import Beams
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import Extension
from cumulo.engine.decide.core.scheduler import CoreScheduler
from cumulo.engine.decide.kv_tiers import Tiers
from cumulo.engine.decide.sharing.queue import TenantQueue
from cumulo.engine.decide.sharing.steps import Sharing
from cumulo.engine.decide.sharing.tenants import FairShares
from cumulo.engine.decide.slo import SloScheduling
from cumulo.engine.decide.speculation.policy import Speculation
from cumulo.engine.decide.speculation.rounds import RoundPolicy
from cumulo.engine.decide.transfer.handover import Handover


class Scheduler(CoreScheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        self.shares = FairShares()
        queue = TenantQueue(self.shares)
        super().__init__(config, queue)
        batch = self.batch
        self.speculation: Speculation | RoundPolicy | None = None
        if config.speculate == "rounds":
            self.speculation = RoundPolicy(batch)
        elif config.speculate:
            self.speculation = Speculation(batch, by_model=config.speculate == "model")
        self.sharing = Sharing(batch, self.shares, queue)
        self.slo = SloScheduling(batch, self.sharing)
        self.tiers = Tiers(batch) if config.tier_blocks else None
        self.adapters = AdapterSlots(config.max_loras)
        self.handover = Handover(batch, self.adapters)
        self.transfers = self.handover.transfers
        extensions: tuple[Extension | None, ...] = (
            self.speculation,
            self.slo,
            self.tiers,
            self.handover,
            self.sharing,
            self.adapters,
            Beams(batch),
        )
        self.extend(one for one in extensions if one is not None)
