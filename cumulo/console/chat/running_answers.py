"""RunningAnswers: answers that the server is making for the console, whether or not a page is looking.

A page that is closed, reloaded or shows another conversation does not end its answer: the page that comes back
asks for it by its id. Finished answers are kept for a while, in memory only, until the browser has stored them.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from typing import Any

from cumulo.console.api_caller import ApiCaller, ApiFailure
from cumulo.console.chat.answer import ChatAnswer

_KEPT_S = 3600.0
_MOST_KEPT = 256


class RunningAnswer:
    """One answer and the task that makes it. `version` grows with every event."""

    def __init__(self, owner: str) -> None:
        self.id = secrets.token_hex(12)
        self.owner = owner
        self.answer = ChatAnswer()
        self.done = False
        self.refused = False  # it was never begun: the question can be asked again as it stands
        self.ended_s = 0.0
        self.version = 0
        self._hang_up = asyncio.Event()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # held: a task nobody holds may be collected

    def begin(self, api: ApiCaller, body: dict[str, Any]) -> None:
        self._task = asyncio.create_task(self._run(api, body))

    def stop(self) -> None:
        self._hang_up.set()

    async def news(self, seen_version: int) -> None:
        """Wait until there is more than what was seen."""
        while self.version == seen_version and not self.done:
            await self._news.wait()

    async def _run(self, api: ApiCaller, body: dict[str, Any]) -> None:
        try:
            async for event in api.stream("/v1/chat/completions", body, self._hang_up):
                self.answer.add_event(event)
                self._tell()
        except ApiFailure as failure:
            self.answer.problem = str(failure)
            self.refused = self.answer.said_nothing
        except Exception:
            self.answer.problem = "the server failed on this request; its log says more"
            raise
        finally:
            self.done, self.ended_s = True, time.monotonic()
            self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()


class RunningAnswers:
    def __init__(self) -> None:
        self._answers: OrderedDict[str, RunningAnswer] = OrderedDict()

    def begin(self, owner: str, api: ApiCaller, body: dict[str, Any]) -> RunningAnswer:
        self._forget_old()
        running = RunningAnswer(owner)
        self._answers[running.id] = running
        running.begin(api, body)
        return running

    def get(self, owner: str, answer_id: str) -> RunningAnswer | None:
        running = self._answers.get(answer_id)
        return running if running is not None and running.owner == owner else None

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        ended = [one for one in self._answers.values() if one.done]
        excess = len(self._answers) - _MOST_KEPT
        for position, one in enumerate(ended):
            if position < excess or now_s - one.ended_s > _KEPT_S:
                del self._answers[one.id]
