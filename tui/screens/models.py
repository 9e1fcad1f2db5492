"""Models: those on this machine, those of the catalog, and those of the Hub. Answers with the one to load."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Label, Tab, Tabs

from tui import figures
from tui.client import Models
from tui.downloads import Downloads
from tui.engine_nouns import Download, Model
from tui.failures import told
from tui.plain_text import single_line
from tui.screens.dialog import confirm
from tui.screens.over_chat import OverChat
from tui.widgets.listing import Listing

_REFRESH = 0.5  # seconds between looks at the downloads
_COLUMNS = (("Model", "name"), ("Quant", "quantization"), ("Size", "size"), ("State", "state"), ("License", "license"))


class ModelsScreen(OverChat[str]):
    """A table, and three lists that it may show."""

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
        self._listed: dict[str, Model] = {}
        self._repository = ""  # whose variants are listed

    def compose(self) -> ComposeResult:
        yield Tabs(Tab("Installed", id="installed"), Tab("Catalog", id="catalog"), Tab("Hub", id="hub"))
        yield Input(placeholder="Search the Hub, then enter", id="search")
        yield Listing()
        yield Label("", id="fit", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(Listing)
        for label, key in _COLUMNS:
            table.add_column(label, key=key)
        self.set_interval(_REFRESH, self._show_states)

    # --- what is listed

    @on(Tabs.TabActivated)
    def change_list(self) -> None:
        hub = self._list() == "hub"
        self._repository = ""
        self.query_one("#search").display = hub
        if hub:
            self._show([])
            self.query_one("#search").focus()
        else:
            self.reload()

    def action_list(self, name: str) -> None:
        self.query_one(Tabs).active = name

    def _list(self) -> str:
        return self.query_one(Tabs).active

    @on(Input.Submitted)
    def search(self) -> None:
        self._repository = ""
        self.reload()

    @work(exclusive=True, group="list", description="list")
    async def reload(self) -> None:
        """Read the list anew."""
        with told(self):
            self._show(await self._found())

    async def _found(self) -> Sequence[Model]:
        if self._repository:
            return await self._models.variants(self._repository)
        match self._list():
            case "installed":
                return await self._models.installed()
            case "catalog":
                return await self._models.catalog()
            case _:
                text = self.query_one("#search", Input).value.strip()
                return await self._models.search(text) if text else ()

    def _show(self, models: Sequence[Model]) -> None:
        self._listed = {model.name: model for model in models}
        self.query_one(Listing).show({name: self._cells(model) for name, model in self._listed.items()})
        self._show_fit()

    def _cells(self, model: Model) -> tuple[Text, ...]:
        texts = (model.name, model.quantization, figures.size(model.size), self._state(model), model.license)
        return tuple(Text(single_line(text), no_wrap=True) for text in texts)

    def _state(self, model: Model) -> str:
        progress = self._downloads.progress.get(model.name)
        if progress is not None:
            return _progress(progress)
        if model.loaded:
            return "loaded"
        if model.installed:
            return "installed"
        if model.arrived:
            return f"paused at {figures.percent(model.arrived, model.size or 0) or figures.size(model.arrived)}"
        return "" if model.fits is None else "fits" if model.fits else "too large"

    def _show_states(self) -> None:
        table = self.query_one(Listing)
        for name, model in self._listed.items():
            state = Text(single_line(self._state(model)), no_wrap=True)
            if table.get_cell(name, "state") != state:
                table.update_cell(name, "state", state, update_width=True)

    @on(DataTable.RowHighlighted)
    def _show_fit(self) -> None:
        model = self._chosen()
        self.query_one("#fit", Label).update("" if model is None else single_line(f"{model.name}: {model.fit}"))

    def _chosen(self) -> Model | None:
        name = self.query_one(Listing).chosen
        return None if name is None else self._listed[name]

    # --- what is done with one

    @on(DataTable.RowSelected)
    def choose(self) -> None:
        """Enter: what most people mean by it."""
        model = self._chosen()
        if model is None:
            return
        if self._list() == "hub" and not self._repository:
            self._repository = model.name
            self.reload()
        elif model.installed:
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
        if model is not None and model.installed:
            self.dismiss(model.name)
        elif model is not None:
            self.app.notify("It is not on this machine yet: p fetches it.", markup=False)

    def action_pull(self) -> None:
        model = self._chosen()
        if model is None or model.installed or (self._list() == "hub" and not self._repository):
            return
        if model.name in self._downloads.progress:
            self._downloads.pause(model.name)
            self.set_timer(_REFRESH, self.reload)
        else:
            self._downloads.start(model.name)

    @work(description="delete")
    async def action_delete(self) -> None:
        model = self._chosen()
        if model is None or not (model.installed or model.arrived):
            return
        if await confirm(self, "Delete this model from this machine?", model.name, "Delete"):
            with told(self):
                await self._models.delete(model.name)
                self.reload()


def _progress(progress: Download) -> str:
    if progress.stage:
        return progress.stage
    share = figures.percent(progress.done, progress.total or 0) or figures.size(progress.done)
    return f"{share}, {figures.size(round(progress.bytes_per_second))}/s"
