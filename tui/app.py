"""The chat application: its screens and themes, and the actions that are available on every screen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.events import Event, InputEvent, Key, Paste
from textual.filter import LineFilter
from textual.notifications import Notification, SeverityLevel
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widgets import OptionList
from textual.worker import WorkerFailed

from tui import themes
from tui.client import Client
from tui.clipboard import Clipboard, Destination
from tui.commands import COMMANDS, Owner
from tui.completion import Suggestion, command_suggestions
from tui.downloads import Downloads
from tui.footer_keys import key_name
from tui.idle_gc import collect_when_idle
from tui.large_downloads import can_load
from tui.no_color import ReverseBackgrounds
from tui.plain_text import break_paths, sanitize
from tui.screens.chat import ChatScreen
from tui.screens.dialog import Answer, OverChat, Page, may_fetch, replies_in_the_way
from tui.show_errors import CommandFailed, show_error, show_errors
from tui.terminal_window import TerminalWindow
from tui.types import ChatId
from tui.widgets.textual_internals import (
    ignore_answers,
    limit_notifications,
    support_alt_enter,
    type_no_alt_digits,
    write_to_terminal,
)

_BRIEF = 2.5  # seconds to show a short confirmation
_BRIEF_LENGTH = 40  # characters
_MOST_NOTIFICATIONS = 2  # more would cover the chat
_LOW = 20  # rows; a lower terminal has room for one notification
_TOAST_FRAME = 3  # cells of a notification beside its text; it takes at most half of the screen's width
_PAGES = ("pageup", "pagedown")


class ChatApp(App[None]):
    """The Textual application with the chat screen and the pages (help, models, engine)."""

    CSS_PATH = "app.tcss"
    TITLE = "Inglenook"
    ENABLE_COMMAND_PALETTE = False  # `action_commands` opens a dialog of this program instead
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("f2", "models", "Models"),
        Binding("f3", "engine", "Engine"),
        Binding("f4", "copy_address", "Address", show=False),
        Binding("ctrl+backslash", "commands", "Commands", show=False, priority=True),
        Binding("ctrl+c", "interrupt", "Stop, clear, or quit", show=False),
    ]

    def __init__(
        self,
        client: Client,
        theme: str = "",
        chat: ChatId | None = None,
        question: str = "",
        *,
        resumes: bool = False,
        private: bool = False,
        colors: bool = True,
        is_dark: bool = True,
        environment: Mapping[str, str] | None = None,
        editor: str = "",
        bell: bool = True,
    ) -> None:
        """Create the application. With `resumes`, the user chooses a chat first. With `private`, a new chat is private.

        `is_dark`: whether the terminal's background is dark. `editor`: the command that starts the user's editor; "": a
        common editor. `bell`: whether to call the user when a long reply ends. `environment` names the terminal and the
        display; None: copies only use the terminal's escape sequence, and its window keeps its title. Without `colors`
        (NO_COLOR is set), the terminal's own colors are not used; Textual turns all others into shades of gray.
        """
        super().__init__(ansi_color=None if colors else True)
        support_alt_enter()
        type_no_alt_digits()
        ignore_answers()
        self._client = client
        self._wanted_theme = self._saved_theme = theme if colors else themes.TERMINAL
        self._is_dark = is_dark
        self._downloads = Downloads(
            client.models,
            lambda pull: self.run_worker(pull, group="download", description="download"),
            self._on_downloaded,
            lambda error: show_error(self, error),
        )
        self._window = TerminalWindow(partial(write_to_terminal, self), environment or {}, rings=bell)
        self._chat_screen = ChatScreen(
            client, chat, question, self._window, resumes=resumes, private=private, editor=editor
        )
        self._clipboard_programs = Clipboard(environment or {})
        self._copied = ""

    def on_mount(self) -> None:
        colors = self.console.color_system
        for theme in themes.own_themes(colors):
            self.register_theme(theme)
        self.theme = themes.pick_theme(self._wanted_theme, colors, self.available_themes, is_dark=self._is_dark)
        self._saved_theme = self.theme
        self.theme_changed_signal.subscribe(self, self._note_theme)
        self.push_screen(self._chat_screen)
        self.run_worker(collect_when_idle(), group="gc", description="gc")

    @property
    def is_resumable(self) -> bool:
        """Whether a later run can open the chat that is open now."""
        chat = self._chat_screen.conversation.chat
        return chat.id is not None and not chat.private

    def get_key_display(self, binding: Binding) -> str:
        """Return how the footer shows the key of a binding."""
        return binding.key_display or key_name(binding.key)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters of drawn lines. With NO_COLOR, selections are reversed before colors are removed."""
        filters = super().get_line_filters()
        return [ReverseBackgrounds(), *filters] if self.no_color else filters

    def get_css_variables(self) -> dict[str, str]:
        """Return the theme's variables, with muted colors that Textual's `Content` can show."""
        variables = super().get_css_variables()
        self.theme_variables = variables | themes.muted_colors(variables)
        return self.theme_variables

    async def on_event(self, event: Event) -> None:
        """Send typed text to the prompt while the chat screen is shown. Ignore input after all screens are closed."""
        if self._is_text(event) and self.screen_stack and self.screen is self._chat_screen:
            # must happen before the event is handled: after a later change of focus, keys would arrive out of order
            self._chat_screen.turn_to_prompt()
        if not isinstance(event, InputEvent) or (self.screen_stack and not self._would_fail_paging(event)):
            await super().on_event(event)

    async def on_exit_app(self) -> None:
        """Save the draft before the widgets are removed, and restore the title of the terminal's window."""
        self._window.restore_title()
        composer = self._chat_screen.conversation.composer
        await composer.flush_keys()
        await composer.save_draft()

    def _is_text(self, event: Event) -> bool:
        """Whether the event is a printable key or a paste."""
        return (isinstance(event, Key) and event.is_printable) or isinstance(event, Paste)

    def _would_fail_paging(self, event: InputEvent) -> bool:
        """Whether a page key would raise in one of Textual's lists because the list is 0 lines high."""
        if not isinstance(event, Key) or event.key not in _PAGES:
            return False
        return isinstance(self.focused, OptionList) and not self.focused.scrollable_content_region

    def _handle_exception(self, error: Exception) -> None:
        """Ignore failed queries for widgets that were removed because the program exits."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        if self.is_running or not isinstance(cause, NoMatches):
            super()._handle_exception(error)

    def on_command_failed(self, event: CommandFailed) -> None:
        self._chat_screen.conversation.composer.put_back(event.command)

    def _note_theme(self, theme: Theme) -> None:
        if theme.name != self._saved_theme:
            self._saved_theme = theme.name
            self.save_theme(theme.name)

    @work(exclusive=True, group="theme", description="theme")
    async def save_theme(self, name: str) -> None:
        with show_errors(self):
            await self._client.preferences.save_theme(name)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Show a notification, unless it is already shown, and at most one other one.

        Without a title, it is a confirmation and closes sooner. A title without a message would leave an empty line.
        """
        message, title = (message, title) if message else (title, "")
        if timeout is None and severity == "information" and not title and len(message) <= _BRIEF_LENGTH:
            timeout = _BRIEF
        message, title = (break_paths(text, self.size.width // 2 - _TOAST_FRAME) for text in (message, title))
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=markup)
        self.call_later(self._fit_notifications)

    def _fit_notifications(self) -> None:
        limit_notifications(self, 1 if self.size.height < _LOW else _MOST_NOTIFICATIONS)
        self._fit_title()

    def _unnotify(self, notification: Notification, refresh: bool = True) -> None:
        super()._unnotify(notification, refresh)
        self._fit_title()

    def _fit_title(self) -> None:
        """Shorten the title of the chat while notifications are beside it."""
        self._chat_screen.heading.fit_title(has_notifications=bool(self._notifications))

    def _on_downloaded(self, name: str) -> None:
        self.notify(f"Downloaded {name}.", markup=False)

    def action_commands(self) -> None:
        """Let the user choose a command: any in the chat, and only those of the program on another page."""
        from tui.screens.choice import ChoiceScreen

        if not isinstance(self.screen, ModalScreen):
            self.push_screen(ChoiceScreen("Commands", self._commands()), self._run_chosen)

    def _commands(self) -> Sequence[Suggestion]:
        is_chat, tools = self.screen is self._chat_screen, self._chat_screen.dialogs.active_tools
        rows = command_suggestions(one for one in COMMANDS if is_chat or one.owner is Owner.APP)
        return [replace(one, help=tools) if tools and one.name == "tools" else one for one in rows]

    def _run_chosen(self, name: str | None) -> None:
        if name is not None:
            self._chat_screen.run_later(name)

    async def action_interrupt(self) -> None:
        """Handle Ctrl+C without a selection: close the dialog or page. On the chat screen, stop, clear, or quit."""
        if self.screen is self._chat_screen:
            await self._chat_screen.interrupt()
        elif isinstance(self.screen, (OverChat, ModalScreen)):
            self.screen.dismiss()

    def action_help(self) -> None:
        from tui.screens.help import HelpScreen

        self._show_page(HelpScreen())

    def action_models(self) -> None:
        from tui.screens.models import ModelsScreen

        self._show_page(ModelsScreen(self._client.models, self._downloads, self._loading_model), self._load)

    def _loading_model(self) -> str:
        """Return the name of the model that is being loaded, or ""."""
        now = self._chat_screen.conversation.composer.status.loading_model
        return "" if now is None else now.model

    def action_engine(self) -> None:
        from tui.screens.engine import EngineScreen

        self._show_page(EngineScreen(self._client.engine))

    def _show_page(self, page: Page[Answer], answered: Callable[[Answer | None], None] | None = None) -> None:
        """Replace the current page with `page`. Waits until the current page is mounted, because it cannot be closed
        earlier.
        """
        seen = self.screen
        if type(seen) is type(page):
            return
        if isinstance(seen, Page) and not seen.is_mounted:
            self.call_later(self._show_page, page, answered)
            return
        if isinstance(seen, Page):
            seen.dismiss()
        self.push_screen(page, answered)

    def action_use_theme(self, name: str = "") -> None:
        """Use the theme `name`. If there is no such theme, open the list of themes."""
        from tui.screens.choice import ChoiceScreen

        if (found := themes.find_theme(name, self.available_themes)) is not None:
            self.theme = found
            return
        rows = [self._theme_row(one) for one in themes.ordered(self.available_themes)]
        title = f"No theme {name}. Choose one of the list." if name else "Themes"
        self.push_screen(ChoiceScreen(title, rows, self.theme), self._use_chosen)

    def _theme_row(self, name: str) -> Suggestion:
        brightness = "dark" if self.available_themes[name].dark else "light"
        return Suggestion(name, name, f"{brightness}, in use" if name == self.theme else brightness)

    def _use_chosen(self, theme: str | None) -> None:
        if theme is not None:
            self.theme = theme

    def action_load(self, name: str = "") -> None:
        if name:
            self.find_and_load(name)
        else:
            self.action_models()

    @work(exclusive=True, group="load", description="load")
    async def find_and_load(self, name: str) -> None:
        """Load a model. If it must be downloaded, and the download is large, ask the user first."""
        with show_errors(self, f"/load {name}"):
            model = await self._client.models.find(name)
            if can_load(model) or await may_fetch(self, self._client.models, model):
                self._load(name)

    def _load(self, name: str | None) -> None:
        if name is not None:
            self.switch_model(name)

    @work(exclusive=True, group="switch", description="switch")
    async def switch_model(self, name: str) -> None:
        """Use a model for all further replies. If a running reply is in the way, ask whether to stop it or to wait."""
        conversation = self._chat_screen.conversation
        with show_errors(self):
            running = await conversation.running_titles()
            if running and await self._client.models.waits_for_replies(name):
                stops = await self.push_screen_wait(replies_in_the_way(running, name))
                if stops is None:
                    return
                if stops:
                    await conversation.stop_all()
            self._chat_screen.follow(self._client.models.load(name))

    def action_copy_address(self) -> None:
        address = sanitize(self._client.engine.address())
        if address:
            self.copy_to_clipboard(address)
        self.notify(f"API URL: {address}" if address else "The engine is still starting.", markup=False)

    @property
    def clipboard(self) -> str:
        """The text that was last copied in this program."""
        return self._copied

    def copy_to_clipboard(self, text: str) -> None:
        """Copy text, and notify the user where it was copied to. Textual's widgets call this method as well."""
        self._copied = text
        self.fill_clipboard(text)

    @work(exclusive=True, group="clipboard", description="clipboard")
    async def fill_clipboard(self, text: str) -> None:
        destination = await self._clipboard_programs.copy(text)
        if destination is None:
            super().copy_to_clipboard(text)
        self.notify((destination or Destination.TERMINAL).value, markup=False)
