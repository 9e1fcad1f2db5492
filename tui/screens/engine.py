"""The engine screen: running requests, throughput, and the memory of the models."""

from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from time import monotonic
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Label, Sparkline

from tui import figures
from tui.client import ClientError, Engine
from tui.engine_types import Amount, EngineRequest, EngineStatus, ModelMemory, Phase, RequestId
from tui.plain_text import model_name, sanitize, single_line
from tui.screens.dialog import Page, confirm
from tui.show_errors import show_errors
from tui.widgets.listing import Listing
from tui.widgets.textual_internals import KeyFooter

_NAME, _WEIGHTS, _CACHE = 20, 9, 18  # least widths in cells of the columns of models
_WORDS = 20  # width in cells reserved for the text after a bar, such as " 600 MB of 1.0 GB"


class Amounts(Widget):
    """A title, followed by a bar for each amount."""

    amounts: reactive[Sequence[Amount]] = reactive((), layout=True)

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def render(self) -> Content:
        lines = [Content.styled(self._title, "bold"), *(self._line(amount) for amount in self.amounts)]
        return Content("\n").join(lines)

    def _line(self, amount: Amount) -> Content:
        name = single_line(amount.name)[:10].ljust(7) + " "
        words = figures.size(amount.used)
        if amount.total:
            words += f" of {figures.size(amount.total)}"
        width = max(0, self.size.width - len(name) - _WORDS) if amount.total else 0
        filled = round(width * min(1, amount.used / amount.total)) if amount.total else 0
        return Content.assemble(
            name, ("█" * filled, "$primary"), ("░" * (width - filled), "$text-disabled"), f" {words}"
        )


class Models(Widget):
    """A table of the models of the server: their names, states, and memory."""

    models: reactive[Sequence[ModelMemory]] = reactive((), layout=True)
    free: reactive[int] = reactive(0)

    def render(self) -> Content:
        width = self._name_width
        columns = "weights  KV cache"
        gap = width + 1 + _WEIGHTS - len("weights")
        title = Content.assemble(("Models".ljust(gap), "bold"), (columns, "$text-muted"))
        free = f"{'free for others':<{width}} {figures.size(self.free):>{_WEIGHTS}}"
        return Content("\n").join([title, *map(self._line, self.models), *([Content(free)] if self.free else [])])

    def _line(self, model: ModelMemory) -> Content:
        width = self._name_width
        name = single_line(model_name(model.name))
        name = name.ljust(width) if len(name) <= width else f"{name[: width - 1]}…"
        if not model.weights:
            return Content(f"{name}   {single_line(model.state)}")
        cache = figures.size_of(model.cache_used, model.cache_total) if model.cache_total else ""
        state = "" if model.state == "loaded" else single_line(model.state)
        return Content(f"{name} {figures.size(model.weights):>{_WEIGHTS}}  {cache:<{_CACHE}} {state}")

    @property
    def _name_width(self) -> int:
        """Width in cells of the first column, which is as long as the longest name if there is room for it."""
        longest = max((len(model_name(model.name)) for model in self.models), default=0)
        return max(_NAME, min(longest, self.size.width - _WEIGHTS - _CACHE - 4))


_INTERVAL = 1.0  # seconds between polls
_SEEN = 120  # number of polls that the throughput graphs cover
_UNREPORTED = "This endpoint reports no statistics."
_COLUMNS = ("Client", "Priority", "State", "Prompt", "Output", "Age")
_WIDE = 80  # minimum width in cells of a terminal that shows priorities and totals


_RATES = {"read": "prompt", "written": "output"}


class Rates:
    """Computes tokens per second from counts that only increase."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self.values: deque[float] = deque([0.0, 0.0], maxlen=_SEEN)

    def count(self, total: int, now: float) -> None:
        if self._last is not None and now > self._last[0]:
            self.values.append(max(0.0, (total - self._last[1]) / (now - self._last[0])))
        self._last = now, total


class EngineScreen(Page[None]):
    """Polls the engine every second while it is shown."""

    CSS_PATH = "engine.tcss"
    AUTO_FOCUS = "Listing"
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012 - as the base class has it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", "Back"),
        Binding("a,delete", "abort", "Abort request"),
        Binding("f3", "app.engine", show=False),
    ]

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._requests: dict[RequestId, EngineRequest] = {}
        self._read, self._written = Rates(), Rates()

    def compose(self) -> ComposeResult:
        yield Label("", id="about", markup=False)
        yield Label(_UNREPORTED, id="unreported", markup=False)
        with Horizontal(id="rates"):
            for name in ("read", "written"):
                with Vertical():
                    yield Label("", id=f"{name}-rate", markup=False)
                    yield Sparkline([0.0, 0.0], id=name)
        with Horizontal(id="amounts"):
            yield Amounts("KV cache")
            yield Amounts("Memory")
        yield Models()
        yield Listing()
        yield KeyFooter()

    def on_mount(self) -> None:
        self._list({})
        self.poll()
        self.set_interval(_INTERVAL, self.poll)

    @work(exclusive=True, group="look", description="look")
    async def poll(self) -> None:
        with show_errors(self):
            try:
                async with aclosing(self._engine.loading()) as steps:
                    async for step in steps:
                        if not step.loaded:
                            self._show_none(figures.loading(step))
                self._show(await self._engine.status())
            except ClientError as problem:
                self._show_none(problem.sentences)

    def _show_none(self, why: str) -> None:
        """Show the reason why there is no status."""
        if not self.query(Listing):  # the screen was closed
            return
        self.add_class("-none")
        self.query_one("#about", Label).update(single_line(why))
        self._list({})

    def _show(self, status: EngineStatus) -> None:
        if not self.query(Listing):  # the screen was closed
            return
        self.remove_class("-none")
        self.set_class(not status.is_reported, "unreported")
        self.query_one("#about", Label).update(single_line(self._about(status)))
        if not status.is_reported:
            return
        self._read.count(status.prompt_tokens, monotonic())
        self._written.count(status.reply_tokens, monotonic())
        counted = (("read", self._read, status.prompt_tokens), ("written", self._written, status.reply_tokens))
        for name, rates, total in counted:
            self.query_one(f"#{name}", Sparkline).data = list(rates.values)
            words = f"{rates.values[-1]:,.0f} {_RATES[name]} tok/s"
            self.query_one(f"#{name}-rate", Label).update(f"{words} · {total:,} tokens" if self._is_wide else words)
        tiers, memory = self.query(Amounts)
        tiers.amounts, memory.amounts = status.tiers, status.memory
        table = self.query_one(Models)
        table.models, table.free = status.models, status.free
        table.display = bool(status.models)
        self._list({request.id: request for request in status.requests})

    def _list(self, requests: dict[RequestId, EngineRequest]) -> None:
        """List the requests. Without one, hide the header and the key that aborts a request."""
        self._requests = requests
        listing = self.query_one(Listing)
        listing.show_header = bool(requests)
        columns = [one for one in _COLUMNS if one != "Priority" or self._is_wide]
        if [key.value for key in listing.columns] != columns:
            listing.clear(columns=True)
            for column in columns:
                listing.add_column(column, key=column)
        rows = {key: _cells(request) for key, request in requests.items()}
        listing.show({key: [cells[column] for column in columns] for key, cells in rows.items()})
        self.refresh_bindings()

    @property
    def _is_wide(self) -> bool:
        return self.app.size.width >= _WIDE

    def on_resize(self) -> None:
        self._list(self._requests)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "abort" or bool(self._requests)

    def _about(self, status: EngineStatus) -> str:
        requests = len(status.requests)
        count = f"{requests} {'request' if requests == 1 else 'requests'}" if requests else "no request is running"
        address = sanitize(self._engine.address())
        return " · ".join((model_name(status.model), *([count] if status.is_reported else []), address))

    @work(description="abort")
    async def action_abort(self) -> None:
        """Abort the selected request. Ask first if it belongs to another client."""
        chosen = self.query_one(Listing).chosen
        if chosen is None:
            return
        request = self._requests[RequestId(chosen)]
        about = single_line(f"{request.client or 'A client'}: {request.reply_tokens:,} tokens generated")
        if request.mine or await confirm(self, "Abort this request?", about, "Abort"):
            with show_errors(self):
                await self._engine.abort(request.id)
                self.poll()


def _cells(request: EngineRequest) -> dict[str, Text]:
    """Return the cells of a request by column."""
    client = single_line(request.client) or "?"
    done = figures.percent(request.prompt_done, request.prompt_total)
    texts = (
        "this chat" if request.mine else client,
        single_line(request.priority),
        f"{request.phase.value} {done}" if request.phase is Phase.READING else request.phase.value,
        f"{request.prompt_total:,}",
        f"{request.reply_tokens:,}",
        figures.seconds(request.seconds),
    )
    return {column: Text(text, no_wrap=True) for column, text in zip(_COLUMNS, texts, strict=True)}
