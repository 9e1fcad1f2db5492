"""The slash commands: one table for the prompt, the command palette, and the help page."""

import enum
from dataclasses import dataclass
from itertools import takewhile


class Owner(enum.Enum):
    """The part of the program that has the action of a command."""

    APP = "app"
    SCREEN = "screen"  # the chat screen
    CHAT = "chat"  # the open chat
    CHATS = "chats"  # the list of all chats


@dataclass(frozen=True, slots=True)
class Command:
    """One command. If `takes` is set, its action is called with a text, which may be empty."""

    name: str
    owner: Owner
    action: str
    help: str
    takes: str = ""  # the argument's name, in capitals
    key: str = ""  # key binding of the same action
    spare_key: str = ""  # the same, in a prompt with text, where `key` moves the cursor

    @property
    def keys(self) -> str:
        return ", ".join(filter(None, (self.key, self.spare_key)))


COMMANDS = (
    Command("new", Owner.SCREEN, "new_chat", "New chat", key="ctrl+n", spare_key="f5"),
    Command("private", Owner.SCREEN, "new_private_chat", "Private chat (nothing saved)"),
    Command("attach", Owner.SCREEN, "attach", "Attach a text file to the next message", "PATH"),
    Command("stop", Owner.CHAT, "stop", "Stop the reply", key="escape"),
    Command("regenerate", Owner.CHAT, "regenerate", "Regenerate the last reply", key="ctrl+y"),
    Command("edit", Owner.CHAT, "edit_last", "Edit your last message (keeps the old branch)", key="ctrl+up"),
    Command("branches", Owner.SCREEN, "branches", "Show branches", key="ctrl+t"),
    Command("settings", Owner.SCREEN, "settings", "System prompt, sampling, and presets of this chat", key="ctrl+s"),
    Command("system", Owner.SCREEN, "system", "Set the system prompt of this chat", "TEXT"),
    Command("preset", Owner.SCREEN, "preset", "Use a preset for this chat", "NAME"),
    Command("room", Owner.CHAT, "trim_context", "Free up context: summarize or drop old messages"),
    Command("search", Owner.SCREEN, "search", "Search all chats", "TEXT", key="ctrl+f", spare_key="f7"),
    Command("chats", Owner.SCREEN, "toggle_chats", "Show or hide the list of chats", key="ctrl+b", spare_key="f6"),
    Command("title", Owner.CHATS, "rename", "Rename this chat", "TITLE"),
    Command("pin", Owner.CHATS, "pin", "Pin or unpin"),
    Command("archive", Owner.CHATS, "archive", "Archive or unarchive"),
    Command("archived", Owner.CHATS, "toggle_archived", "Show archived chats"),
    Command("delete", Owner.CHATS, "delete", "Delete this chat"),
    Command("undo", Owner.CHATS, "undelete", "Undo delete", key="ctrl+z in the list"),
    Command("export", Owner.CHATS, "export", "Export (.md: this branch, .json: everything)", "PATH"),
    Command("import", Owner.CHATS, "import", "Import chats from JSON", "PATH"),
    Command("models", Owner.APP, "models", "Browse models", key="f2"),
    Command("load", Owner.APP, "load", "Switch model", "NAME"),
    Command("engine", Owner.APP, "engine", "Engine activity", key="f3"),
    Command("address", Owner.APP, "copy_address", "Copy API URL", key="f4"),
    Command("theme", Owner.APP, "change_theme", "Change theme"),
    Command("help", Owner.APP, "help", "Keys and commands", key="f1"),
    Command("quit", Owner.APP, "quit", "Quit", key="ctrl+q"),
)


def find_command(name: str) -> Command | None:
    """Return the command of this name, or None."""
    return next((command for command in COMMANDS if command.name == name), None)


def parse_command(text: str) -> tuple[str, str] | None:
    """Split "/name rest" into name and rest. Return None for other texts and for paths."""
    if not text.startswith("/") or "\n" in text:
        return None
    name, _, rest = text[1:].partition(" ")
    return None if "/" in name else (name, rest.strip())


def matching(text: str) -> list[Command]:
    """Return the commands whose names start with the typed text."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]


def complete(text: str) -> str:
    """Return `text` with the command's name completed as far as it is unambiguous."""
    found = matching(text)
    if len(found) == 1:
        return f"/{found[0].name}{' ' if found[0].takes else ''}"
    certain = takewhile(lambda letters: len({*letters}) == 1, zip(*(command.name for command in found), strict=False))
    return f"/{''.join(first for first, *_ in certain)}" if found else text
