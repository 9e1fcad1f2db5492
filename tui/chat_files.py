"""Files of chats: export of one chat or all of them, and import. Asks for the path if the user did not type it."""

import re
from itertools import chain, count
from pathlib import Path

from textual.dom import DOMNode

from tui.client import Chats
from tui.screens.dialog import ask
from tui.show_errors import show_errors
from tui.types import ChatId, ExportFormat


def file_stem(title: str) -> str:
    """Return a file name without its ending for a chat: "What a hearth is" becomes "what-a-hearth-is"."""
    return re.sub(r"[^\w]+", "-", title).strip("-").lower() or "chat"


def free_name(stem: str, ending: str, folder: Path) -> str:
    """Return a file name that `folder` does not contain yet: chat.md, or chat-2.md."""
    names = chain([f"{stem}{ending}"], (f"{stem}-{number}{ending}" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())


async def export_chat(node: DOMNode, chats: Chats, chat: ChatId, title: str, path: str) -> None:
    """Write a chat to a file: with the ending .json all branches, else the shown branch as Markdown."""
    wanted = path or await ask(node, "Export to:", free_name(file_stem(title), ".md", Path()), "*.md or *.json")
    if wanted:
        target = _absolute(wanted)
        form = ExportFormat.JSON if target.suffix == ".json" else ExportFormat.MARKDOWN
        with show_errors(node, f"/export {wanted}"):
            await chats.export(chat, target, form)
            node.app.notify(f"Saved to {target}", markup=False)


async def back_up(node: DOMNode, chats: Chats, path: str) -> None:
    """Write all chats to a JSON file."""
    wanted = path or await ask(node, "Export all chats to:", free_name("chats", ".json", Path()), "*.json")
    if wanted:
        target = _absolute(wanted)
        with show_errors(node, f"/backup {wanted}"):
            number = await chats.export_all(target)
            node.app.notify(f"Saved {_chats(number)} to {target}", markup=False)


async def import_chats(node: DOMNode, chats: Chats, path: str) -> None:
    """Read the chats of a JSON file."""
    wanted = path or await ask(node, "Import from:", hint="*.json")
    if wanted:
        with show_errors(node, f"/import {wanted}"):
            found = await chats.import_chats(_absolute(wanted))
            node.app.notify(f"Imported {_chats(len(found))}.", markup=False)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _chats(number: int) -> str:
    return f"{number} {'chat' if number == 1 else 'chats'}"
