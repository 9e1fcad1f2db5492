"""The settings of one chat: system prompt, sampling, what to do when the context is full, and presets."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, VerticalGroup, VerticalScroll
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Button, Input, Label, Select, TextArea

from tui import sampling_fields
from tui.client import Client, ClientError
from tui.open_chat import name_preset
from tui.plain_text import sanitize, single_line
from tui.screens.dialog import Dialog, ask, confirm
from tui.show_errors import show_errors
from tui.types import DEFAULT_PRESET, ChatSettings, FullContext, Preset
from tui.widgets.text_fields import LineField, TextField

_FULL = (
    ("Ask me", FullContext.ASK.value),
    ("Summarize the oldest messages", FullContext.SUMMARIZE.value),
    ("Drop the oldest messages", FullContext.DROP_OLDEST.value),
    ("Stop with an error", FullContext.STOP.value),
)
_THINKING = (("Model default", "model"), ("On", "yes"), ("Off", "no"))
_THINKS = {"model": None, "yes": True, "no": False}


_KEYS = (  # from long to short; the first that fits is shown
    "esc cancel · ^s apply · ^d make default · F5 save preset · F8 delete it",
    "esc · ^s apply · ^d default · F5 save · F8 delete",
    "^s apply",
)
_FRAME = 6  # cells of the frame beside the keys


class _Group(VerticalGroup):
    """A group of fields with a title, and with an error for each field whose value is invalid."""

    def __init__(self, title: str, *labels_and_fields: Widget) -> None:
        super().__init__(Grid(*labels_and_fields), Label("", classes="problem", markup=False))
        self.border_title = f" {title} "

    def show_problems(self, problems: Sequence[str]) -> None:
        """Show these lines below the fields."""
        label = self.query_one(".problem", Label)
        label.update("\n".join(problems))
        label.display = bool(problems)


class SettingsScreen(Dialog[ChatSettings]):
    """The dialog of a chat's settings. Returns the settings, or None if they do not change.

    Escape asks before it discards changes.
    """

    CSS_PATH = "settings.tcss"
    AUTO_FOCUS = ""  # it would scroll to the center
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel"),
        Binding("ctrl+s", "save", "Apply"),
        Binding("ctrl+d", "make_default", "Make default", priority=True),
        Binding("f5", "save_preset", "Save preset"),  # function keys, because text fields use most other keys
        Binding("f8", "delete_preset", "Delete preset"),
    ]

    def __init__(self, client: Client, settings: ChatSettings) -> None:
        super().__init__()
        self._chats = client.chats
        self._engine = client.engine
        self._settings = settings
        self._presets: Sequence[Preset] = ()
        self._shown: Sequence[object] = ()  # the values of all fields at first

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Label("Settings of this chat", classes="question")
            yield _Group(
                "Preset and system prompt",
                Label("Preset", markup=False),
                Select[str]((), prompt="None", id="preset", compact=True),
                Label("System prompt", markup=False),
                TextField(id="system", compact=True, highlight_cursor_line=False),
            )
            yield _Group("Sampling", *self._number_fields(sampling_fields.SAMPLING_FIELDS))
            thinking = Select(_THINKING, id="thinking", allow_blank=False, compact=True)
            number_fields = self._number_fields(sampling_fields.REPLY_FIELDS)
            yield _Group("Reply and reasoning", *number_fields, Label("Thinking", markup=False), thinking)
            full = Select(_FULL, id="full", allow_blank=False, compact=True)
            yield _Group("Context", Label("When full", markup=False), full)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Apply", id="use", compact=True)

    def _number_fields(self, fields: Sequence[sampling_fields.Field]) -> Iterator[Widget]:
        for field in fields:
            yield Label(field.label, markup=False)
            yield LineField(id=field.name, placeholder=field.hint(self._engine.default_sampling()), compact=True)

    def on_mount(self) -> None:
        self._show(self._settings)
        self._shown = self._values()
        self.show_values_in_force()
        self.load_presets()
        self.query_one("#system").focus(scroll_visible=False)

    def on_resize(self, event: Resize) -> None:
        fitting = (keys for keys in _KEYS if len(keys) + _FRAME <= event.size.width)
        self.query_one(".dialog").border_subtitle = next(fitting, "")

    @work(group="values in force")
    async def show_values_in_force(self) -> None:
        """Show the values of empty fields when the model is loaded."""
        with suppress(ClientError):  # the chat screen reports it; the previous model may have been loaded again
            async for _ in self._engine.loading():
                pass
        recommended = self._engine.default_sampling()
        for field in sampling_fields.FIELDS:
            self.query_one(f"#{field.name}", Input).placeholder = field.hint(recommended)

    @work(exclusive=True)
    async def load_presets(self, selected: str | None = None) -> None:
        """Load the presets, and select `selected`. None: select the preset that equals the chat's settings."""
        with show_errors(self):
            self._presets = await self._chats.presets()
            names = [(single_line(preset.name), preset.name) for preset in self._presets]
            select = self.query_one("#preset", Select)
            select.set_options(names)
            if name := selected or name_preset(self._presets, self._settings):
                select.value = name

    def _show(self, settings: ChatSettings) -> None:
        self.query_one("#system", TextArea).load_text(sanitize(settings.system))
        for name, text in sampling_fields.texts(settings.sampling).items():
            self.query_one(f"#{name}", Input).value = text
        thinking = next(name for name, value in _THINKS.items() if value is settings.sampling.thinking)
        self.query_one("#thinking", Select).value = thinking
        self.query_one("#full", Select).value = settings.full_context.value

    def _values(self) -> Sequence[object]:
        """Return the values of all fields, except the name of the preset."""
        selects = (self.query_one(f"#{name}", Select).value for name in ("thinking", "full"))
        return [self.query_one("#system", TextArea).text, *(field.value for field in self.query(Input)), *selects]

    def _typed(self) -> ChatSettings | None:
        """Return the settings as typed. If a value is invalid, show the error and return None."""
        fields = {field.name: self.query_one(f"#{field.name}", Input).value for field in sampling_fields.FIELDS}
        self.query(".problem").set(display=False)
        if problems := sampling_fields.problems(fields):
            self._show_problems(problems)
            return None
        sampling = sampling_fields.parse(fields, thinking=_THINKS[str(self.query_one("#thinking", Select).value)])
        full = FullContext(str(self.query_one("#full", Select).value))
        return ChatSettings(
            self.query_one("#system", TextArea).text.strip(), sampling, full, self._settings.disabled_tools
        )

    def _show_problems(self, problems: Sequence[sampling_fields.InvalidField]) -> None:
        """Show errors below the groups of their fields, and focus the first of these fields."""
        for group in self.query(_Group):
            group.show_problems([f"✗ {one}" for one in problems if group.query(f"#{one.name}")])
        self.query_one(f"#{problems[0].name}").focus()

    @on(Input.Changed)
    def forget_problem(self) -> None:
        """Remove the error of a value that the user is changing."""
        self.query(".problem").set(display=False)

    @on(Select.Changed, "#preset")
    def use_preset(self, event: Select.Changed) -> None:
        for preset in self._presets:
            if preset.name == event.value:
                self._show(preset.settings)

    @on(Button.Pressed, "#cancel")
    @work
    async def action_cancel(self) -> None:
        unchanged = "The chat keeps its settings."
        if self._values() == self._shown or await confirm(self, "Discard the changes?", unchanged, "Discard"):
            self.dismiss(None)

    @on(Button.Pressed, "#use")
    def action_save(self) -> None:
        if (settings := self._typed()) is not None:
            self.dismiss(settings)

    @work
    async def action_save_preset(self) -> None:
        settings = self._typed()
        if settings is not None and (name := single_line(await ask(self, "Preset name"))):
            await self._save(name, settings)

    @work
    async def action_make_default(self) -> None:
        """Save these settings as the default preset, which new chats start with."""
        if (settings := self._typed()) is not None:
            await self._save(DEFAULT_PRESET, settings)
            self.app.notify("New chats start with these settings.", markup=False)

    async def _save(self, name: str, settings: ChatSettings) -> None:
        with show_errors(self):
            await self._chats.save_preset(Preset(name, settings))
            self.load_presets(name)

    @work
    async def action_delete_preset(self) -> None:
        name = self.query_one("#preset", Select).value
        if not isinstance(name, str):
            self.app.notify("Select a preset first.", markup=False)
        elif await confirm(self, "Delete this preset?", name, "Delete"):
            with show_errors(self):
                await self._chats.delete_preset(name)
                self.load_presets()
