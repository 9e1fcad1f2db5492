"""The name of the open chat in the top bar and in the title of the terminal's window, and calls to the user."""

from textual.widget import Widget

from tui.open_chat import OpenChat
from tui.terminal_window import TerminalWindow
from tui.types import ChatId
from tui.widgets.top_bar import TopBar


class Heading:
    """Shows what the open chat is called and what it does, in this program and outside it."""

    def __init__(self, bar: TopBar, window: TerminalWindow) -> None:
        self._bar = bar
        self.window = window

    def show(self, chat: OpenChat) -> None:
        """Show the chat's title. Other programs record the window's title, so that of a private chat is not in it."""
        self._bar.chat_title = chat.title
        self.window.show_title("Private chat" if chat.private else chat.title)

    def show_activity(self, text: str) -> None:
        """Show the activity of the open chat's reply; "" if there is none."""
        self._bar.activity = text

    def fit_title(self, *, has_notifications: bool) -> None:
        """Shorten the title so that notifications do not cover its end, or show it as a whole."""
        self._bar.has_notifications = has_notifications

    def call_user(self, node: Widget, ended: ChatId, chat: OpenChat) -> None:
        """Ring the bell and send a notification after a long reply in the chat `ended`. `chat` is the open chat.

        Nothing happens if the terminal has the focus, or if the user wants silence.
        """
        if self.window.rings and not node.app.app_focus:
            node.app.bell()
            is_named = ended == chat.id and not chat.private
            self.window.notify(f"Reply finished: {chat.title}" if is_named else "Reply finished")
