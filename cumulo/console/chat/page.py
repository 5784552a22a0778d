"""The chat page, `/`: conversations that the browser keeps, answers that need no open page, settings."""

import asyncio
import contextlib
from functools import partial
from typing import Any

from fastapi import FastAPI
from nicegui import background_tasks, ui
from starlette.requests import Request

from cumulo.console.chat.answer_view import AnswerActions, AnswerView, Results
from cumulo.console.chat.ask_box import AskBox, Shortcuts
from cumulo.console.chat.conversation import Conversation, Entry
from cumulo.console.chat.history import BrowserStore, HistoryActions, HistoryPanel
from cumulo.console.chat.running_answers import ApiCaller, RunningAnswer, RunningAnswers
from cumulo.console.chat.settings import SettingsPanel, ToolsProblem
from cumulo.console.chat.thread_view import StoryPanel, ThreadView
from cumulo.console.front import Visitor
from cumulo.console.shell import Shell

_REDRAW_S = 0.1  # a page is redrawn at most this often, however fast the tokens come
_STATUS_S = 1.0
_LOST = "The server no longer has this answer: it was restarted, or more than an hour has passed."


def register(shell: Shell, app: FastAPI) -> None:
    answers = RunningAnswers()

    @ui.page("/", title="Chat · Cumulo")
    async def chat(request: Request) -> None:
        with shell.page(request, "/") as visitor:
            api = ApiCaller(app, visitor.key, request.headers.get("host", "localhost"))
            page = Chat(shell, visitor, api, answers)
            shell.clock(visitor, _STATUS_S, page.tick)
        await ui.context.client.connected()
        await page.begin()


class Chat:
    """One page: the conversation it shows, and the answer it follows, if one is being made."""

    def __init__(self, shell: Shell, visitor: Visitor, api: ApiCaller, answers: RunningAnswers) -> None:
        self._shell, self._visitor, self._api, self._answers = shell, visitor, api, answers
        self._client = ui.context.client
        self._store = BrowserStore(visitor.name)
        self._conversation = Conversation()
        self._running: RunningAnswer | None = None
        self._begun = asyncio.Event()
        self._info: object = None  # the engine whose recommendations are shown
        history = HistoryActions(self.new, self.open, self._renamed, self._deleted)
        self._history = HistoryPanel(self._store, history)
        with ui.element("section").classes("talk"):
            with ui.element("div").classes("talk-bar only-narrow"):
                ui.button("Chats", icon="menu", on_click=self._history.open).props(_FLAT).classes("quiet")
                open_settings = ui.button("Settings", icon="tune").props(_FLAT).classes("quiet")
            model = shell.service.model_name
            answer = AnswerActions(model, self._open_story, self.regenerate, self.send_results)
            self._thread = ThreadView(self.resend, self.delete_turn, answer)
            self._ask = AskBox(self.send, self.stop)
        with ui.element("aside").classes("settings").props('aria-label="Settings"') as panel:
            self._settings = SettingsPanel(
                partial(self._store.tell, "keep"), close=lambda: panel.classes(remove="open")
            )
        open_settings.on_click(lambda: panel.classes(add="open"))
        self._story = StoryPanel(shell, visitor)
        Shortcuts({"new": self.new, "stop": self._escape, "regenerate": self.regenerate})
        self._thread.draw(self._conversation)

    async def begin(self) -> None:
        """Take up what the browser kept: the conversation of this tab, and its answer if it is under way."""
        try:
            with contextlib.suppress(TimeoutError):  # a browser that stores nothing can still chat
                stored = await self._store.ask("begin", self._store.scope)
                self._settings.restore(stored["presets"], stored["settings"])
                kept = Conversation.from_stored(stored["current"])
                if kept is not None:
                    self._show(kept)
                self._history.draw(stored["chats"], self._conversation.id)
        finally:
            self._begun.set()

    async def tick(self) -> None:
        engine = self._shell.service.engine
        self._ask.set_status("" if engine.state == "ready" else self._shell.engine_status())
        if engine.info is not None and engine.info is not self._info:
            self._info = engine.info
            self._settings.show_effective(engine.info.generation_defaults)
        self._settings.show_models(self._shell.service.model_name, [*self._shell.service.adapters.served])

    # -- what the buttons do ------------------------------------------------------------------------------
    async def send(self, text: str) -> None:
        await self._begun.wait()
        if self._running is not None or not (text or self._ask.files):
            return
        place, files = len(self._conversation.entries), self._ask.files
        self._conversation.say(text, files)
        self._ask.empty()
        await self._answer(place, [], text, files)

    async def resend(self, index: int, text: str) -> None:
        """An edited message is asked instead of the old one; what followed it is dropped."""
        if self._running is not None or not text.strip():
            return
        entries = self._conversation.entries
        replaced, files = entries[index:], entries[index].get("files", [])
        del entries[index:]
        self._conversation.say(text.strip(), files)
        await self._answer(index, replaced, text.strip(), [])

    async def regenerate(self) -> None:
        """Another answer instead of the last one."""
        entries = self._conversation.entries
        if self._running is not None or not entries:
            return
        place = len(entries) - (entries[-1]["role"] == "assistant")
        replaced = entries[place:]
        del entries[place:]
        await self._answer(place, replaced)

    async def send_results(self, results: Results) -> None:
        """What tools returned, typed in by the person; the model goes on from there."""
        if self._running is None:
            place = len(self._conversation.entries)
            self._conversation.entries.extend(results)
            await self._answer(place, [])

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def _escape(self) -> None:
        """What the Esc key does: an open story is closed first."""
        if not self._story.close():
            self.stop()

    async def delete_turn(self, index: int) -> None:
        if self._running is None:
            self._conversation.delete_turn(index)
            self._thread.draw(self._conversation)
            await self._save()

    async def new(self) -> None:
        self._show(Conversation())
        await self._history.show_current(self._conversation.id)
        self._client.run_javascript("document.querySelector('.ask textarea').focus()")

    async def open(self, chat_id: str) -> None:
        kept = await self._store.load(chat_id)
        if kept is not None:
            self._show(kept)
            await self._history.show_current(chat_id)

    def _renamed(self, chat_id: str, title: str) -> None:
        if chat_id == self._conversation.id:
            self._conversation.title = title

    async def _deleted(self, chat_id: str) -> None:
        if chat_id == self._conversation.id:
            self.stop()
            await self.new()

    def _open_story(self, request_id: str) -> None:
        self._story.open(request_id)

    # -- the conversation ---------------------------------------------------------------------------------
    def _show(self, conversation: Conversation) -> None:
        """Show a conversation; an answer of the one shown before goes on unseen."""
        self._conversation, self._running = conversation, None
        self._store.tell("stay", conversation.id)
        self._story.close()
        self._ask.complain("")
        last = conversation.entries[-1] if conversation.entries else {}
        running = self._answers.get(self._visitor.name, str(last.get("pending", "")))
        if "pending" in last and running is None:
            conversation.entries[-1] = {"role": "assistant", "content": "", "about": {"problem": _LOST}}
            background_tasks.create(self._save())
        view = self._thread.draw(conversation)
        self._ask.set_running(running is not None)
        if running is not None and view is not None:
            self._running = running
            background_tasks.create(self._follow(running, view, conversation))

    async def _answer(
        self, place: int, replaced: list[Entry], asked: str = "", files: list[dict[str, str]] | None = None
    ) -> None:
        """Ask for the next entry. If it is refused, the entries from `place` on become `replaced` again, and
        what was `asked` goes back to where it was written."""
        conversation = self._conversation
        self._ask.complain("")
        undo = {"place": place, "replaced": replaced, "asked": asked, "files": files or []}
        try:
            body = self._settings.request(self._shell.service.model_name, conversation.messages())
        except ToolsProblem as problem:
            self._undo(conversation, undo, f"The tools cannot be used: {problem}")
            return
        running = self._running = self._answers.begin(self._visitor.name, self._api, body)
        conversation.entries.append({"role": "assistant", "content": "", "pending": running.id, "undo": undo})
        view = self._thread.draw(conversation)
        assert view is not None
        self._ask.set_running(True)
        self._store.tell("stay", conversation.id)
        background_tasks.create(self._follow(running, view, conversation))
        await self._save()

    async def _follow(self, running: RunningAnswer, view: AnswerView, conversation: Conversation) -> None:
        """Draw an answer while it comes, as long as this page shows its conversation."""
        seen = -1
        with self._client:
            while not running.done:
                await running.news(seen)
                seen = running.version
                if self._running is not running or self._client.is_deleted:
                    return
                view.grow(running.answer)
                self._thread.look_down()
                if not running.done:
                    await asyncio.sleep(_REDRAW_S)
            if self._running is not running or self._client.is_deleted:
                return
            self._running = None
            self._ask.set_running(False)
            pending = conversation.entries.pop()
            if running.refused:
                self._undo(conversation, pending.get("undo", {}), str(running.answer.problem))
            else:
                running.answer.take_times(self._shell.service.stories.of_call(running.answer.request_id))
                conversation.entries.append(running.answer.entry())
                view.finish(running.answer, is_last=True, results=None)
                self._thread.look_down()
            await self._save()

    def _undo(self, conversation: Conversation, undo: dict[str, Any], problem: str) -> None:
        place = int(undo.get("place", len(conversation.entries)))
        conversation.entries[place:] = list(undo.get("replaced", []))
        self._thread.draw(conversation)
        if undo.get("asked") or undo.get("files"):
            self._ask.put_back(str(undo.get("asked", "")), list(undo.get("files", [])), problem)
        else:
            self._ask.complain(problem)

    async def _save(self) -> None:
        """Keep the conversation in the browser. A page that has just gone cannot; the one that comes back will."""
        with contextlib.suppress(TimeoutError):
            if self._conversation.entries:
                if not await self._store.ask("save", self._conversation.stored()):
                    self._ask.complain("This browser has no room to keep the conversation; export it.")
            else:
                await self._store.ask("remove", self._conversation.id)
            await self._history.show_current(self._conversation.id)


_FLAT = "flat dense no-caps"
