"""The chat screen: the list of chats, the open chat, and the top bar. Runs commands and opens dialogs."""

import importlib
from collections.abc import AsyncGenerator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal
from textual.dom import DOMNode
from textual.events import Resize
from textual.widgets import Footer

from tui import commands, figures, footer_keys
from tui.client import Client, ClientError
from tui.commands import COMMANDS, Command, Owner
from tui.double_press import DoublePress
from tui.drafts import Prompt
from tui.engine_types import Loading
from tui.open_chat import settings_of_new_chats
from tui.plain_text import sanitize
from tui.screens import chat_settings, reply_contents
from tui.screens.dialog import ask
from tui.show_errors import show_error, show_errors
from tui.terminal_window import TerminalWindow
from tui.tool_servers import ToolServers, count_active
from tui.types import ChatId, ToolServer
from tui.widgets.chat_list import ChatList
from tui.widgets.chat_view import ChatView
from tui.widgets.composer import Composer
from tui.widgets.conversation import Conversation
from tui.widgets.message_view import MessageView
from tui.widgets.reply_feed import ReplyFeed
from tui.widgets.status_line import StatusLine
from tui.widgets.textual_internals import SteadyScreen
from tui.widgets.top_bar import TopBar
from tui.widgets.welcome import Welcome

if TYPE_CHECKING:  # the Markdown widgets are imported after the prompt is shown
    from textual.widgets import Markdown

    from tui.widgets.code_block import CodeBlock

_NOTICE_SECONDS = 60.0  # seconds to show a notice about damage, which is several sentences long
_WARNED_SECONDS = 12.0
_IN_FOOTER = ("new", "chats", "search", "editor")
_QUIT_SECONDS = 2.0  # a second Ctrl+C within this time quits
_POLL_SECONDS = 1.5  # seconds between two polls for changes by other windows
_ENGINE_SECONDS = 3.0  # seconds between two looks at whether the engine still runs
_NONE = "No model. F2 to choose one."


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
        editor: str = "",
    ) -> None:
        """Create the screen and its widgets.

        With `resumes`, the user chooses one of the chats first. `editor`: the command that starts the user's editor.
        """
        super().__init__()
        self._editor = editor
        self._window = window
        self._resumes = resumes
        self._client = client
        self.conversation = Conversation(client)
        self._first_chat = chat
        self._question = question
        self._tool_servers = ToolServers(client.tools, self._report_failed_tools)
        self._quit = DoublePress(_QUIT_SECONDS)

    @property
    def is_unsettled(self) -> bool:
        return self.conversation.transcript.is_unsettled

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Horizontal():
            yield ChatList(self._client.chats, lambda: self.conversation.running_chats)
            yield self.conversation
        yield Footer(show_command_palette=False)

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
        self.query_one(Footer).visible = False
        self.conversation.composer.area.show_cursor = False

    def on_screen_resume(self) -> None:
        self.query_one(Footer).visible = True
        self.conversation.composer.area.show_cursor = True

    def on_mount(self) -> None:
        self.follow(self._client.engine.loading())
        self.set_interval(_ENGINE_SECONDS, self.watch_engine)
        self.set_interval(_POLL_SECONDS, self.poll)
        self.start()
        self.call_after_refresh(self.prepare)
        self.call_after_refresh(self.recommend)
        self.call_after_refresh(self.show_notices)
        self.call_after_refresh(self.find_tools)

    @work(group="start", description="prepare", thread=True)
    def prepare(self) -> None:
        """Import the modules that the first reply needs, while the user is still typing."""
        importlib.import_module("tui.widgets.reply_text")

    @work(group="start", description="start")
    async def start(self) -> None:
        """Open the chat given at startup, or restore the last draft. Send the question given at startup."""
        if self._first_chat is not None:
            await self.conversation.open(self._first_chat)
        else:
            await self._use_default_settings()
        await self.conversation.composer.start()
        if self._question:
            self.conversation.outbox.send(Prompt(sanitize(self._question)))
        elif self._resumes:
            self.action_search()
        elif self._first_chat is None:
            await self._offer_last_chat()

    async def _use_default_settings(self) -> None:
        """Apply the preset that the user made the default."""
        chat = self.conversation.chat
        with show_errors(self):
            settings = await settings_of_new_chats(self._client.chats)
            if chat.id is None:
                await self.conversation.configure(chat, settings)

    async def _offer_last_chat(self) -> None:
        with show_errors(self):
            chats = [one for one in await self._client.chats.summaries() if one.message_count and not one.private]
            self.conversation.welcome.offer(max(chats, key=lambda one: one.updated, default=None))

    @work(group="start", description="recommend")
    async def recommend(self) -> None:
        """Suggest a better model to a new user while the default one loads."""
        with show_errors(self):
            if (better := await self._client.models.recommended()) is not None:
                self.conversation.welcome.recommend(better)

    @work(group="start", description="notices")
    async def show_notices(self) -> None:
        """Show notices of the store, and show in the top bar whether chats are saved."""
        async for notice in self._client.chats.notices():
            self.query_one(TopBar).is_saved = notice.is_saved
            self.app.notify(
                notice.remedy, title=notice.message, severity="warning", timeout=_NOTICE_SECONDS, markup=False
            )

    @work(group="loading", exclusive=True, description="loading")
    async def follow(self, loading: AsyncGenerator[Loading, None]) -> None:
        """Show the progress of loading a model. Use the model once it is loaded."""
        status, welcome = self.conversation.composer.status, self.conversation.welcome
        model = self.conversation.model
        try:
            async for step in loading:
                model = step.model if step.loaded else ""
                status.loading_model = step
                welcome.show_loading(step)
                if step.warning:
                    self.app.notify(step.warning, severity="warning", timeout=_WARNED_SECONDS, markup=False)
        except ClientError as error:
            if not model:
                welcome.show_failure(error)
            if model or not welcome.display:
                show_error(self, error)
        welcome.show_loaded(model)
        self.conversation.use_model(model)
        status.model = model or _NONE
        status.loading_model = None
        self.conversation.composer.measure()

    @work(exclusive=True, group="engine", description="engine")
    async def watch_engine(self) -> None:
        """Show whether the engine of the loaded model has exited, for example because memory ran out."""
        status = self.conversation.composer.status
        is_idle = bool(self.conversation.model) and status.loading_model is None
        status.is_stopped = is_idle and not await self._client.engine.is_ready()

    async def poll(self) -> None:
        """Show changes by other windows in the list and in the open chat."""
        self.query_one(ChatList).poll()
        await self._merge_other_windows()

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
        self._show_title()
        self.query_one(ChatList).mark_open(event.chat.id)
        self.refresh_bindings()
        if event.chat.id is not None:
            self.conversation.welcome.offer(None)

    @on(ReplyFeed.LongReplyEnded)
    def call_user(self, event: ReplyFeed.LongReplyEnded) -> None:
        """Ring the bell and send a notification, unless the terminal has the focus or the user wants silence."""
        if self._window.rings and not self.app.app_focus:
            chat = self.conversation.chat
            self.app.bell()
            is_named = event.chat == chat.id and not chat.private
            self._window.notify(f"Reply finished: {chat.title}" if is_named else "Reply finished")

    @on(ChatView.Activity)
    def show_activity(self, event: ChatView.Activity) -> None:
        self.query_one(TopBar).activity = event.text

    @on(Composer.EnteredEmpty)
    def accept_offer(self) -> None:
        if self.conversation.welcome.display:
            self.conversation.welcome.enter()

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
            self._show_title()

    @on(ChatList.Archived)
    def archive(self, event: ChatList.Archived) -> None:
        if event.chat == self.conversation.chat.id:
            self.conversation.chat.archive(archived=event.archived)
            self._show_title()

    @on(ChatList.Counted)
    async def count_stored(self, event: ChatList.Counted) -> None:
        if event.chat == self.conversation.chat.id:
            self.conversation.chat.stored_count = event.count
            await self._merge_other_windows()

    async def _merge_other_windows(self) -> None:
        if self.conversation.chat.is_behind:
            await self.conversation.merge_other_windows()

    def _show_title(self) -> None:
        self.query_one(TopBar).chat_title = self.conversation.chat.title
        self._show_window_title()

    def _show_window_title(self) -> None:
        """Show the chat in the window's title, which other programs record. The title of a private chat stays here."""
        chat = self.conversation.chat
        self._window.show_title("Private chat" if chat.private else chat.title)

    # --- commands

    @on(Composer.Submitted)
    def submit(self, event: Composer.Submitted) -> None:
        self.conversation.outbox.submit(event.prompt)

    @on(Composer.CommandTyped)
    async def run_typed(self, event: Composer.CommandTyped) -> None:
        if (found := commands.find_command(event.name)) is not None:
            await self._run(found, event.argument)
        else:
            names = [name for one in COMMANDS for name in (one.name, *one.aliases)]
            close = get_close_matches(event.name, names, n=1)
            advice = f"Did you mean /{close[0]}?" if close else "F1 lists all commands."
            self.app.notify(f"Unknown command /{event.name}. {advice}", severity="warning", markup=False)
            self._put_back(f"/{event.name} {event.argument}".strip())

    def _put_back(self, command: str) -> None:
        """Write a command that failed into the prompt again, so that the user can correct it."""
        composer = self.conversation.composer
        composer.write(Prompt.of([Prompt(command), composer.prompt]))

    def run_later(self, name: str) -> None:
        """Run a command when this screen is visible."""
        self.call_after_refresh(self.action_run_command, name)

    async def action_run_command(self, name: str) -> None:
        if (found := commands.find_command(name)) is not None:
            await self._run(found, "")

    async def _run(self, command: Command, argument: str) -> None:
        owners: dict[Owner, DOMNode] = {
            Owner.APP: self.app,
            Owner.SCREEN: self,
            Owner.CHAT: self.conversation,
            Owner.CHATS: self.query_one(ChatList),
        }
        arguments = (argument,) if command.takes else ()
        await self.app.run_action(("", command.action, arguments), owners[command.owner])

    async def action_new_chat(self) -> None:
        await self.conversation.open_new()
        self.turn_to_prompt()

    async def action_new_private_chat(self) -> None:
        await self.conversation.open_new(private=True)
        self.turn_to_prompt()

    def action_toggle_chats(self) -> None:
        """Hide the list of chats if it is visible, or show it."""
        self.toggle_class("toggled")
        if self.query_one(ChatList).display:
            self.action_open_chats()
        else:
            self.conversation.composer.area.focus()

    def action_open_chats(self) -> None:
        """Show the list and focus it."""
        self._show_chats(archive=False)

    def action_toggle_archive(self) -> None:
        """Show the archived chats in the list, or the others if the archived ones are shown."""
        self._show_chats(archive=not self.query_one(ChatList).shows_archive)

    def _show_chats(self, *, archive: bool) -> None:
        chats = self.query_one(ChatList)
        if not chats.display:
            self.toggle_class("toggled")
        chats.view(archive=archive)
        chats.query_one("OptionList").focus()

    @on(ChatList.Left)
    def turn_to_prompt(self) -> None:
        """Focus the prompt, and close the list of chats if it covers the prompt. Takes effect before the next key."""
        if self.has_class("-narrow"):
            self.remove_class("toggled")
        self.set_focus(self.conversation.composer.area, scroll_visible=False)

    @work(description="search")
    async def action_search(self, text: str = "") -> None:
        from tui.screens.search import SearchScreen

        found = await self.app.push_screen_wait(SearchScreen(self._client.chats, text))
        if found is not None:
            await self.conversation.open(found.chat, found.message)

    @work(description="branches")
    async def action_branches(self) -> None:
        from tui.screens.branches import BranchesScreen

        chat = self.conversation.chat
        if chat.leaf is None:
            self.conversation.notify_empty()
            return
        message = await self.app.push_screen_wait(BranchesScreen(chat.branches, chat.leaf))
        if message is not None and chat is self.conversation.chat:
            await self.conversation.show_branch(chat.branches.newest_leaf(message), message)

    @work(description="attach")
    async def action_attach(self, path: str = "") -> None:
        wanted = path or await ask(self, "Attach file:")
        if wanted:
            self.conversation.composer.attach_path(Path(wanted))

    @work(description="editor")
    async def action_open_editor(self) -> None:
        """Edit the draft in the user's editor. Private drafts are never written to disk, and an editor needs a file."""
        from tui.editor import edit

        composer = self.conversation.composer
        if self.conversation.chat.private:
            self.app.notify("A private chat has no editor, because editors write files.", markup=False)
            return
        with show_errors(self):
            before = composer.area.text
            after = await edit(self.app, self._editor, before)
            composer.area.replace_end(before, after)

    @on(StatusLine.ModelAsked)
    def show_models(self) -> None:
        self.run_later("models")

    @on(StatusLine.DetailsAsked)
    def action_show_context(self) -> None:
        """Show which parts fill the context."""
        if (budget := self.conversation.composer.status.budget) is not None:
            self.app.notify(figures.budget_details(budget), title="Context", markup=False)

    # --- settings

    @work(description="settings")
    async def action_settings(self) -> None:
        await chat_settings.edit(self.conversation, self._client)

    @work(description="tools")
    async def action_tools(self) -> None:
        await chat_settings.choose_tools(self.conversation, self._client)
        self.find_tools()

    @work(description="system")
    async def action_system(self, text: str = "") -> None:
        """Set the system prompt. Without a text, open the settings instead."""
        if text:
            await chat_settings.set_system_prompt(self.conversation, text)
        else:
            self.action_settings()

    @work(description="set")
    async def action_set(self, text: str = "") -> None:
        if not await chat_settings.set_parameter(self.conversation, text) and text:
            self._put_back(f"/set {text}")

    @work(description="preset")
    async def action_preset(self, name: str = "") -> None:
        await chat_settings.use_preset(self.conversation, self._client, name)

    @work(exclusive=True, group="tools", description="tools")
    async def find_tools(self) -> None:
        with show_errors(self):
            await self._tool_servers.start()

    def _report_failed_tools(self, server: ToolServer) -> None:
        self.app.notify(
            f"{server.reason} /tools restarts it.",
            title=f"The tool server {server.name} failed.",
            severity="warning",
            markup=False,
        )

    @property
    def active_tools(self) -> str:
        """Text with the number of tools that the open chat offers; empty if there are no servers."""
        return count_active(self._tool_servers.found, self.conversation.chat.settings.disabled_tools)

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
