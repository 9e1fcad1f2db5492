"""The models screen: lists installed models and the catalog, and searches the Hub. Returns the model to load."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.css.query import DOMQuery
from textual.widgets import DataTable, Input, Label

from tui import figures, footer_keys, fuzzy
from tui.client import ClientError, Models
from tui.downloads import Downloads, describe_progress
from tui.engine_types import ModelInfo, SearchResults
from tui.large_downloads import FIT_BY_SIZE, can_load
from tui.plain_text import capitalized, model_name, single_line
from tui.screens.dialog import Page, confirm, may_fetch
from tui.show_errors import show_errors
from tui.widgets.model_table import ModelTable
from tui.widgets.text_fields import LineField
from tui.widgets.textual_internals import KeyFooter

_REFRESH = 0.5  # seconds between updates of the downloads
_REST = 0.3  # seconds for which a model must be highlighted before its fit is checked
_FILTER, _SEARCHED = "Type to filter", "   (Tab: search the Hub)"
_HUB = "Search the Hub, then Enter   (Tab: back to the list)"
_NO_MATCH = "Offline: no match in the built-in catalog."
_ELSEWHERE, _SEARCHABLE = "No match here.", " Tab searches the Hub."


class ModelsScreen(Page[str]):
    """A filter above a table. The filter keeps the focus; Tab switches between the list and a search of the Hub.

    An endpoint manages its models itself, so that there is no search.
    """

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "#filter"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("enter", "choose", "Use"),
        Binding("tab", "toggle_hub", "Search the Hub", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("f2", "app.models", show=False),
        *(Binding(key, f"move('{key}')", show=False, priority=True) for key in ("up", "down", "pageup", "pagedown")),
    ]

    def __init__(self, models: Models, downloads: Downloads, loading: Callable[[], str]) -> None:
        """Prepare the screen. `loading` returns the name of the model that is being loaded, or ""."""
        super().__init__()
        self._loading_model = loading
        self._seen_loading = ""  # what `loading` returned last
        self._models = models
        self._downloads = downloads
        self._all: Sequence[ModelInfo] = ()  # all models of the list, before filtering
        self._list_note = ""  # the note above the list: why it is empty, or which models were searched
        self._has_failed = False  # whether the list could not be read
        self._ended = downloads.ended  # number of ended downloads when the list was read
        self._fits: dict[str, str] = {}  # text that describes whether a model fits, by model name
        self._is_hub = False  # whether results of the Hub are listed
        self._searched_text = ""  # the text of the last search of the Hub
        self._repository = ""  # the repository whose variants are listed, or ""

    def compose(self) -> ComposeResult:
        yield LineField(placeholder=self._invitation, id="filter")
        yield Label("", id="note", markup=False)
        yield ModelTable(self._downloads, self._models.offline_reason, self._loading_model)
        yield Label("", id="fit", markup=False)
        yield KeyFooter()

    @property
    def _invitation(self) -> str:
        """The text of the empty filter above the list."""
        return _FILTER if self._models.endpoint() else _FILTER + _SEARCHED

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The bindings as the footer shows them: first those of the highlighted model."""
        moment = {"enter": self._enter_does(), "tab": "Back to the list" if self._is_hub else "Search the Hub"}
        shown = {key: words for key, words in (moment | {"escape": "Back"}).items() if words}
        return footer_keys.arrange(super().active_bindings, shown, self.app.size.width, self.app.get_key_display)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "toggle_hub":
            return not self._models.endpoint()
        model = self._chosen() if action == "delete" else None
        return action != "delete" or (model is not None and _can_delete(model))

    def _enter_does(self) -> str:
        """Return the description of Enter for the highlighted model; "" if it does nothing."""
        model = self._chosen()
        if self._is_hub and self._filter_text() != self._searched_text:
            return "Search"
        if model is None:
            return "Retry" if self._has_failed else ""
        if can_load(model):
            return "Use"
        if model.is_repository:
            return "Open"
        if model.name in self._downloads.progress:
            return "Pause"
        return "" if self._models.offline_reason() else "Resume" if model.arrived else "Download"

    def on_mount(self) -> None:
        self.set_interval(_REFRESH, self._show_states)
        self.reload()

    # --- the lists

    def action_toggle_hub(self) -> None:
        """Search the Hub for the text of the filter instead of the list, or return to the list."""
        field = self.query_one("#filter", Input)
        self._is_hub, self._repository = not self._is_hub, ""
        field.placeholder = _HUB if self._is_hub else self._invitation
        self.workers.cancel_group(self, "list")
        self._list_note, self._has_failed = "", False
        self._searched_text = self._filter_text()
        if self._is_hub and not self._searched_text:
            self._show([])
        else:
            self.reload()

    @on(Input.Changed)
    def filter(self) -> None:
        self.refresh_bindings()
        if not self._is_hub:
            self._show(self._all)
            self.query_one(ModelTable).move_cursor(row=0)  # the best match

    @on(Input.Submitted)
    def submit(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if self._is_hub and text != self._searched_text:
            self._searched_text, self._repository = text, ""
            self.reload()
        else:
            self.choose()

    def action_move(self, key: str) -> None:
        """Move the table's cursor while the filter keeps the focus."""
        listing = self.query_one(ModelTable)
        moves = {
            "up": listing.action_cursor_up,
            "down": listing.action_cursor_down,
            "pageup": listing.action_page_up,
            "pagedown": listing.action_page_down,
        }
        moves[key]()

    @work(exclusive=True, group="list", description="list")
    async def reload(self) -> None:
        """Read the list again. If that fails, show the reason above an empty list."""
        with show_errors(self):
            try:
                finds, self._has_failed = await self._found(), False
            except ClientError as error:
                finds, self._has_failed = SearchResults((), error.sentences), True
            self._list_note = finds.note
            self._show(finds.models)

    async def _found(self) -> SearchResults:
        if self._repository:
            return SearchResults(tuple(await self._models.variants(self._repository)))
        if self._is_hub:
            return await self._searched(self._searched_text)
        catalog, installed = await self._models.catalog(), await self._models.installed()
        models = {one.name: one for one in (*self._own_downloads(), *catalog)}
        models |= {one.name: replace(one, is_recommended=_is_recommended(models.get(one.name))) for one in installed}
        note = "" if models else f"{self._models.endpoint()} lists no models."
        return SearchResults(tuple(sorted(models.values(), key=_order)), note)

    def _own_downloads(self) -> Iterator[ModelInfo]:
        """Running downloads that this program started. Models that the engine downloads are marked in the lists."""
        return (model for model in self._downloads.models.values() if not model.fetching)

    async def _searched(self, text: str) -> SearchResults:
        if not text:
            return SearchResults(())
        self._note("Searching the Hub …")
        finds = await self._models.search(text)
        return finds if finds.models else SearchResults((), _NO_MATCH if finds.note else "No results.")

    @contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """Show errors of the body above the list. A notification would cover the list."""
        try:
            yield
        except ClientError as error:
            self._note(error.sentences)

    def _note(self, text: str) -> None:
        """Show a note above the list, or hide it if the text is empty."""
        for label in self.query("#note").results(Label):  # there is no label after the screen is closed
            label.update(capitalized(single_line(text)))
            label.display = bool(text)

    def _show(self, models: Sequence[ModelInfo]) -> None:
        """List the models that match the filter."""
        self._all = models
        for model in models:
            if model.fetching:
                self._downloads.start(model)
        text = self._filter_text()
        if text and not self._is_hub:
            models = fuzzy.rank(text, models, lambda one: (one.name, one.license), len(models))
        no_match = _ELSEWHERE if self._models.endpoint() else _ELSEWHERE + _SEARCHABLE
        self._note(self._list_note or no_match * bool(self._all and not models))
        for table in self._table:
            table.show_models(models)
        self._show_fit()

    def _filter_text(self) -> str:
        return next((field.value.strip() for field in self.query("#filter").results(Input)), "")

    def on_resize(self) -> None:
        for table in self._table:
            table.draw()

    @property
    def _table(self) -> DOMQuery[ModelTable]:
        """The table; empty after the screen is closed."""
        return self.query(ModelTable)

    def _show_states(self) -> None:
        now = self._downloads.ended, self._loading_model()
        if now != (self._ended, self._seen_loading):
            self._ended, self._seen_loading = now
            self._fits.clear()
            self.reload()
        self.refresh_bindings()
        for table in self._table:
            table.update_states()
        if (model := self._chosen()) is not None and model.name in self._downloads.progress:
            self._show_fit()

    @on(DataTable.RowHighlighted)
    def _show_fit(self) -> None:
        model, words = self._chosen(), ""
        if model is not None:
            words = f"{model_name(model.name)}: {self._describe(model)}"
        self.refresh_bindings()
        for label in self.query("#fit").results(Label):
            label.update(single_line(words))

    def _describe(self, model: ModelInfo) -> str:
        """Return the progress of the model's download. Without a download, return its speed and whether it fits."""
        if (progress := self._downloads.progress.get(model.name)) is not None:
            return f"Downloading: {describe_progress(progress)}"
        return " · ".join(filter(None, (figures.expected_speed(model.speed), self._fit(model))))

    def _fit(self, model: ModelInfo) -> str:
        """Return whether a model fits. Until that has been checked, return an estimate from its size."""
        if model.name in self._fits:
            return self._fits[model.name]
        reason = "" if can_load(model) else self._models.offline_reason()
        if reason:
            return f"{FIT_BY_SIZE[model.fits]}; {reason}"
        self.find_fit(model)
        return "Checking fit …" if model.fits is None else f"{FIT_BY_SIZE[model.fits]}; checking …"

    @work(exclusive=True, group="fit", description="fit")
    async def find_fit(self, model: ModelInfo) -> None:
        """After a pause, check whether the highlighted model fits. Highlighting another model cancels the check."""
        await asyncio.sleep(_REST)
        try:
            fit = await self._models.fit(model.name)
        except ClientError as problem:
            self._fits[model.name] = f"{FIT_BY_SIZE[model.fits]}; {problem.message}"
        else:
            self._fits[model.name] = fit.verdict
            for table in self._table:
                if (listed := table.find(model.name)) is not None:
                    speed = listed.speed if fit.is_possible else None
                    table.replace(replace(listed, fits=fit.is_possible, speed=speed))
        self._show_fit()

    def _chosen(self) -> ModelInfo | None:
        return next((table.model for table in self._table), None)

    # --- actions

    @on(DataTable.RowSelected)
    def choose(self) -> None:
        """Act on the selected row: open a repository, use a model, download it, or pause its download."""
        model = self._chosen()
        if model is None:
            if self._has_failed:
                self.reload()
        elif model.is_repository:
            self._repository = model.name
            self.reload()
        elif can_load(model):
            self.dismiss(model.name)
        elif model.name in self._downloads.progress:
            self._downloads.pause(model.name)
        else:
            self.fetch(model)

    def action_choose(self) -> None:
        self.choose()

    def action_back(self) -> None:
        """Go back from a repository, from the Hub, or from the screen."""
        if self._repository:
            self._repository = ""
            self.reload()
        elif self._is_hub:
            self.action_toggle_hub()
        else:
            self.dismiss(None)

    @work(exclusive=True, group="fetch", description="fetch")
    async def fetch(self, model: ModelInfo) -> None:
        """Start or resume a download. Ask first if the model is large or does not fit."""
        with show_errors(self), self._errors_noted():
            if await may_fetch(self, self._models, model, self._fits.get(model.name, "")):
                self._downloads.start(model)

    @work(description="delete")
    async def action_delete(self) -> None:
        model = self._chosen()
        if model is None:
            return
        question = "Delete this model from this machine?"
        if model.loaded:
            question = "This model is in use. Delete it anyway? You can download it again."
        if await confirm(self, question, model.name, "Delete"):
            with show_errors(self):
                await self._models.delete(model.name)
                self._fits.clear()
                self.reload()


def _can_delete(model: ModelInfo) -> bool:
    return (model.installed and not model.is_own) or bool(model.arrived)


def _is_recommended(model: ModelInfo | None) -> bool:
    return model is not None and model.is_recommended


def _order(model: ModelInfo) -> tuple[bool, bool, int]:
    """Sort key: the loaded model first, then models that need no download, then by size."""
    return not model.loaded, not can_load(model), model.size or 0
