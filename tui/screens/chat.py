"""The chat screen: the list of chats, the open chat, and the top bar, and the messages that they send each other."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize

from tui import figures, footer_keys
from tui.client import Client, ClientError
from tui.commands import COMMANDS, Owner
from tui.double_press import DoublePress
from tui.engine_types import Loading
from tui.screens import model_loading, reply_contents
from tui.screens.chat_dialogs import ChatDialogs
from tui.screens.chat_start import ChatStart
from tui.screens.command_runner import CommandRunner
from tui.terminal_window import TerminalWindow
from tui.types import ChatId
from tui.widgets.chat_list import ChatList
from tui.widgets.chat_view import ChatView
from tui.widgets.composer import Composer
from tui.widgets.conversation import Conversation
from tui.widgets.heading import Heading
from tui.widgets.message_view import MessageView
from tui.widgets.reply_feed import ReplyFeed
from tui.widgets.status_line import StatusLine
from tui.widgets.textual_internals import KeyFooter, SteadyScreen, close_notifications
from tui.widgets.top_bar import TopBar
from tui.widgets.welcome import Welcome

if TYPE_CHECKING:  # the Markdown widgets are imported after the prompt is shown
    from textual.widgets import Markdown

    from tui.widgets.code_block import CodeBlock

_IN_FOOTER = ("new", "chats", "search", "editor")
_QUIT_SECONDS = 2.0  # a second Ctrl+C within this time quits
_POLL_SECONDS = 1.5  # seconds between two polls for changes by other windows


class ChatScreen(SteadyScreen):
    """The main screen."""

    CSS_PATH = "chat.tcss"
    AUTO_FOCUS = "PromptArea"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 - as the base class has it
    VERTICAL_BREAKPOINTS = [(0, "-low"), (10, "-high")]  # noqa: RUF012 - the same
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            key,
            f"run_command({one.name!r})",
            one.name.capitalize(),
            show=one.name in _IN_FOOTER and key == (one.spare_key or one.key),
            priority=key != "escape" and (key == one.spare_key or not one.spare_key),
        )
        for one in COMMANDS
        for key in (one.key, one.spare_key)
        if key and " " not in key and one.owner is not Owner.APP
    ]

    def __init__(
        self,
        client: Client,
        chat: ChatId | None,
        question: str,
        window: TerminalWindow,
        *,
        resumes: bool = False,
        private: bool = False,
        editor: str = "",
    ) -> None:
        """Create the screen and its widgets.

        With `resumes`, the user chooses one of the chats first. With `private`, the new chat is private. `editor`: the
        command that starts the user's editor.
        """
        super().__init__()
        self._client = client
        self.conversation = Conversation(client)
        self.conversation.chat.private = private
        self._chats = ChatList(client.chats, lambda: self.conversation.running_chats)
        self._bar = TopBar()
        self.heading = Heading(self._bar, window)
        self.dialogs = ChatDialogs(self.conversation, client, editor)
        self._commands = CommandRunner(self, self.conversation, self._chats, self.dialogs)
        self._start = ChatStart(
            self.conversation,
            client,
            self._bar,
            partial(self.dialogs.search, ""),
            chat=chat,
            question=question,
            resumes=resumes,
        )
        self._quit = DoublePress(_QUIT_SECONDS)

    @property
    def is_unsettled(self) -> bool:
        return self.conversation.transcript.is_unsettled

    def compose(self) -> ComposeResult:
        yield self._bar
        with Horizontal():
            yield self._chats
            yield self.conversation
        yield KeyFooter()

    def on_resize(self, event: Resize) -> None:
        self.conversation.composer.fit(event.size.height)
        self.refresh_bindings()

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The bindings as the footer shows them."""
        moment, width = self.conversation.keys_of_the_moment, self.app.size.width
        return footer_keys.arrange(super().active_bindings, moment, width, self.app.get_key_display)

    def on_screen_suspend(self) -> None:
        """Hide the footer and the cursor below a dialog, which has its own."""
        self.query_one(KeyFooter).visible = False
        self.conversation.composer.area.show_cursor = False

    def on_screen_resume(self) -> None:
        self.query_one(KeyFooter).visible = True
        self.conversation.composer.area.show_cursor = True

    def on_mount(self) -> None:
        self.follow(self._client.engine.loading())
        self.run_worker(model_loading.watch_engine(self.conversation, self._client.engine), group="engine")
        self.set_interval(_POLL_SECONDS, self.poll)
        self._start.begin()
        self.call_after_refresh(self.dialogs.find_tools)

    @work(group="loading", exclusive=True, description="loading")
    async def follow(self, loading: AsyncGenerator[Loading, None]) -> None:
        """Show the progress of loading a model. Use the model once it is loaded."""
        await model_loading.follow(self.conversation, loading, self._client.models.endpoint())

    async def poll(self) -> None:
        """Show changes by other windows in the list and in the open chat."""
        self._chats.poll()
        await self._merge_other_windows()
        with suppress(ClientError):  # the next action of the user reports the error
            await self._start.renew_offer()
        if self.conversation.composer.status.is_stopped and await self._client.engine.is_started_elsewhere():
            self.try_again()

    async def interrupt(self) -> None:
        """Handle Ctrl+C: stop the reply; otherwise clear the prompt; otherwise quit at the second press."""
        conversation, composer = self.conversation, self.conversation.composer
        if conversation.is_interruptible:
            await conversation.action_stop()
        elif composer.area.text:
            composer.area.action_clear()
        elif self._quit.press():
            await self.app.action_quit()
        else:
            composer.area.hint(f"Press {footer_keys.key_name('ctrl+c')} again to quit", self._quit.seconds)

    # --- messages from widgets

    @on(ChatView.Shown)
    def show_title(self, event: ChatView.Shown) -> None:
        self.heading.show(self.conversation.chat)
        self._chats.mark_open(event.chat.id)
        self.refresh_bindings()
        if event.chat.id is not None:
            self._start.end_offer()

    @on(ReplyFeed.LongReplyEnded)
    def call_user(self, event: ReplyFeed.LongReplyEnded) -> None:
        self.heading.call_user(self, event.chat, self.conversation.chat)

    @on(ChatView.Activity)
    def show_activity(self, event: ChatView.Activity) -> None:
        self.heading.show_activity(event.text)

    @on(Composer.EnteredEmpty)
    def accept_offer(self) -> None:
        if self.conversation.welcome.display:
            self.conversation.welcome.enter()
        else:
            self.conversation.outbox.send_next()

    @on(Welcome.ContinueAsked)
    async def continue_chat(self, event: Welcome.ContinueAsked) -> None:
        await self.conversation.open(event.chat.id)

    @on(Welcome.RetryAsked)
    @on(ReplyFeed.ModelWanted)
    def try_again(self) -> None:
        if self.conversation.composer.status.loading_model is None:
            self.follow(self._client.engine.loading(retry=True))

    @on(ChatList.OpenAsked)
    async def open(self, event: ChatList.OpenAsked) -> None:
        await self.conversation.open(event.chat)
        self.turn_to_prompt()

    @on(ChatList.Deleted)
    async def leave_deleted(self, event: ChatList.Deleted) -> None:
        await self.conversation.leave_deleted(event.chat)

    @on(ChatList.Renamed)
    def rename(self, event: ChatList.Renamed) -> None:
        if event.chat == self.conversation.chat.id:
            self.conversation.chat.rename(event.title)
            self.heading.show(self.conversation.chat)

    @on(ChatList.Archived)
    def archive(self, event: ChatList.Archived) -> None:
        if event.chat == self.conversation.chat.id:
            self.conversation.chat.archive(archived=event.archived)
            self.heading.show(self.conversation.chat)

    @on(ChatList.Counted)
    async def count_stored(self, event: ChatList.Counted) -> None:
        if event.chat == self.conversation.chat.id:
            self.conversation.chat.stored_count = event.count
            await self._merge_other_windows()

    async def _merge_other_windows(self) -> None:
        if self.conversation.chat.is_behind:
            await self.conversation.merge_other_windows()

    # --- commands

    @on(Composer.Submitted)
    def submit(self, event: Composer.Submitted) -> None:
        close_notifications(self.app)  # they would cover the first message, and the user has moved on
        self.conversation.outbox.submit(event.prompt)

    @on(Composer.CommandTyped)
    async def run_typed(self, event: Composer.CommandTyped) -> None:
        self._start.end_offer()  # a second Enter must not open the offered chat
        await self._commands.run_typed(event.name, event.argument)

    def run_later(self, name: str) -> None:
        """Run a command when this screen is visible."""
        self.call_after_refresh(self.action_run_command, name)

    async def action_run_command(self, name: str) -> None:
        await self._commands.run(name)

    async def action_new_chat(self) -> None:
        await self.conversation.open_new()
        self.turn_to_prompt()

    async def action_new_private_chat(self) -> None:
        await self.conversation.open_new(private=True)
        self.turn_to_prompt()

    def action_toggle_chats(self) -> None:
        """Show and focus the list of chats. If it has the focus, hide it."""
        if self._chats.has_focus_within:
            self.toggle_class("toggled")
            self.conversation.composer.area.focus()
        else:
            self.action_open_chats()

    def action_open_chats(self) -> None:
        """Show the list and focus it."""
        self._show_chats(archive=False)

    def action_toggle_archive(self) -> None:
        """Show the archived chats in the list, or the others if the archived ones are shown."""
        self._show_chats(archive=not self._chats.shows_archive)

    def _show_chats(self, *, archive: bool) -> None:
        if not self._chats.display:
            self.toggle_class("toggled")
        self._chats.view(archive=archive)
        self._chats.query_one("OptionList").focus()

    @on(ChatList.Left)
    def turn_to_prompt(self) -> None:
        """Focus the prompt, and close the list of chats if it covers the prompt. Takes effect before the next key."""
        if self.has_class("-narrow"):
            self.remove_class("toggled")
        self.set_focus(self.conversation.composer.area, scroll_visible=False)

    @on(StatusLine.ModelAsked)
    def show_models(self) -> None:
        self.run_later("models")

    @on(StatusLine.DetailsAsked)
    def action_show_context(self) -> None:
        """Show which parts fill the context."""
        if (budget := self.conversation.composer.status.budget) is not None:
            self.app.notify(figures.budget_details(budget), title="Context", markup=False)

    # --- code and links in replies

    @on(MessageView.ExtractsAsked)
    @work(description="extracts")
    async def show_extracts(self, event: MessageView.ExtractsAsked) -> None:
        await reply_contents.choose_extract(self, event.message)

    def on_markdown_link_clicked(self, event: "Markdown.LinkClicked") -> None:
        self.open_address(event.href)

    @work(description="address")
    async def open_address(self, address: str) -> None:
        await reply_contents.open_address(self, address)

    def on_code_block_copy_asked(self, event: "CodeBlock.CopyAsked") -> None:
        self.app.copy_to_clipboard(event.code)

    @work(description="save")
    async def on_code_block_save_asked(self, event: "CodeBlock.SaveAsked") -> None:
        await reply_contents.save_code(self, event.code, event.language)
