"""Tests for the code and links of a message: finding them, and keys that act on them."""

from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, ScriptedClient
from tui.extracts import Address, Code, extracts
from tui.screens.dialog import Ask, Confirm
from tui.screens.extracts import ExtractsScreen
from tui.types import Finish, ReplyEnd, TextDelta

END = ReplyEnd(Finish.COMPLETE, USAGE)
REPLY = """Look [here](https://a.example/%20x?y=1):

```python title=one
def f():
    return "[/]"
```

- and in a list, where <https://a.example/%20x?y=1> is again:

  ```
  plain
  ```

Or at https://b.example.
"""


def test_code_blocks_and_links_are_extracted_in_order() -> None:
    assert extracts(REPLY) == [
        Address("https://a.example/%20x?y=1"),
        Code('def f():\n    return "[/]"', "python"),
        Code("plain", ""),
        Address("https://b.example"),
    ]
    assert extracts("Only words, and `code` in them.") == []
    assert extracts("    indented\n\n```\nnot closed") == [Code("indented", ""), Code("not closed", "")]


def test_code_and_links_are_reachable_by_keyboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def listed(chat: Chatting, *keys: str) -> None:
        """Open the list of the last message's extracts, and press keys in it."""
        chat.views()[-1].focus()
        await chat.pilot.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, ExtractsScreen))
        lines = [str(option.prompt) for option in chat.app.screen.query_one(OptionList).options]
        assert lines == [
            "link  https://a.example/%20x?y=1",
            "python, 2 lines  def f():",
            "code, 1 line  plain",
            "link  https://b.example",
        ]
        await chat.pilot.press(*keys)

    async def flow(chat: Chatting) -> None:
        monkeypatch.setattr(chat.app, "open_url", opened.append)
        await chat.say("code")
        await listed(chat, "down", "enter")
        await chat.until(lambda: chat.app.clipboard == 'def f():\n    return "[/]"')
        await listed(chat, "ctrl+c")
        await chat.until(lambda: chat.app.clipboard == "https://a.example/%20x?y=1")
        assert opened == []
        await listed(chat, "enter")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: opened == ["https://a.example/%20x?y=1"])
        await listed(chat, "ctrl+s", "down", "down", "ctrl+s")  # ctrl+s on a link must save nothing
        await chat.until(lambda: isinstance(chat.app.screen, Ask))
        chat.app.screen.query_one(Input).value = str(tmp_path / "new.txt")
        await chat.pilot.press("enter")
        await chat.until((tmp_path / "new.txt").exists)
        await chat.until(lambda: any("Saved to" in notice for notice in chat.notices()))
        assert (tmp_path / "new.txt").read_text() == "plain\n"
        chat.views()[0].focus()
        await chat.pilot.press("enter")
        await chat.until(lambda: "This message has no code or links." in chat.notices())

    run(ScriptedClient([TextDelta(REPLY), END]), flow)
