"""The screen that shows the branches of a chat as a tree. Returns the message that the user chose."""

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Label, Tree
from textual.widgets.tree import TreeNode

from tui.branches import Branches
from tui.plain_text import start
from tui.screens.dialog import Dialog
from tui.types import AUTHORS, MessageId

_LONGEST_LINE = 80  # maximum number of characters shown of a message


class BranchesScreen(Dialog[MessageId]):
    """Shows the tree of messages. Only branches are indented; consecutive messages are at the same level."""

    CSS_PATH = "branches.tcss"

    def __init__(self, branches: Branches, leaf: MessageId | None) -> None:
        super().__init__()
        self._branches = branches
        self._shown = {message.id for message in branches.path(leaf)}

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "↑↓ choose · ⏎ show · esc close"
            yield Label("Branches of this chat", classes="question")
            yield Tree[MessageId]("", id="tree")

    def on_mount(self) -> None:
        tree = self.query_one("#tree", Tree)
        tree.show_root = False
        last: TreeNode[MessageId] | None = None
        waiting: list[tuple[TreeNode[MessageId], MessageId]] = []
        waiting.extend((tree.root, child) for child in reversed(self._branches.children(None)))
        while waiting:
            node, message = waiting.pop()
            children = self._branches.children(message)
            branch = len(self._branches.siblings(message)) > 1
            label = Text(self._line(message), style="bold" if message in self._shown else "dim")
            below = node
            if branch and children:
                below = node.add(label, data=message, expand=True)
            else:
                node.add_leaf(label, data=message)
            if message in self._shown:
                last = node.children[-1]
            waiting.extend((below, child) for child in reversed(children))
        tree.root.expand()
        tree.focus()
        if last is not None:
            self.call_after_refresh(tree.move_cursor, last)

    def _line(self, message: MessageId) -> str:
        one = self._branches[message]
        return f"{AUTHORS[one.role]}: {start(one.full_text, _LONGEST_LINE)}"

    @on(Tree.NodeSelected)
    def choose(self, event: Tree.NodeSelected[MessageId]) -> None:
        if event.node.data is not None:
            self.dismiss(event.node.data)
