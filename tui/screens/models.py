"""The models screen: installed models, the catalog, and the Hub. Returns the model to load."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Label, Tab, Tabs

from tui import figures
from tui.client import ClientError, Models
from tui.downloads import Downloads
from tui.engine_types import Download, ModelInfo, SearchResults
from tui.large_downloads import FIT_BY_SIZE, can_load
from tui.plain_text import shortened, single_line
from tui.screens.dialog import Page, confirm, may_fetch
from tui.show_errors import show_errors
from tui.widgets.listing import Listing
from tui.widgets.text_fields import LineField

_REFRESH = 0.5  # seconds between updates of the downloads
_REST = 0.3  # seconds that a model is highlighted before its fit is checked
_BESIDE = 52  # cells of all other columns, also while a model is downloaded
_LEAST = 20  # cells of the name, at least
_NO_MATCH = "Offline: no match in the built-in catalog."
_COLUMNS = (("Model", "name"), ("Quant", "quantization"), ("Size", "size"), ("State", "state"), ("License", "license"))


class ModelsScreen(Page[str]):
    """One table and three lists that it can show."""

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "Listing"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("l", "load", "Load"),
        Binding("p", "pull", "Pull / pause"),
        Binding("d,delete", "delete", "Delete"),
        Binding("1", "list('installed')", "Installed", show=False),
        Binding("2", "list('catalog')", "Catalog", show=False),
        Binding("3", "list('hub')", "Hub", show=False),
    ]

    def __init__(self, models: Models, downloads: Downloads) -> None:
        super().__init__()
        self._models = models
        self._downloads = downloads
        self._listed: dict[str, ModelInfo] = {}
        self._ended = downloads.ended  # the count when the list was read
        self._fits: dict[str, str] = {}  # verdicts by model, in words
        self._shown = ""  # the list that is shown
        self._repository = ""  # the repository whose variants are listed, or ""

    def compose(self) -> ComposeResult:
        yield Tabs(Tab("Installed", id="installed"), Tab("Catalog", id="catalog"), Tab("Hub", id="hub"))
        yield LineField(placeholder="Search the Hub, then enter", id="search")
        yield Label("", id="note", markup=False)
        yield Listing()
        yield Label("", id="fit", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(Listing)
        for label, key in _COLUMNS:
            table.add_column(label, key=key)
        self.set_interval(_REFRESH, self._show_states)

    # --- the lists

    @on(Tabs.TabActivated)
    def change_list(self) -> None:
        if self._list() == self._shown:
            return
        self._shown = self._list()
        self._repository = ""
        search = self.query_one("#search")
        search.display = self._shown == "hub"
        if search.display:
            self.workers.cancel_group(self, "list")
            self._note("")
            self._show([])
            self.set_focus(search)
        else:
            self.set_focus(self.query_one(Listing))
            self.reload()

    def action_list(self, name: str) -> None:
        self.query_one(Tabs).active = name
        self.change_list()  # at once, so that the next keys go to the new list

    def _list(self) -> str:
        return self.query_one(Tabs).active

    @on(Input.Submitted)
    def search(self) -> None:
        self._repository = ""
        self.reload()

    @work(exclusive=True, group="list", description="list")
    async def reload(self) -> None:
        """Read the list again."""
        with show_errors(self):
            try:
                finds = await self._found()
            except ClientError:
                self._note("")
                raise
            self._note(finds.note)
            self._show(finds.models)

    async def _found(self) -> SearchResults:
        if self._repository:
            return SearchResults(tuple(await self._models.variants(self._repository)))
        match self._list():
            case "installed":
                return SearchResults((*await self._models.installed(), *self._own_downloads()))
            case "catalog":
                return SearchResults(tuple(await self._models.catalog()))
            case _:
                return await self._searched(self.query_one("#search", Input).value.strip())

    def _own_downloads(self) -> Iterator[ModelInfo]:
        """Downloads that this screen started. Those of the engine are in its own lists."""
        return (model for model in self._downloads.models.values() if not model.fetching)

    async def _searched(self, text: str) -> SearchResults:
        if not text:
            return SearchResults(())
        self._note("Searching the Hub …")
        finds = await self._models.search(text)
        return finds if finds.models else SearchResults((), _NO_MATCH if finds.note else "No results.")

    def _note(self, text: str) -> None:
        """Show a note above the list, or hide it if the text is empty."""
        for label in self.query("#note").results(Label):  # none after the screen is closed
            label.update(single_line(text))
            label.display = bool(text)

    def _show(self, models: Sequence[ModelInfo]) -> None:
        self._listed = {model.name: model for model in models}
        for model in models:
            if model.fetching:
                self._downloads.start(model)
        self._draw()
        self._show_fit()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        for listing in self.query(Listing):  # none after the screen is closed
            listing.show({name: self._cells(model) for name, model in self._listed.items()})

    def _cells(self, model: ModelInfo) -> tuple[Text, ...]:
        size = f"{'~' if model.is_estimate else ''}{figures.size(model.size)}"
        name = shortened(single_line(model.name), max(_LEAST, self.app.size.width - _BESIDE))
        texts = (name, model.quantization, size, self._state(model), model.license)
        return tuple(Text(single_line(text), no_wrap=True) for text in texts)

    def _state(self, model: ModelInfo) -> str:
        progress = self._downloads.progress.get(model.name)
        if progress is not None:
            return _progress(progress)
        if model.loaded:
            return "loaded"
        if model.elsewhere:
            return "available"
        if model.installed:
            return "installed"
        if model.arrived:
            share = "" if model.is_estimate else figures.percent(model.arrived, model.size or 0)
            return f"paused at {share or figures.size(model.arrived)}"
        return "" if model.fits is None else "fits" if model.fits else "too large"

    def _show_states(self) -> None:
        if self._ended != self._downloads.ended:
            self._ended = self._downloads.ended
            self.reload()
        for table in self.query(Listing):
            for name, model in self._listed.items():
                state = Text(single_line(self._state(model)), no_wrap=True)
                if table.get_cell(name, "state") != state:
                    table.update_cell(name, "state", state, update_width=True)

    @on(DataTable.RowHighlighted)
    def _show_fit(self) -> None:
        model, words = self._chosen(), ""
        if model is not None:
            if model.name not in self._fits:
                self.find_fit(model)
            words = f"{model.name}: {self._fits.get(model.name, 'Checking fit …')}"
        for label in self.query("#fit").results(Label):
            label.update(single_line(words))

    @work(exclusive=True, group="fit", description="fit")
    async def find_fit(self, model: ModelInfo) -> None:
        """Check whether the highlighted model fits, after a pause. Highlighting another one cancels this."""
        await asyncio.sleep(_REST)
        try:
            fit = await self._models.fit(model.name)
        except ClientError as problem:
            self._fits[model.name] = f"{FIT_BY_SIZE[model.fits]}; {problem.message}"
        else:
            self._fits[model.name] = fit.verdict
            if model.name in self._listed:
                self._listed[model.name] = replace(self._listed[model.name], fits=fit.is_possible)
        self._show_fit()

    def _chosen(self) -> ModelInfo | None:
        name = next((listing.chosen for listing in self.query(Listing)), None)
        return None if name is None else self._listed[name]

    # --- actions

    @on(DataTable.RowSelected)
    def choose(self) -> None:
        """Enter: open a repository, load a model, or download it."""
        model = self._chosen()
        if model is None:
            return
        if model.is_repository:
            self._repository = model.name
            self.reload()
        elif can_load(model):
            self.dismiss(model.name)
        else:
            self.action_pull()

    def action_back(self) -> None:
        if self._repository:
            self._repository = ""
            self.reload()
        else:
            self.dismiss(None)

    def action_load(self) -> None:
        model = self._chosen()
        if model is not None and can_load(model):
            self.dismiss(model.name)
        elif model is not None:
            self.app.notify("Not downloaded. Press p to download.", markup=False)

    def action_pull(self) -> None:
        model = self._chosen()
        if model is None or can_load(model) or model.is_repository:
            return
        if model.name in self._downloads.progress:
            self._downloads.pause(model.name)
        else:
            self.fetch(model)

    @work(exclusive=True, group="fetch", description="fetch")
    async def fetch(self, model: ModelInfo) -> None:
        """Start or resume a download. Ask first if the model is large or does not fit."""
        with show_errors(self):
            if await may_fetch(self, self._models, model, self._fits.get(model.name, "")):
                self._downloads.start(model)

    @work(description="delete")
    async def action_delete(self) -> None:
        model = self._chosen()
        if model is None or not (model.installed or model.arrived):
            return
        question = "Delete this model from this machine?"
        if model.loaded:
            question = "This model is in use. Delete it anyway? You can download it again."
        if await confirm(self, question, model.name, "Delete"):
            with show_errors(self):
                await self._models.delete(model.name)
                self.reload()


def _progress(progress: Download) -> str:
    if progress.stage:
        return progress.stage
    share = figures.percent(progress.done, progress.total or 0) or figures.size(progress.done)
    speed = round(progress.bytes_per_second)
    if not speed:
        return share
    left = f", {figures.time_left((progress.total - progress.done) / speed)}" if progress.total else ""
    return f"{share}, {figures.size(speed)}/s{left}"
