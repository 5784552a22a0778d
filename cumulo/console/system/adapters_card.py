"""The adapters of a server on the system page: what is loaded and who uses it, and for operators a way to load and
drop them."""

from html import escape

from nicegui import ui

from cumulo.console.sessions import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.errors import CumuloError
from cumulo.serve.adapter_registry import ServedAdapter

_COLUMNS = (  # name, tooltip
    ("adapter", "What requests call it, as their model."),
    ("rank", "Rank of its matrices."),
    ("folder", "Where the server read it."),
    ("running", "Requests that use it now."),
    ("requests", "Requests that were answered with it."),
    ("state", "loading, loaded, finishing its last requests, or lost."),
)
_NO_ROOM = (
    "Start the server with --lora NAME=DIR or --max-loras 8 to serve low-rank adapters next to the model."
)
_NONE = "Load one below, or with POST /v1/load_lora_adapter. Requests name it as their model."


def adapters_html(adapters: list[ServedAdapter], most: int, may_operate: bool) -> str:
    title = f"<h2>Adapters ({len(adapters)} of {most})</h2>"
    if not adapters:
        return title + empty("No adapter is loaded", _NONE if most else _NO_ROOM)
    head = "".join(f'<th title="{tip}">{name}</th>' for name, tip in _COLUMNS) + (
        "<th></th>" if may_operate else ""
    )
    rows = "".join(_row(adapter, may_operate) for adapter in adapters)
    return f'{title}<table class="plain fleet"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(adapter: ServedAdapter, may_operate: bool) -> str:
    name = escape(adapter.name, quote=True)
    state = "finishing its last requests" if adapter.dropped else "loaded" if adapter.ready else "loading"
    if adapter.error:
        state = f"lost: {escape(adapter.error)}"
    cells = (name, adapter.rank or "", escape(adapter.folder), adapter.calls, f"{adapter.answered:,}", state)
    shown = "".join(f'<td class="small">{cell}</td>' for cell in cells)
    if not may_operate:
        return f"<tr>{shown}</tr>"
    # A name has only letters, digits and . _ : / - (AdapterRegistry.put).
    button = (
        f"<button aria-label=\"Drop {name}\" onclick=\"emitEvent('drop_adapter', ['{name}'])\">Drop</button>"
    )
    shown_button = button if adapter.ready and not adapter.dropped else ""
    return f'<tr>{shown}<td class="actions">{shown_button}</td></tr>'


class AdaptersCard:
    def __init__(self, shell: Shell, visitor: Visitor) -> None:
        self._shell, self._visitor = shell, visitor
        self._table = show("", "card")
        if visitor.may_operate and shell.service.adapters.most:
            with ui.element("div").classes("filters"):
                self._name = ui.input("Name").props("outlined dense")
                self._name.tooltip("What requests call the adapter, as their model.")
                self._folder = ui.input("Folder on the server").props("outlined dense")
                self._folder.tooltip("A folder in PEFT's layout, as `cumulo train` and peft write it.")
                button = ui.button("Load adapter", icon="add", on_click=self._load)
                button.props("flat dense no-caps").classes("quiet")
        ui.on("drop_adapter", lambda event: self._drop(str(event.args[0])))
        self.draw()

    def draw(self) -> None:
        registry = self._shell.service.adapters
        self._table.set_content(
            adapters_html(list(registry.all.values()), registry.most, self._visitor.may_operate)
        )

    async def _load(self) -> None:
        if not self._may():
            return
        name, folder = str(self._name.value or "").strip(), str(self._folder.value or "").strip()
        try:
            await self._shell.service.load_adapter(name, folder)
            ui.notify(f"{name} is loaded", position="top")
            self._name.set_value("")
            self._folder.set_value("")
        except CumuloError as error:
            ui.notify(str(error).capitalize(), type="negative", position="top", multi_line=True)
        self.draw()

    def _drop(self, name: str) -> None:
        if not self._may():
            return
        try:
            adapter = self._shell.service.adapters.drop(name)
            waits = f"; {adapter.calls} requests are answered first" if adapter.calls else ""
            ui.notify(f"{name} is dropped{waits}", position="top")
        except CumuloError as error:
            ui.notify(str(error).capitalize(), type="negative", position="top", multi_line=True)
        self.draw()

    def _may(self) -> bool:
        """Checked here, because a page can be made to send anything."""
        if self._visitor.may_operate and self._shell.sessions.still_valid(self._visitor):
            return True
        ui.notify("Your key may not operate the server.", type="negative", position="top")
        return False
