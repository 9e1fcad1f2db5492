"""The table of slash commands, used by the prompt, the command palette, and the help page."""

import enum
from dataclasses import dataclass


class Owner(enum.Enum):
    """The object that implements a command's action."""

    APP = "app"
    SCREEN = "screen"  # the chat screen
    CHAT = "chat"  # the open chat
    CHATS = "chats"  # the list of all chats
    DIALOGS = "dialogs"  # the dialogs about the open chat; `action` is a key of ChatDialogs.by_action


@dataclass(frozen=True, slots=True)
class Command:
    """One command. If `takes` is set, its action is called with a text, which may be empty."""

    name: str
    owner: Owner
    action: str
    help: str
    takes: str = ""  # name of the argument, in capitals
    key: str = ""  # key binding of the same action
    spare_key: str = ""  # key for the same action while the prompt has text, because `key` then moves the cursor
    aliases: tuple[str, ...] = ()  # other names

    @property
    def shown_key(self) -> str:
        """The key that works in any prompt, which is the only one that help, menu, and footer name."""
        return self.spare_key or self.key


COMMANDS = (
    Command("new", Owner.SCREEN, "new_chat", "New chat", key="ctrl+n", spare_key="f5", aliases=("clear",)),
    Command("private", Owner.SCREEN, "new_private_chat", "Private chat (nothing saved)"),
    Command("attach", Owner.DIALOGS, "attach", "Attach a text file to the next message", "PATH"),
    Command("stop", Owner.CHAT, "stop", "Stop the reply", key="escape"),
    Command("regenerate", Owner.CHAT, "regenerate", "Regenerate the last reply", key="ctrl+y", aliases=("retry",)),
    Command("copy", Owner.CHAT, "copy_last", "Copy the last reply"),
    Command("edit", Owner.CHAT, "edit_last", "Edit your last message (keeps the old branch)", key="ctrl+up"),
    Command("editor", Owner.DIALOGS, "editor", "Write the message in your editor", key="ctrl+g"),
    Command("branches", Owner.DIALOGS, "branches", "Show branches", key="ctrl+t"),
    Command("settings", Owner.DIALOGS, "settings", "System prompt, sampling, and presets of this chat", key="ctrl+s"),
    Command("system", Owner.DIALOGS, "system", "Set the system prompt of this chat", "TEXT", aliases=("sys",)),
    Command("set", Owner.DIALOGS, "set", "Set a sampling parameter of this chat", "NAME VALUE"),
    Command("preset", Owner.DIALOGS, "preset", "Use a preset for this chat", "NAME"),
    Command("tools", Owner.DIALOGS, "tools", "Tools of MCP servers, for this chat"),
    Command("context", Owner.SCREEN, "show_context", "Show what fills the context"),
    Command("room", Owner.CHAT, "trim_context", "Summarize or drop old messages", aliases=("compact",)),
    Command("resume", Owner.SCREEN, "open_chats", "Open an earlier chat"),
    Command("search", Owner.DIALOGS, "search", "Search all chats", "TEXT", key="ctrl+f", spare_key="f7"),
    Command("chats", Owner.SCREEN, "toggle_chats", "Go to the list of chats, or hide it", key="ctrl+b", spare_key="f6"),
    Command("title", Owner.CHATS, "rename", "Rename this chat", "TITLE", aliases=("rename",)),
    Command("pin", Owner.CHATS, "pin", "Pin or unpin"),
    Command("archive", Owner.CHATS, "archive", "Archive or unarchive"),
    Command("archived", Owner.SCREEN, "toggle_archive", "Show archived chats"),
    Command("delete", Owner.CHATS, "delete", "Delete this chat"),
    Command("undo", Owner.CHATS, "undelete", "Undo delete", key="ctrl+z in the list"),
    Command("export", Owner.CHATS, "export", "Export this chat (.json: all branches)", "PATH", aliases=("save",)),
    Command("backup", Owner.CHATS, "back_up", "Export all chats as JSON", "PATH"),
    Command("import", Owner.CHATS, "import", "Import chats from JSON", "PATH"),
    Command("models", Owner.APP, "models", "Browse models", key="f2"),
    Command("load", Owner.APP, "load", "Switch model", "NAME", aliases=("model",)),
    Command("engine", Owner.APP, "engine", "Engine activity", key="f3", aliases=("status",)),
    Command("address", Owner.APP, "copy_address", "Copy API URL", key="f4"),
    Command("theme", Owner.APP, "use_theme", "Change theme", "NAME"),
    Command("help", Owner.APP, "help", "Keys and commands", key="f1"),
    Command("quit", Owner.APP, "quit", "Quit", key="ctrl+q", aliases=("exit", "q")),
)


def find_command(name: str) -> Command | None:
    """Return the command with this name or alias; otherwise the only command whose name starts with it, or None."""
    exact = [command for command in COMMANDS if name in (command.name, *command.aliases)]
    starting = [command for command in COMMANDS if name and command.name.startswith(name)]
    return exact[0] if exact else starting[0] if len(starting) == 1 else None


def parse_command(text: str) -> tuple[str, str] | None:
    """Split "/name rest" into name and rest. Returns None for paths and for texts that are no command."""
    if not text.startswith("/") or "\n" in text:
        return None
    name, _, rest = text[1:].partition(" ")
    return None if "/" in name else (name, rest.strip())
