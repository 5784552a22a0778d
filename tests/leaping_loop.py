"""An event loop whose clock leaps: for time-outs between two ends that both run in it.

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(play())

The clock stands still as long as anything happens, and leaps to the next timer when nothing does. So only who says
nothing is ever late, however busy the machine is, and nobody waits for it. Work of other threads is not seen.
"""

import asyncio
import selectors

QUIET_S = 0.02  # the kernel hands over at once what another end in this thread has sent


class _LeapingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout if timeout is None else min(timeout, QUIET_S))
        if timeout is not None and not found:
            self.now_s += max(0.0, timeout)
        return found


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now_s
