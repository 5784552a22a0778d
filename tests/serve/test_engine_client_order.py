"""What the observer of an EngineClient is told, and in which order."""

import asyncio

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.story import Story
from cumulo.engine.outputs import Delta
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_settings import EngineSettings
from cumulo.serve.engine_link.in_flight import Inbox, InFlight
from cumulo.serve.engine_link.messages import EngineProgress, Failure, Finished, Stats, Submit


class Noting:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_progress(self, stats: Stats) -> None:
        self.seen.append(f"step {stats.steps}")

    def on_delta(self, request: InFlight, delta: Delta, now_s: float) -> None:
        self.seen.append(delta.text)

    def on_end(self, request: InFlight, end: Finished | Failure) -> None:
        self.seen.append("end")


def progress(step: int, text: str, finished: list[Finished]) -> EngineProgress:
    return EngineProgress(Stats(step, 1, 1, 0, 0, 1, 0, 0), [Delta("r", 0, text, [step])], finished)


def test_all_tokens_are_told_before_the_end_when_two_reports_come_at_once() -> None:
    """A loop may call a socket's reader before what was put off with call_soon: uvloop does."""

    async def told() -> list[str]:
        observer = Noting()
        client = EngineClient(EngineSettings(), observer)
        try:
            client.in_flight["r"] = InFlight(Submit("r", b"", SamplingParams(), True), Inbox(), 0)
            client.take_report(progress(1, "A", []))
            client.take_report(progress(2, "B", [Finished("r", [], Story(arrived_s=0.0))]))
            async with asyncio.timeout(60):
                while "end" not in observer.seen or "step 2" not in observer.seen:
                    await asyncio.sleep(0)
        finally:
            await client.close()
        return observer.seen

    seen = asyncio.run(told())
    assert [word for word in seen if not word.startswith("step")] == ["A", "B", "end"]
    assert [word for word in seen if word.startswith("step")] == ["step 1", "step 2"]
