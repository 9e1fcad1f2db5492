"""Tests for actions on whole chats: titles, pins, archive, deletion and undo, drafts, search, and files."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from textual.message import Message as Posted
from textual.widgets import OptionList

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.screens.dialog import Ask, Confirm
from tui.types import ContextBudget, ExportFormat, Finish, ReplyEnd, SearchHit, TextDelta
from tui.widgets.chat_list import ChatList
from tui.widgets.top_bar import TopBar

WIDE = (120, 30)
END = ReplyEnd(Finish.COMPLETE, USAGE)


def lines(chat: Chatting) -> list[str]:
    return [line.strip() for line in listed(chat)]


def listed(chat: Chatting) -> list[str]:
    """Return the lines of the chat list with their marks, without group headings."""
    options = chat.screen.query_one("ChatList OptionList", OptionList).options
    return [str(option.prompt).rstrip() for option in options if option.id is not None]


async def agree(chat: Chatting) -> None:
    """Press the second button of a question."""
    await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.app.screen.query("#yes"))
    await chat.pilot.press("right", "enter")


def test_chats_are_listed_opened_renamed_pinned_archived_deleted_and_restored() -> None:
    client = ScriptedClient()
    first = client.keep("First", "a question", "an answer")
    client.keep("Second", "other", "words")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: lines(chat) == ["Second", "First"])
        chat.app.screen.query_one("ChatList OptionList").focus()
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        assert chat.app.focused is chat.composer.area
        await chat.type("/title My [b]title[/b]")
        await chat.until(lambda: lines(chat) == ["Second", "› My [b]title[/b]"])
        assert chat.app.screen.query_one(TopBar).chat_title == "My [b]title[/b]"
        await chat.type("/pin")
        await chat.until(lambda: lines(chat)[0] == "› My [b]title[/b]")
        await chat.type("/archive")
        await chat.until(lambda: lines(chat) == ["Second"])
        assert chat.app.screen.query_one(TopBar).chat_title == "Archived · My [b]title[/b]"
        await chat.type("/archived")
        await chat.until(lambda: lines(chat) == ["› My [b]title[/b]"])
        await chat.type("/archive")
        await chat.until(lambda: lines(chat) == [])
        assert chat.app.screen.query_one(TopBar).chat_title == "My [b]title[/b]"
        await chat.type("/archived")
        await chat.until(lambda: len(lines(chat)) == 2)
        await chat.type("/delete")
        await agree(chat)
        await chat.until(lambda: lines(chat) == ["Second"] and chat.texts() == [])
        assert first in client.chats.deleted
        await chat.type("/undo")
        await chat.until(lambda: len(lines(chat)) == 2 and chat.texts() == ["a question", "an answer"])

    run(client, flow, size=WIDE)


def test_drafts_stay_with_their_chats_and_inputs_are_recalled() -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")
    client.chats.drafts[None] = "not sent"
    client.chats.sent = ["newest", "older"]

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.composer.area.text == "not sent")
        await chat.pilot.press("up", "up")
        assert chat.composer.area.text == "older"
        await chat.pilot.press("down", "down")
        assert chat.composer.area.text == "not sent"
        await chat.type(", still", enter=False)
        await chat.conversation.open(name)
        assert chat.composer.area.text == ""
        assert client.chats.drafts[None] == ""
        await chat.until(lambda: "  draft not sent, still" in listed(chat))
        await chat.type("for this chat", enter=False)
        await chat.until(lambda: client.chats.drafts.get(name) == "for this chat")
        await chat.conversation.open(name)
        assert chat.composer.area.text == "for this chat"

    run(client, flow, size=WIDE)


def test_search_opens_the_message() -> None:
    client = ScriptedClient()
    client.keep("Hearths", "What is an inglenook?", "A seat by\nthe fireside, so warm.", "Thanks", "Welcome")
    client.keep("Other", "nothing", "here")

    async def flow(chat: Chatting) -> None:
        await chat.type("/search fire")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "1 result in 1 chat")
        found = chat.app.screen.query_one(OptionList).get_option_at_index(0)
        assert str(found.prompt).splitlines()[1] == "  Reply: A seat by the fireside, so warm."
        await chat.pilot.press("enter")
        await chat.until(lambda: len(chat.texts()) == 4)
        await chat.until(lambda: chat.app.focused in chat.views())
        assert chat.views()[1].has_focus

    run(client, flow)


def test_search_names_a_chat_once_and_hides_code_fences() -> None:
    client = ScriptedClient()
    client.keep("Tables", "Code for a table?", "Here:\n```python\ntable = []\n```\nDone.")

    async def flow(chat: Chatting) -> None:
        await chat.type("/search table")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "2 results in 1 chat")
        first, second = (str(option.prompt) for option in chat.app.screen.query_one(OptionList).options)
        assert first.startswith("Tables")
        assert second == "  Reply: Here: table = [] Done."

    run(client, flow)


def test_search_lists_the_results_of_a_chat_together() -> None:
    client = ScriptedClient()
    first, second = client.keep("First", "fire", "fire"), client.keep("Second", "fire")
    search = client.chats.search

    async def mixed(text: str) -> list[SearchHit]:
        one, other = [[hit for hit in await search(text) if hit.chat.id == chat] for chat in (first, second)]
        return [one[0], *other, one[1]]

    client.chats.search = mixed  # type: ignore[method-assign]

    async def flow(chat: Chatting) -> None:
        await chat.type("/search fire")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "3 results in 2 chats")
        prompts = [str(option.prompt) for option in chat.app.screen.query_one(OptionList).options]
        assert [prompt.split("  ")[0] for prompt in prompts] == ["First", "", "Second"]

    run(client, flow)


def test_frame_of_the_search_ends_above_the_prompt() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f7")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "No chats yet.")
        dialog = chat.app.screen.query_one(".dialog")
        for size in ((80, 24), (120, 40), (160, 48)):
            await chat.pilot.resize_terminal(*size)
            await chat.until(lambda: 0 < dialog.region.bottom <= chat.composer.area.region.y)
            assert chat.label(".question") == "Search all chats"

    run(ScriptedClient(), flow)


def test_frame_of_a_question_ends_above_the_prompt_in_a_low_terminal() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/attach")
        await chat.until(lambda: isinstance(chat.app.screen, Ask))
        dialog = chat.app.screen.query_one(".dialog")
        await chat.until(lambda: 0 < dialog.region.bottom <= chat.composer.area.region.y)

    run(ScriptedClient(), flow, size=(60, 15))


@pytest.mark.parametrize("searched", [[], [*"hello"]])
def test_long_title_leaves_room_for_the_age_of_a_chat(searched: list[str]) -> None:
    client = ScriptedClient()
    client.keep("A title that is longer than the line " * 4, "hello")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f7", *searched)
        await chat.until(lambda: chat.label("#found") == ("1 result in 1 chat" if searched else "Last chats"))
        await chat.until(lambda: any("A title" in line for line in chat.lines()))
        assert any(re.search(r"A title that .*…  \d{4}-\d\d-\d\d  ", line) for line in chat.lines())

    run(client, flow)


def test_search_lists_the_last_chats_before_anything_is_typed() -> None:
    client = ScriptedClient()
    client.keep("Older", "a question", "an answer", pinned=True)
    client.keep("Newer", "another", "words")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f7")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "Last chats")
        options = chat.app.screen.query_one(OptionList).options
        assert [str(option.prompt).split("  ")[0] for option in options] == ["Newer", "Older"]
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])

    run(client, flow)


def test_export_and_failed_import_are_reported(tmp_path: Path) -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.type(f"/export {tmp_path}/chat.json")
        await chat.until(lambda: client.chats.exported)
        assert client.chats.exported == [(name, tmp_path / "chat.json", ExportFormat.JSON)]
        await chat.type(f"/backup {tmp_path}/all.json")
        await chat.until(lambda: client.chats.backups == [tmp_path / "all.json"])
        saved = f"Saved 1 chat to {tmp_path}/all.json"  # a long path is broken after slashes
        await chat.until(lambda: any(saved in notice.replace("\n", "") for notice in chat.notices()))
        await chat.type("/import")
        await chat.until(lambda: chat.app.screen.query("Ask Input"))
        await chat.pilot.press(*"x.json", "enter")
        await chat.until(lambda: any("is no file of chats" in notice for notice in chat.notices()))

    run(client, flow, chat=name)


def test_default_name_of_an_export_is_the_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    name = client.keep("What a hearth is", "a question", "an answer")
    (tmp_path / "what-a-hearth-is.md").touch()
    monkeypatch.chdir(tmp_path)

    async def flow(chat: Chatting) -> None:
        await chat.type("/export")
        await chat.until(lambda: chat.app.screen.query("Ask Input"))
        await chat.pilot.press("enter")
        await chat.until(lambda: client.chats.exported)
        assert client.chats.exported == [(name, tmp_path / "what-a-hearth-is-2.md", ExportFormat.MARKDOWN)]

    run(client, flow, chat=name)


@pytest.mark.share(3)
@pytest.mark.parametrize("command", ["copy", "regenerate", "edit", "delete", "branches", "export x.md", "pin"])
def test_commands_report_that_the_chat_is_empty(command: str) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type(f"/{command}")
        await chat.until(lambda: chat.notices() == ["This chat is empty."])

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("texts", [["a question"], ["a question", ""]])
def test_copy_reports_that_there_is_no_text(texts: list[str]) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.conversation.open(chat.client.keep("Rivers", *texts))
        await chat.type("/copy")
        await chat.until(lambda: chat.notices() == ["Nothing to copy: there is no reply with text."])

    run(ScriptedClient(), flow)


def test_private_chat_is_created_as_private() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/private")
        await chat.until(lambda: chat.app.screen.query_one(TopBar).chat_title == "Private chat")
        await chat.say("secret")
        assert [kept.summary.private for kept in chat.client.chats.chats.values()] == [True]

    run(ScriptedClient(), flow)


def test_private_chat_keeps_its_mark_when_renamed() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        bar = chat.screen.query_one(TopBar)
        await chat.type("/private")
        await chat.until(lambda: bar.chat_title == "Private chat")
        assert any("│ Private: nothing is saved. " in line for line in chat.lines())
        await chat.say("secret")
        await chat.until(lambda: bar.chat_title == "Private · A title of the client")
        await chat.until(lambda: [line[:17] for line in listed(chat)] == ["› private A title"])
        await chat.type("/title Mine")
        await chat.until(lambda: bar.chat_title == "Private · Mine")
        await chat.type("/pin")
        await chat.until(lambda: listed(chat) == ["› private Mine"])
        await chat.pilot.resize_terminal(40, 12)
        await chat.until(lambda: any(line.startswith(" Private · Mine") for line in chat.lines()))
        assert any("╭─ Private ─" in line for line in chat.lines())
        await chat.pilot.resize_terminal(*WIDE)
        await chat.type("/search secret")
        await chat.until(lambda: any("private Mine" in line for line in chat.lines()))
        await chat.pilot.press("escape", "ctrl+n")
        await chat.until(lambda: bar.chat_title == "New chat")
        assert not any("nothing is saved" in line for line in chat.lines())

    run(client, flow, size=WIDE)


@pytest.mark.usefixtures("quick_polls")
def test_list_shows_changes_of_other_windows_and_running_replies() -> None:
    client = ScriptedClient([TextDelta("begun"), WAIT, END])
    first = client.keep("First", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: lines(chat) == ["First"])
        await client.chats.rename(first, "Renamed elsewhere")
        await chat.until(lambda: lines(chat) == ["Renamed elsewhere"])
        await chat.conversation.open(first)
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 4)
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: "⠋" <= lines(chat)[0][0] <= "⣿")
        client.replies.gate.set()
        await chat.until(lambda: lines(chat) == ["Renamed elsewhere"])

    run(client, flow, size=WIDE)


def test_title_of_the_open_chat_is_that_of_the_list() -> None:
    client = ScriptedClient()
    name = client.keep("", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        bar = chat.screen.query_one(TopBar)
        await chat.conversation.open(name)
        await chat.until(lambda: bar.chat_title == "New chat")
        await client.chats.rename(name, "a question")
        await chat.until(lambda: bar.chat_title == "a question")
        assert chat.conversation.chat.title == "a question"

    run(client, flow, size=WIDE)


def test_chat_without_a_title_has_a_name_in_the_search() -> None:
    client = ScriptedClient()
    client.keep("", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f7")
        await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "Last chats")
        row = chat.app.screen.query_one(OptionList).options[0]
        assert str(row.prompt).startswith("New chat  ")

    run(client, flow)


def test_list_that_gets_the_focus_highlights_its_first_chat() -> None:
    client = ScriptedClient()
    client.keep("First", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: lines(chat) == ["First"])
        await chat.pilot.press("f6", "delete")
        await chat.until(lambda: chat.label(".about").startswith("First"))

    run(client, flow)


def test_archive_opens_in_a_narrow_terminal_and_chats_are_listed_again() -> None:
    client = ScriptedClient()
    client.keep("First", "a question", "an answer")
    archived = client.keep("Second", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await client.chats.archive(archived, True)
        await chat.type("/archived")
        await chat.until(lambda: any("Archive" in line for line in chat.lines()))
        await chat.until(lambda: any("Second" in line for line in chat.lines()))
        await chat.pilot.press("escape")
        await chat.type("/resume")
        await chat.until(lambda: any("First" in line for line in chat.lines()))
        assert not any("Second" in line for line in chat.lines())

    run(client, flow, size=(80, 24))


def test_footer_names_the_actions_of_the_shown_list() -> None:
    client = ScriptedClient()
    client.keep("First", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.type("/resume")
        await chat.until(lambda: "Archive" in chat.lines()[-1] and "View archive" in chat.lines()[-1])
        await chat.pilot.press("ctrl+a", "ctrl+v")
        await chat.until(lambda: "Unarchive" in chat.lines()[-1] and "View chats" in chat.lines()[-1])
        assert "View archive" not in chat.lines()[-1]
        await chat.pilot.press("ctrl+a")
        await chat.until(lambda: not any(chat.client.chats.chats[one].summary.archived for one in client.chats.chats))

    run(client, flow, size=WIDE)


@pytest.mark.usefixtures("quick_polls")
def test_list_marks_replies_of_other_windows() -> None:
    client = ScriptedClient()
    name = client.keep("First", "a question", "an answer")

    def set_replying(value: bool) -> None:
        chat = client.chats.chats[name]
        client.chats.chats[name] = replace(chat, summary=replace(chat.summary, replying_elsewhere=value))

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: lines(chat) == ["First"])
        set_replying(True)
        await chat.until(lambda: "⠋" <= lines(chat)[0][0] <= "⣿")
        set_replying(False)
        await chat.until(lambda: lines(chat) == ["First"])

    run(client, flow, size=WIDE)


def test_list_groups_chats_by_day_and_shows_their_age() -> None:
    client = ScriptedClient()
    for title, hours in (("Old", 24 * 400), ("Recent", 0.1)):
        chat = client.chats.chats[client.keep(title, "a question", "an answer")]
        summary = replace(chat.summary, updated=time.time() - hours * 3600)
        client.chats.chats[summary.id] = replace(chat, summary=summary)
    client.keep("Kept", "a question", pinned=True)

    async def flow(chat: Chatting) -> None:
        options = chat.screen.query_one("ChatList OptionList", OptionList).options
        await chat.until(lambda: len(chat.screen.query_one("ChatList OptionList", OptionList).options) == 6)
        options = chat.screen.query_one("ChatList OptionList", OptionList).options
        groups = [str(option.prompt).strip() for option in options if option.disabled]
        assert groups[0] == "Pinned"
        assert groups[-1] == "Older"
        assert str(options[3].prompt).endswith(" 6m")

    run(client, flow, size=WIDE)


def test_key_of_the_list_goes_to_it_before_it_hides_it() -> None:
    client = ScriptedClient()
    client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        chats = chat.screen.query_one(ChatList)
        await chat.until(lambda: chats.display and chat.app.focused is chat.composer.area)
        await chat.pilot.press("f6")
        await chat.until(lambda: chats.has_focus_within)
        await chat.pilot.press("f6")
        await chat.until(lambda: not chats.display and chat.app.focused is chat.composer.area)
        await chat.pilot.press("f6")
        await chat.until(lambda: chats.display and chats.has_focus_within)

    run(client, flow, size=WIDE)


def test_list_covers_the_chat_in_a_narrow_terminal() -> None:
    client = ScriptedClient()
    client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        chats = chat.app.screen.query_one(ChatList)
        assert not chats.display
        await chat.pilot.press("ctrl+b")
        await chat.until(lambda: chats.display and not chat.conversation.display)
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: chat.conversation.display and chat.texts() == ["a question", "an answer"])
        await chat.pilot.resize_terminal(*WIDE)
        await chat.until(lambda: chats.display and chat.conversation.display)

    run(client, flow)


@pytest.mark.parametrize(("columns", "width"), [(100, 30), (160, 30), (200, 36), (300, 44)])
def test_list_is_wider_in_a_wide_terminal(columns: int, width: int) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.screen.query_one(ChatList).outer_size.width == width)

    run(ScriptedClient(), flow, size=(columns, 24))


def test_open_archived_chat_can_be_unarchived_from_either_list() -> None:
    client = ScriptedClient()
    name = client.keep("Old", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.type("/pin")
        await chat.until(lambda: "This chat is empty." in chat.notices())
        await chat.conversation.open(name)
        await chat.type("/archive")
        await chat.until(lambda: lines(chat) == [])
        await chat.type("/pin")
        await chat.until(lambda: client.chats.chats[name].summary.pinned)
        await chat.type("/archive")
        await chat.until(lambda: lines(chat) == ["› Old"])
        assert not client.chats.chats[name].summary.archived

    run(client, flow, size=WIDE)


def test_deleting_a_chat_ends_its_reply_and_undo_restores_its_text() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("/delete")
        await agree(chat)
        await chat.until(lambda: chat.client.replies.closed == 1 and chat.conversation.chat.id is None)
        await chat.type("/undo")
        await chat.until(lambda: chat.texts() == ["one", "begun"])
        assert chat.conversation.current_reply is None

    run(ScriptedClient([TextDelta("begun"), WAIT, TextDelta("never"), END]), flow)


def test_list_highlights_the_open_chat_only() -> None:
    client = ScriptedClient()
    first = client.keep("First", "a question", "an answer")
    second = client.keep("Second", "other", "words")

    async def flow(chat: Chatting) -> None:
        chats = chat.screen.query_one(ChatList)
        options = chats.query_one(OptionList)

        def highlighted() -> str | None:
            return None if options.highlighted is None else options.get_option_at_index(options.highlighted).id

        await chat.until(lambda: highlighted() == first)
        await chat.conversation.open(second)
        await chat.until(lambda: highlighted() == second)
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: highlighted() is None)
        options.focus()
        await chat.pilot.press("down", "ctrl+n")
        await chat.until(lambda: highlighted() is None)
        assert chat.app.focused is chat.composer.area

    run(client, flow, chat=first, size=WIDE)


@pytest.mark.usefixtures("quick_polls")
def test_messages_of_another_window_are_shown_in_the_open_chat() -> None:
    client = ScriptedClient()
    name = client.keep("Shared", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        last = client.chats.chats[name].messages[-1].id
        await client.chats.add(name, last, "from another window")
        await chat.until(lambda: chat.texts() == ["a question", "an answer", "from another window"])
        assert not await at_rest(chat.pilot, chat.notices)  # the message is seen
        branch = await client.chats.add(name, None, "a branch of the start")
        await chat.until(lambda: branch.id in chat.conversation.chat.branches)
        await chat.until(lambda: any("continued in another window" in notice for notice in chat.notices()))
        assert chat.texts() == ["a question", "an answer", "from another window"]
        await chat.until(lambda: "1/2" in chat.label("MessageView.user MessageHeader"))

    run(client, flow, chat=name, size=(80, 24))


EMPTY = ContextBudget(None, 0, 0, 0)


@pytest.mark.usefixtures("quick_polls")
def test_reply_of_another_window_is_shown_as_it_grows() -> None:
    client = ScriptedClient()
    name = client.keep("Shared", "a question", "an")
    reply = replace(client.chats.chats[name].messages[-1], finish=Finish.ELSEWHERE)
    client.chats.put(name, reply)

    async def flow(chat: Chatting) -> None:
        def shows(text: str) -> bool:
            return any(text in line for line in chat.lines())

        await chat.until(lambda: chat.texts() == ["a question", "an"])
        await chat.until(lambda: shows("Another window is writing this reply."))
        assert "retry" not in chat.label("Outcome")
        client.chats.put(name, replace(reply, text="an answer"))
        await chat.until(lambda: shows("an answer"))
        client.chats.put(name, replace(reply, text="an answer " * 40))
        await chat.until(lambda: (chat.composer.status.budget or EMPTY).history > 90)
        client.chats.put(name, replace(reply, text="an answer of two lines", finish=Finish.COMPLETE))
        await chat.until(lambda: shows("an answer of two lines"))
        assert len(chat.views()) == 2

    run(client, flow, chat=name, size=(80, 24))


@pytest.mark.usefixtures("quick_polls")
def test_question_that_another_window_stopped_has_no_reply_and_can_be_retried() -> None:
    client = ScriptedClient([TextDelta("an answer"), END])
    name = client.keep("Shared", "a question")
    question = replace(client.chats.chats[name].messages[-1], finish=Finish.ELSEWHERE)
    client.chats.put(name, question)

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.label(".outcome").startswith("! Another window is writing this reply."))
        client.chats.put(name, replace(question, finish=Finish.UNANSWERED))
        await chat.until(lambda: chat.label(".outcome").startswith("✗ No reply yet."))
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        assert chat.label(".outcome") == ""

    run(client, flow, chat=name)


def test_poll_posts_the_number_of_messages_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    name = client.keep("Shared", "a question", "an answer")
    counted = []
    post = ChatList.post_message

    def note(chats: ChatList, message: Posted) -> bool:
        counted.extend([message.count] if isinstance(message, ChatList.Counted) else [])
        return post(chats, message)

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: counted == [2])
        for _ in range(3):
            await chat.screen.query_one(ChatList).poll().wait()
        assert counted == [2]
        await client.chats.add(name, client.chats.chats[name].messages[-1].id, "from another window")
        await chat.until(lambda: counted == [2, 3])

    monkeypatch.setattr(ChatList, "post_message", note)
    run(client, flow, chat=name)


@pytest.mark.usefixtures("quick_polls")
def test_messages_that_another_window_stores_during_a_reply_are_shown_after_it() -> None:
    client = ScriptedClient([TextDelta("begun"), WAIT, END])
    name = client.keep("Shared", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        await chat.type("more")
        await chat.until(lambda: len(chat.views()) == 4)
        branch = await client.chats.add(name, None, "a branch of the start")
        await chat.until(lambda: chat.conversation.chat.stored_count == 5)
        assert branch.id not in chat.conversation.chat.branches
        client.replies.gate.set()
        await chat.until(lambda: branch.id in chat.conversation.chat.branches)

    run(client, flow, chat=name)
