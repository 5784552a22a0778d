"""The chat page, `/`: conversations that the browser keeps, answers that need no open page, settings."""

import asyncio
import contextlib
import secrets
import time
from functools import partial
from typing import Any

from fastapi import FastAPI
from nicegui import background_tasks, ui
from starlette.requests import Request

from cumulo.console.chat.answer import ChatAnswer
from cumulo.console.chat.answer_view import AnswerActions, AnswerView, Results
from cumulo.console.chat.ask_box import AskBox, Shortcuts
from cumulo.console.chat.context import ContextView
from cumulo.console.chat.conversation import Conversation, Entry, user_entry
from cumulo.console.chat.history import BrowserStore, HistoryActions, HistoryPanel
from cumulo.console.chat.running_answers import ApiCaller, RunningAnswer, RunningAnswers
from cumulo.console.chat.settings import SettingsPanel, SettingsProblem
from cumulo.console.chat.thread_view import StoryPanel, ThreadView
from cumulo.console.front import Visitor
from cumulo.console.shell import Shell
from cumulo.models.text.chat_window import summary_requests, summary_tokens
from cumulo.serve.service import Service

_REDRAW_S = 0.1  # a page is redrawn at most this often, however fast the tokens come
_STATUS_S = 1.0
_KEEP_S = 2.0  # between two times that the browser stores a growing answer
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
    """One page: the conversation it shows, and the answers it follows while they are made."""

    def __init__(self, shell: Shell, visitor: Visitor, api: ApiCaller, answers: RunningAnswers) -> None:
        self._shell, self._visitor, self._api, self._answers = shell, visitor, api, answers
        self._client = ui.context.client
        self._store = BrowserStore(visitor.name)
        self._conversation = Conversation()
        # Of this conversation; while there are some, it is not changed.
        self._running: list[RunningAnswer] = []
        self._begun = asyncio.Event()
        self._info: object = None  # the engine whose recommendations are shown
        self._doing = ""  # what the page itself does
        self._put_back = False  # whether a refused message is where it was written
        history = HistoryActions(self.new, self.open, self._renamed, self._deleted)
        self._history = HistoryPanel(self._store, history)
        with ui.element("section").classes("talk"):
            with ui.element("div").classes("talk-bar only-narrow"):
                ui.button("Chats", icon="menu", on_click=self._history.open).props(_FLAT).classes("quiet")
                open_settings = ui.button("Settings", icon="tune").props(_FLAT).classes("quiet")
            answer = AnswerActions(
                shell.service.model_name, lambda request_id: self._story.open(request_id), self.regenerate,
                self.resume, self.choose, self.send_results,
            )  # fmt: skip
            self._thread = ThreadView(self.send, self.resend, self.delete_turn, answer)
            self._ask = AskBox(
                self.send, self.stop, self._unqueue, self._count_tokens, lambda: self._context.context
            )
            self._context = ContextView(lambda: self._service, self.summarize, self._thread.mark)
        with ui.element("aside").classes("settings").props('aria-label="Settings"') as panel:
            self._settings = SettingsPanel(self._keep, close=lambda: panel.classes(remove="open"))
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
                if stored["draft"]:
                    self._ask.put_back(stored["draft"], [], "")
                kept = await self._store.load(stored["current"]) if stored["current"] else None
                if kept is not None:
                    self._show(kept)
                self._history.draw(stored["chats"], self._conversation.id)
        finally:
            self._begun.set()

    @property
    def _service(self) -> Service:
        """The service of the chosen model; while that has not been loaded, the first model's."""
        row = self._shell.models.rows.get(self._settings.model or "")
        return row.service if row is not None and row.service is not None else self._shell.service

    def _count_tokens(self, text: str) -> int:
        return len(self._service.text.tokenizer.encode(text))

    async def tick(self) -> None:
        service = self._service
        engine = service.engine
        self._ask.set_status(self._doing if service.takes_requests else self._shell.engine_status(service))
        if engine.info is not None and engine.info is not self._info:
            self._info = engine.info
            self._settings.show_effective(engine.info.generation_defaults)
            self._show_context()
        models, adapters = [*self._shell.models.listed], [*self._shell.service.adapters.served]
        self._settings.show_models(models, adapters)

    # -- what the buttons do ------------------------------------------------------------------------------
    async def send(self, text: str) -> None:
        await self._begun.wait()
        queued = self._conversation.queued
        if text or self._ask.files:
            # What was put back when it was refused was said before all that wait.
            queued.insert(0 if self._put_back else len(queued), user_entry(text, self._ask.files))
            self._ask.empty()
        self._put_back = False
        if self._running:
            self._ask.show_queued(queued)
            await self._save()
        else:
            await self._say_next()

    async def _say_next(self) -> None:
        if self._conversation.queued:
            self._conversation.add(self._conversation.queued.pop(0))
            self._ask.show_queued(self._conversation.queued)
            await self._answer()

    async def _unqueue(self, entry: Entry) -> None:
        self._conversation.queued = [one for one in self._conversation.queued if one is not entry]
        self._ask.show_queued(self._conversation.queued)
        await self._save()

    async def resend(self, entry: Entry, text: str) -> None:
        """An edited message is asked on a branch of its own; the old one stays."""
        if not self._running and text.strip():
            self._conversation.add(user_entry(text.strip(), entry.get("files")), entry["parent"])
            await self._answer()

    async def regenerate(self) -> None:
        """Another answer to the last question; the one before stays."""
        entries = self._conversation.entries
        if self._running or not entries:
            return
        if entries[-1]["role"] == "assistant":
            self._conversation.leaf = entries[-1]["parent"]
        await self._answer()

    async def resume(self) -> None:
        """Go on with the last answer where it ended."""
        entries = self._conversation.entries
        if not self._running and entries and entries[-1]["role"] == "assistant":
            await self._answer(entries[-1])

    async def send_results(self, results: Results) -> None:
        """What tools returned, typed in by the person; the model goes on from there."""
        if not self._running:
            for one in results:
                self._conversation.add(one)
            await self._answer()

    async def choose(self, entry: Entry) -> None:
        """Show another version of a message or an answer, with what followed it."""
        if not self._running:
            self._conversation.choose(entry)
            self._draw()
            await self._save()

    def stop(self) -> None:
        for running in self._running:
            running.stop()

    def _escape(self) -> None:
        """What the Esc key does: an open story is closed first."""
        if not self._story.close():
            self.stop()

    async def delete_turn(self, entry: Entry) -> None:
        if not self._running:
            self._conversation.delete_turn(entry)
            self._draw()
            await self._save()

    async def summarize(self) -> None:
        """The model writes what is sent instead of the turns that are left out, or of all but the newest."""
        conversation, context = self._conversation, self._context.context
        starts, asked = conversation.turn_starts(), self._asked()
        if self._running or len(starts) < 2 or not context:
            return
        window = await self._context.window(conversation, self._settings.system, asked)
        newest = conversation.entries[starts[window.first or len(starts) - 1]]
        older = conversation.branch(newest["parent"]).messages()
        requests = summary_requests(self._context.counter, older, context, conversation.summary)
        model = self._service.model_name
        body = {"model": model, "stream": True, "max_tokens": summary_tokens(context)}
        self._doing = "The older turns are being summarized."
        self._ask.set_status(self._doing)
        try:
            messages = next(requests)
            while True:
                running = self._answers.begin(self._visitor.name, self._api, body | {"messages": messages})
                self._running = [running]
                self._ask.set_running(True)
                while not running.done:
                    await running.news(running.version)
                if running.answer.problem or not running.answer.finish_reason:
                    self._ask.complain(running.answer.problem or "There is no summary: it was stopped.")
                    return
                messages = requests.send(running.answer.text)
        except StopIteration as end:
            newest["summary"] = str(end.value)
            if running.answer.finish_reason == "length":
                self._ask.complain(f"The summary was cut at {summary_tokens(context)} tokens.")
        finally:
            self._doing, self._running = "", []
            self._ask.set_running(False)
            self._ask.set_status("")
        if self._conversation is conversation:
            self._draw()
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

    # -- the conversation ---------------------------------------------------------------------------------
    def _show(self, conversation: Conversation) -> None:
        """Show a conversation; an answer of the one shown before goes on unseen."""
        self._conversation, self._running = conversation, []
        self._store.tell("stay", conversation.id)
        self._story.close()
        self._ask.complain("")
        pending = [entry for entry in conversation.nodes if "pending" in entry]
        found = {}
        for entry in pending:
            running = self._answers.get(self._visitor.name, str(entry["pending"]))
            if running is None:
                entry.pop("pending")
                entry["about"] = {**entry.get("about", {}), "problem": _LOST}
                background_tasks.create(self._save())
            else:
                found[running] = entry
        self._follow_all(found)

    def _draw(self) -> dict[str, AnswerView]:
        views = self._thread.draw(self._conversation)
        self._show_context()
        return views

    def _show_context(self) -> None:
        self._context.refresh(self._conversation, self._settings.system, self._asked())

    def _asked(self) -> dict[str, Any]:
        try:
            return self._settings.request(self._shell.service.model_name)
        except SettingsProblem:
            return {}

    def _keep(self, kind: str, value: Any) -> None:
        """A setting was changed: the browser keeps it, and the prompt may have another length now."""
        self._store.tell("keep", kind, value)
        self._show_context()

    async def _answer(self, continued: Entry | None = None) -> None:
        """Ask for the next entry, or for more of the last one. If that is refused, what was said for it alone is
        taken out again; a question goes back to where it was written."""
        conversation, system = self._conversation, self._settings.system
        self._ask.complain("")
        try:
            body = self._settings.request(self._shell.service.model_name)
        except SettingsProblem as problem:
            self._take_back(conversation, None, str(problem))
            return
        if continued is not None:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        find = partial(self._context.fit, conversation.branch(), system, body)
        beside = self._settings.beside if continued is None else None
        parent, compared = conversation.leaf, secrets.token_hex(4)
        found: dict[RunningAnswer, Entry] = {}
        for model in (body["model"], beside) if beside else (body["model"],):
            answer = ChatAnswer.from_entry(continued).continued() if continued is not None else None
            asked = body | {"model": model}
            running = self._answers.begin(self._visitor.name, self._api, asked, find, answer)
            entry = continued
            if entry is None:
                entry = conversation.add({"role": "assistant", "content": ""}, parent)
                entry |= {"beside": compared} if beside else {}
            entry["pending"] = running.id
            found[running] = entry
        conversation.leaf = conversation.place(next(iter(found.values())))
        self._store.tell("stay", conversation.id)
        self._follow_all(found)
        await self._save()

    def _follow_all(self, found: dict[RunningAnswer, Entry]) -> None:
        self._running = list(found)
        views = self._draw()
        self._ask.set_running(bool(found))
        self._ask.show_queued(self._conversation.queued)
        for running, entry in found.items():
            view = views.get(running.id)
            background_tasks.create(self._follow(running, view, entry, self._conversation))

    async def _follow(
        self, running: RunningAnswer, view: AnswerView | None, entry: Entry, conversation: Conversation
    ) -> None:
        """Draw an answer while it comes, as long as this page shows its conversation."""
        seen, kept_s = -1, time.monotonic()
        with self._client:
            while not running.done:
                await running.news(seen)
                seen = running.version
                if running not in self._running or self._client.is_deleted:
                    return
                if view is not None:
                    view.grow(running.answer)
                    self._thread.look_down()
                if not running.done:
                    if time.monotonic() > kept_s + _KEEP_S and not running.answer.said_nothing:
                        self._store.tell("grow", conversation.id, running.id, running.answer.entry())
                        kept_s = time.monotonic()
                    await asyncio.sleep(_REDRAW_S)
            if running not in self._running or self._client.is_deleted:
                return
            self._running.remove(running)
            self._ask.set_running(bool(self._running))
            self._end(running, view, entry, conversation)
            self._show_context()
            await self._save()
            if not self._running and not running.refused:
                await self._say_next()

    def _end(
        self, running: RunningAnswer, view: AnswerView | None, entry: Entry, conversation: Conversation
    ) -> None:
        entry.pop("pending")
        if running.refused and "about" in entry:  # it was to be continued, and stays as it was
            self._draw()
            self._ask.complain(str(running.answer.problem))
        elif running.refused and "beside" not in entry:
            self._take_back(conversation, entry, str(running.answer.problem))
        else:
            running.answer.take_times(self._shell.service.stories.of_call(running.answer.request_id))
            entry.update(running.answer.entry())
            if view is not None:
                self._thread.finish(entry, running.answer, view)
                self._thread.look_down()

    def _take_back(self, conversation: Conversation, answer: Entry | None, problem: str) -> None:
        taken = conversation.take_back(answer)
        question = next((entry for entry in taken if entry["role"] == "user"), None)
        self._draw()
        if question is not None:
            self._put_back = True
            self._ask.put_back(question["content"], question.get("files", []), problem)
        else:
            self._ask.complain(problem)

    async def _save(self) -> None:
        """Keep the conversation in the browser. A page that has just gone cannot; the one that comes back will."""
        with contextlib.suppress(TimeoutError):
            if self._conversation.nodes:
                stored = self._conversation.stored()
                if not await self._store.ask("save", stored):
                    self._ask.complain("This browser has no room to keep the conversation; export it.")
                elif (lost := len(self._conversation.nodes) - len(stored["entries"])) > 0:
                    self._ask.complain(
                        f"This conversation is too long to be kept whole: without its {lost} oldest messages and "
                        "other versions it comes back after a reload."
                    )
            else:
                await self._store.ask("remove", self._conversation.id)
            await self._history.show_current(self._conversation.id)


_FLAT = "flat dense no-caps"
