"""The screen that lists the tool servers of mcp.json, and which of their tools this chat offers to the model."""

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui.client import ClientError, Tools
from tui.plain_text import sanitize, single_line
from tui.screens.dialog import Dialog
from tui.show_errors import show_errors
from tui.tool_servers import count_active
from tui.types import ToolInfo, ToolServer
from tui.widgets.rows import Rows
from tui.widgets.textual_internals import KeyFooter

EXAMPLE = """{
  "mcpServers": {
    "time": {"command": "uvx", "args": ["mcp-server-time"]},
    "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/path/of/a/folder"]}
  }
}"""
_INTERVAL = 0.5  # seconds between two polls of servers that are starting
_STYLES = {"ready": "$text-success", "failed": "$text-error", "starting": "$text-warning", "disabled": "dim"}
_INSTALL = "Tools need the package mcp: pip install 'inglenook[mcp]'"
_SEPARATOR = "__"  # separates the names of server and tool in a qualified name

Configure = Callable[[frozenset[str]], Awaitable[None]]


class ToolsScreen(Dialog[None]):
    """Lists servers with their tools. Changes take effect at once."""

    CSS_PATH = "tools.tcss"
    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space,enter", "switch", "Switch tool", priority=True),
        Binding("a", "switch_all", "All"),
        Binding("r", "restart", "Restart server"),
        Binding("v", "revoke", "Ask again"),
        Binding("c", "copy", "Copy example"),
        Binding("escape", "dismiss(None)", "Close"),
    ]

    def __init__(self, tools: Tools, disabled: frozenset[str], configure: Configure) -> None:
        """Prepare the screen for a chat. `configure` stores the set of disabled tools."""
        super().__init__()
        self._tools = tools
        self._disabled = disabled
        self._configure = configure
        self._servers: Sequence[ToolServer] | None = None

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Label("Looking for tool servers …", id="summary", classes="question", markup=False)
            yield Rows()
            yield Label("", id="about", markup=False)
            yield Label("", id="help", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.load()
        self.set_interval(_INTERVAL, self._follow_starts)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable only the keys that apply to the selected row."""
        server, tool = self._chosen()
        applies = {
            "switch": tool is not None,
            "switch_all": bool(self._names()),
            "restart": server is not None and server.state in ("failed", "disabled"),
            "revoke": tool is not None and tool.is_always_allowed,
            "copy": self._servers is not None and not self._servers,
        }
        return applies.get(action, True)

    def _follow_starts(self) -> None:
        if any(server.state == "starting" for server in self._servers or ()):
            self.load()

    @work(exclusive=True, group="load", description="load")
    async def load(self) -> None:
        with show_errors(self):
            try:
                self._show(await self._tools.servers())
            except ClientError as problem:
                self._show((), problem.sentences)

    def _show(self, servers: Sequence[ToolServer], problem: str = "") -> None:
        self._servers = servers
        self.set_class(not servers, "empty")
        if not servers:
            self.query_one(VerticalScroll).focus()  # the list is hidden, and a low terminal cuts off the help
        rows = self.query_one(OptionList)
        at = rows.highlighted or 0
        rows.set_options(Option(line) for line in self._lines())
        rows.highlighted = min(at, rows.option_count - 1) if rows.option_count else None
        self.query_one("#summary", Label).update(count_active(servers, self._disabled) or "No tools")
        self.query_one("#help", Label).update(sanitize(self._help(problem)))
        self._show_about()

    def _help(self, problem: str) -> str:
        first, *_ = paths = self._tools.config_paths()
        if self._servers:
            return f"Servers: {', '.join(map(str, paths))}"
        return "\n\n".join(
            filter(None, (problem, f"Add tool servers as in this example to {first}:", EXAMPLE, _INSTALL))
        )

    def _rows(self) -> list[tuple[ToolServer, ToolInfo | None]]:
        """Return the rows of the list: each server, followed by its tools."""
        return [(server, tool) for server in self._servers or () for tool in (None, *server.tools)]

    def _chosen(self) -> tuple[ToolServer | None, ToolInfo | None]:
        """Return the server and the tool of the selected row."""
        try:
            at = self.query_one(OptionList).highlighted
        except NoMatches:  # the screen is not composed yet
            return None, None
        rows = self._rows()
        return rows[at] if at is not None and at < len(rows) else (None, None)

    def _names(self) -> frozenset[str]:
        return frozenset(tool.name for _, tool in self._rows() if tool is not None)

    def _lines(self) -> list[Content]:
        return [self._server_line(server) if tool is None else self._tool_line(tool) for server, tool in self._rows()]

    def _server_line(self, server: ToolServer) -> Content:
        reason = f": {single_line(server.reason)}" if server.reason else ""
        state = single_line(server.state)
        left_out = f"  {server.left_out} left out" if server.left_out else ""
        name, shown = (single_line(server.name), "bold"), (state + reason, _STYLES.get(state, ""))
        return Content.assemble(name, "  ", shown, (left_out, "$text-warning"))

    def _tool_line(self, tool: ToolInfo) -> Content:
        mark = "  [ ] " if tool.name in self._disabled else "  [x] "
        allowed = "  always allowed" if tool.is_always_allowed else ""
        return Content.assemble(mark, single_line(tool.name).partition(_SEPARATOR)[2] or tool.name, (allowed, "dim"))

    @on(OptionList.OptionHighlighted)
    def _show_about(self) -> None:
        server, tool = self._chosen()
        about = tool.description if tool is not None else _about(server)
        self.query_one("#about", Label).update(single_line(sanitize(about)))
        self.refresh_bindings()

    async def action_switch(self) -> None:
        _, tool = self._chosen()
        if tool is not None:
            await self._disable(self._disabled ^ {tool.name})

    async def action_switch_all(self) -> None:
        """Disable all tools, or enable all if all are disabled."""
        names = self._names()
        await self._disable(self._disabled - names if names <= self._disabled else self._disabled | names)

    async def _disable(self, disabled: frozenset[str]) -> None:
        with show_errors(self):
            await self._configure(disabled)
            self._disabled = disabled
            self._show(self._servers or ())

    @work(group="restart", description="restart")
    async def action_restart(self) -> None:
        server, _ = self._chosen()
        if server is not None:
            with show_errors(self):
                self.call_after_refresh(self.load)  # show the state "starting"
                await self._tools.restart(server.name)
                self.load()

    @work(group="revoke", description="revoke")
    async def action_revoke(self) -> None:
        _, tool = self._chosen()
        if tool is not None:
            with show_errors(self):
                await self._tools.revoke(tool.name)
                self.load()

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(EXAMPLE)


def _about(server: ToolServer | None) -> str:
    """Say why a server failed, or why tools of it are missing."""
    if server is None or not server.left_out:
        return "" if server is None else server.reason
    return f"{server.left_out} tools are left out: the server has too many, or their schemas are too large."
