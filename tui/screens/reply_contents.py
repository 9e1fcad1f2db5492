"""Code and links of replies: copies, saves, and opens them. Nothing is opened unless the user agrees, or executed."""

import asyncio
from pathlib import Path

from textual.dom import DOMNode

from tui.plain_text import is_web_address
from tui.screens.dialog import ask, confirm
from tui.types import Message


async def choose_extract(node: DOMNode, message: Message) -> None:
    """Let the user choose code or a link of a message, and what to do with it."""
    from tui.extracts import Address, Code, extracts
    from tui.screens.extracts import ExtractsScreen

    found = await asyncio.to_thread(extracts, message.full_text)
    choice = await node.app.push_screen_wait(ExtractsScreen(found)) if found else None
    if not found:
        node.app.notify("This message has no code or links.", markup=False)
    elif choice is not None and isinstance(choice.extract, Address):
        await open_address(node, choice.extract.text)
    elif choice is not None and choice.to_file and isinstance(choice.extract, Code):
        await save_code(node, choice.extract.text, choice.extract.language)
    elif choice is not None:
        node.app.copy_to_clipboard(choice.extract.text)


async def open_address(node: DOMNode, address: str) -> None:
    """Ask the user, then open a web address. Other addresses are never opened."""
    if not is_web_address(address):
        node.app.notify(f"Not opened, because this is no web address: {address}", markup=False)
    elif await confirm(node, "Open this address in your browser?", address, "Open"):
        node.app.open_url(address)


async def save_code(node: DOMNode, text: str, language: str) -> None:
    """Save code to a new file, whose name the user chooses."""
    from tui.code_files import suggested_name

    wanted = await ask(node, "Save as:", suggested_name(language, Path.cwd()))
    if not wanted:
        return
    path = Path(wanted).expanduser().absolute()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        node.app.notify(f"{path}: {error.strerror}", severity="error", markup=False)
    else:
        node.app.notify(f"Saved to {path}", markup=False)
