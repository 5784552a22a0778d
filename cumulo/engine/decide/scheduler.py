"""Scheduler: decides what every step computes. Called by the engine loop; its plans are played by any Runner.

It is the core with all extensions. An extension that is left out here is missed by nobody: its feature is gone, and
the rest works as before. At each point of a step they are called in the order of the list below.
"""

from typing import Any

from cumulo.engine.decide.adapters import AdapterSlots
from cumulo.engine.decide.beams import Beams
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import Extension
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.core.scheduler import CoreScheduler
from cumulo.engine.decide.kv_tiers import Tiers
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.sharing.queue import TenantQueue
from cumulo.engine.decide.sharing.steps import Sharing
from cumulo.engine.decide.sharing.tenants import FairShares
from cumulo.engine.decide.slo import SloScheduling
from cumulo.engine.decide.speculation.accepted import Accepted
from cumulo.engine.decide.speculation.policy import Speculation
from cumulo.engine.decide.speculation.rounds import RoundPolicy
from cumulo.engine.decide.transfer.orders import ComputeOrder, OrderFailed
from cumulo.engine.decide.transfer.prefilling import Outgoing, Prefilling
from cumulo.engine.decide.transfer.transfers import Transfers
from cumulo.errors import InvalidRequest

_NOTHING_DRAWN = SamplingParams(max_tokens=1, temperature=0)


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
        self.transfers = Transfers(batch, self.adapters)
        self.prefilling = Prefilling(batch)
        extensions: tuple[Extension | None, ...] = (
            Accepted(batch),
            self.speculation,
            self.slo,
            self.tiers,
            self.transfers,
            self.prefilling,
            self.sharing,
            self.adapters,
            Beams(batch),
        )
        self.extend(one for one in extensions if one is not None)

    @property
    def transferring(self) -> bool:
        """Whether blocks are held for transfers, of whichever side."""
        return bool(self.transfers.incoming or self.prefilling.outgoing)

    def take_order(self, key: str, order: ComputeOrder, now_s: float, tag: Any = None) -> bool:
        """Queue what a decode engine orders, under this key, or answer why it can never run."""
        try:
            request = Request(
                key, order.tokens, _NOTHING_DRAWN, seed=0, priority=order.priority, cache_salt=order.cache_salt,
                tenant=order.tenant, arrived_s=now_s, tag=tag,
                adapter=self.adapters.of_print(order.adapter).slot if order.adapter else -1,
            )  # fmt: skip
            request.prefill_only = True
            self.add(request)
        except InvalidRequest as error:
            self.prefilling.answers.append((key, OrderFailed(order.number, str(error))))
            return False
        self.prefilling.outgoing[key] = Outgoing(request.sequences[0], order.number)
        return True
