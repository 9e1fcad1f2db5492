"""Tests for long chats: which messages are mounted, and that scrolling reaches all messages without jumps."""

import asyncio
import random
import re
from itertools import count, pairwise
from typing import Any

import pytest
from textual._compositor import Compositor
from textual.events import MouseDown

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.types import ChatId, Finish, MessageId, ReasoningDelta, ReplyEnd, TextDelta
from tui.widgets import transcript as transcript_module
from tui.widgets.message_view import MessageHeader

COUNT = 40


def long_chat() -> tuple[ScriptedClient, ChatId]:
    client = ScriptedClient()
    return client, client.keep("Long", *(f"message {number}" for number in range(COUNT)))


def test_only_the_end_of_a_long_chat_is_mounted_and_scrolling_reaches_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: chat.texts()[-1:] == [f"message {COUNT - 1}"])
        assert len(chat.views()) < 16
        await chat.until(lambda: transcript.max_scroll_y > 0 and transcript.scroll_y == transcript.max_scroll_y)
        steps = 0
        while chat.texts()[0] != "message 0" or transcript.scroll_y > 0:
            seen = [view for view in chat.views() if view.region.overlaps(transcript.region)]
            transcript.scroll_relative(y=-30, animate=False)
            await chat.pilot.pause()
            await chat.until(lambda: not transcript._moving)
            assert seen[0].is_attached
            steps += 1
        assert steps > 4
        assert len(chat.views()) <= 24
        assert chat.texts() == [f"message {number}" for number in range(len(chat.views()))]
        transcript.scroll_end(animate=False, immediate=True)
        await chat.until(lambda: chat.texts()[0] != "message 0")

    monkeypatch.setattr(transcript_module, "MAX_MOUNTED", 24)
    client, name = long_chat()
    run(client, flow, chat=name)


def numbers(chat: Chatting) -> dict[int, int]:
    """Return the screen line of each visible numbered item."""
    region = chat.conversation.transcript.region
    lines = enumerate(strip.text for strip in chat.screen._compositor.render_strips())
    return {int(one): y for y, line in lines if region.y <= y < region.bottom for one in re.findall(r"no(\d+)\.", line)}


def rich_messages() -> list[str]:
    """Return messages whose height is hard to estimate."""
    number = count()
    kinds = (
        "no{}. {}",
        "- no{}. {}\n- and this",
        "```\nno{}.\n```",
        "> no{}. {}",
        "| no{}. | two |\n|---|---|\n| 1 | 2 |",
    )

    def block() -> str:
        return random.choice(kinds).format(next(number), "some words " * random.randrange(10))

    sizes = random.sample([1, 2, 12] * 2, 6)
    return ["\n\n".join(block() for _ in range(size)) for size in sizes]


def drawn(chat: Chatting, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Record the contents of every later frame."""
    frames: list[dict[int, int]] = []
    render = Compositor.render_update

    def rendered(self: Compositor, *given: Any, **named: Any) -> object:
        update = render(self, *given, **named)
        if update is not None and self is chat.screen._compositor:
            frames.append(numbers(chat))
        return update

    monkeypatch.setattr(Compositor, "render_update", rendered)
    return frames


def test_visible_text_moves_only_by_scrolling(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = rich_messages()

    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: transcript.max_scroll_y > 0 and transcript.scroll_y == transcript.max_scroll_y)
        frames = drawn(chat, monkeypatch)
        for step in (-5, 5):
            found = {*numbers(chat)}
            while found < every:
                frames[:] = [numbers(chat)]
                transcript.scroll_relative(y=step, animate=False, immediate=True)
                found |= (await at_rest(chat.pilot, lambda: numbers(chat))).keys()
                for one, next_one in pairwise([*frames, numbers(chat)]):
                    (moved,) = {next_one[it] - one[it] for it in one.keys() & next_one.keys()}
                    assert moved in range(-step, 0, 1 if step > 0 else -1) or moved == 0
                assert frames[0] != numbers(chat)

    every = {int(one) for text in texts for one in re.findall(r"no(\d+)\.", text)}
    monkeypatch.setattr(transcript_module, "MAX_MOUNTED", 3)
    client = ScriptedClient()
    run(client, flow, chat=client.keep("Long", *texts))


def test_distant_message_is_shown_and_a_new_one_scrolls_to_the_end() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.views()) > 0)
        hit = (await chat.client.chats.search("message 12"))[0]
        transcript = chat.conversation.transcript
        await chat.conversation.open(hit.chat.id, hit.message)

        def is_shown() -> bool:
            view = transcript.view(hit.message)
            return view is not None and view.has_focus and view.region.overlaps(transcript.region)

        await chat.until(is_shown)
        await chat.pilot.pause()
        assert is_shown()
        await chat.pilot.press("up")
        await chat.until(lambda: chat.app.screen.focused in chat.views())
        await chat.say("new")
        assert chat.texts()[-2:] == ["new", "Hello."]

    client, name = long_chat()
    run(client, flow, chat=name)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_message_has_one_line_for_its_header_and_no_empty_line(columns: int) -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.views()) == 2 and chat.screen.query("MarkdownParagraph"))
        question, reply = chat.views()
        await chat.until(lambda: question.region.height == 2)
        assert [header.region.height for header in chat.screen.query("MessageHeader")] == [1, 1]
        await chat.until(lambda: reply.region.height == 3)  # the margin of the paragraph is its last line

    run(client, flow, size=(columns, 24), chat=name)


def test_page_keys_in_the_prompt_scroll_the_chat_unless_it_is_long() -> None:
    async def flow(chat: Chatting) -> None:
        transcript, area = chat.conversation.transcript, chat.composer.area
        await chat.until(lambda: transcript.max_scroll_y > 0 and transcript.scroll_y == transcript.max_scroll_y)
        await chat.until(lambda: area.has_focus)
        end = transcript.scroll_y
        await chat.pilot.press("pageup")
        await chat.until(lambda: transcript.scroll_y < end)
        await chat.pilot.press("pagedown")
        await chat.until(lambda: transcript.scroll_y == transcript.max_scroll_y)
        area.write("line\n" * 50)
        await chat.until(lambda: area.max_scroll_y > 0)
        before = area.cursor_location
        await chat.pilot.press("pageup")
        await chat.until(lambda: area.cursor_location < before)
        assert transcript.scroll_y == transcript.max_scroll_y

    client, name = long_chat()
    run(client, flow, chat=name)


def window(chat: Chatting) -> list[MessageId]:
    transcript = chat.conversation.transcript
    return [message.id for message in transcript._path[transcript._first : transcript._end]]


def test_moving_window_does_not_affect_a_new_branch() -> None:
    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: len(chat.views()) > 0)
        path = list(transcript._path)
        for move in (transcript._move_up, transcript._move_down):
            for frames in (0, 1, 3):
                await transcript.show(path, transcript._siblings, at=path[COUNT // 2].id)
                move()
                for _ in range(frames):
                    await asyncio.sleep(0)
                await transcript.show(path[:2], transcript._siblings)
                await asyncio.sleep(0.05)
                assert [view.message.id for view in chat.views()] == window(chat) == [path[0].id, path[1].id]
                assert not transcript._moving

    client, name = long_chat()
    run(client, flow, chat=name)


def test_last_of_concurrent_branch_changes_is_shown() -> None:
    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: len(chat.views()) > 0)
        path = list(transcript._path)
        await asyncio.gather(
            transcript.show(path, transcript._siblings),
            transcript.truncate_after(path[30].id),
            transcript.append(path[31]),
            transcript.show(path[:3], transcript._siblings),
            transcript.append(path[3]),
        )
        assert [view.message.id for view in chat.views()] == window(chat) == [one.id for one in path[:4]]

    client, name = long_chat()
    run(client, flow, chat=name)


def test_message_sent_before_leaving_is_not_shown_in_the_next_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        truncate_after = transcript.truncate_after

        async def left(message: MessageId | None) -> None:
            await truncate_after(message)
            await chat.conversation.open_new()

        monkeypatch.setattr(transcript, "truncate_after", left)
        await chat.type("go")
        await chat.until(lambda: chat.client.replies.asked)
        await chat.pilot.pause()
        assert chat.texts() == []

    run(ScriptedClient(), flow)


def test_scrolling_to_the_end_step_by_step_anchors_there() -> None:
    client = ScriptedClient([TextDelta("line\n\n" * 40), ReplyEnd(Finish.COMPLETE, USAGE)])
    name = client.keep("Long", *("words " * 300 for _ in range(6)))

    async def scrolled(chat: Chatting, lines: int) -> None:
        """Scroll in several frames, as a mouse wheel does."""
        chat.conversation.transcript.scroll_relative(y=lines, duration=0.05, immediate=True)
        await chat.pilot.wait_for_scheduled_animations()

    async def flow(chat: Chatting) -> None:
        chat.app.animation_level = "full"
        transcript = chat.conversation.transcript
        await chat.until(lambda: transcript.scroll_y == transcript.max_scroll_y > 10)
        await scrolled(chat, -5)
        assert transcript.scroll_y == transcript.max_scroll_y - 5
        await scrolled(chat, 5)
        assert transcript.scroll_y == transcript.max_scroll_y
        before = transcript.max_scroll_y
        await chat.say("more")
        await chat.until(lambda: before < transcript.max_scroll_y == transcript.scroll_y)
        await scrolled(chat, -5)
        await chat.pilot.pause()
        assert transcript.scroll_y == transcript.max_scroll_y - 5

    run(client, flow, chat=name)


def test_mouse_button_on_a_message_that_was_just_removed_does_nothing() -> None:
    client, chat_id = long_chat()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts()[-1:] == [f"message {COUNT - 1}"])
        header = (await at_rest(chat.pilot, chat.views))[-1].query_one(MessageHeader)
        x, y = header.region.offset
        pressed = MouseDown(None, x, y, 0, 0, 1, False, False, False, x, y)
        parent, header._parent = header._parent, None  # removed, but still on the screen
        try:
            chat.screen._forward_event(pressed)
        finally:
            header._parent = parent
        assert chat.screen._select_state is None

    run(client, flow, chat=chat_id)


def test_ctrl_home_and_ctrl_end_go_to_the_start_and_the_end_of_a_long_chat() -> None:
    client, name = long_chat()

    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: chat.texts()[-1:] == [f"message {COUNT - 1}"])
        await chat.type("a draft", enter=False)
        await chat.pilot.press("ctrl+home")
        await chat.until(lambda: chat.texts()[:1] == ["message 0"] and transcript.scroll_y == 0)
        assert chat.composer.area.has_focus
        await chat.pilot.press("ctrl+end")
        await chat.until(lambda: chat.texts()[-1:] == [f"message {COUNT - 1}"])
        await chat.until(lambda: 0 < transcript.max_scroll_y == transcript.scroll_y)
        chat.views()[-1].focus()
        await chat.pilot.press("ctrl+home")
        await chat.until(lambda: chat.texts()[:1] == ["message 0"] and transcript.scroll_y == 0)

    run(client, flow, chat=name)


def test_start_of_a_reply_does_not_scroll_a_chat_that_the_user_has_scrolled_up() -> None:
    client = ScriptedClient([WAIT, ReasoningDelta("one"), WAIT])
    name = client.keep("Long", *(f"message {number}" for number in range(COUNT)))

    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.type("go")
        await chat.until(lambda: chat.conversation.current_reply is not None)
        await chat.pilot.press("ctrl+home")
        await chat.until(lambda: chat.texts()[:1] == ["message 0"] and transcript.scroll_y == 0)
        client.replies.gate.set()
        await chat.until(lambda: transcript.mark.display)
        assert await at_rest(chat.pilot, lambda: transcript.scroll_y) == 0

    run(client, flow, chat=name)


def test_text_is_not_wrapped_again_when_the_scroll_bar_appears() -> None:
    client = ScriptedClient([TextDelta("word " * 40), WAIT, TextDelta("\n\nmore" * 40), WAIT])

    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and "word" in "".join(chat.lines()))
        width = chat.views()[1].size.width
        assert not transcript.show_vertical_scrollbar
        client.replies.gate.set()
        await chat.until(lambda: transcript.show_vertical_scrollbar)
        assert await at_rest(chat.pilot, lambda: chat.views()[1].size.width) == width

    run(client, flow)


def test_double_click_selects_a_word_and_triple_click_the_block() -> None:
    client = ScriptedClient()
    name = client.keep("Chat", "a question", "The well-known answer isn't here.")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.views() and chat.views()[-1].query("MarkdownParagraph"))
        paragraph = chat.views()[-1].query("MarkdownParagraph").first()
        for column, word in ((6, "well-known"), (17, "answer"), (24, "isn't")):
            await chat.pilot.click(paragraph, offset=(column, 0), times=2)
            assert await at_rest(chat.pilot, chat.app.screen.get_selected_text) == word
        await chat.pilot.click(paragraph, offset=(6, 0), times=3)
        await chat.until(lambda: "The well-known answer isn't here." in (chat.app.screen.get_selected_text() or ""))

    run(client, flow, chat=name)


def test_new_text_below_is_marked_until_the_end_is_shown() -> None:
    client = ScriptedClient(
        [TextDelta("one\n\n" * 30), WAIT, TextDelta("two "), WAIT, TextDelta("three"), ReplyEnd(Finish.COMPLETE, USAGE)]
    )
    name = client.keep("Long", *(f"message {number}" for number in range(COUNT)))

    async def flow(chat: Chatting) -> None:
        transcript, mark = chat.conversation.transcript, chat.conversation.transcript.mark
        await chat.type("go")
        await chat.until(lambda: "one" in "".join(chat.lines()) and transcript.scroll_y == transcript.max_scroll_y)
        await chat.pilot.press("ctrl+home")
        await chat.until(lambda: chat.texts()[:1] == ["message 0"] and transcript.scroll_y == 0)
        assert not mark.display
        client.replies.gate.set()
        await chat.until(
            lambda: any("↓ new text below · ^end" in line and "esc to stop" in line for line in chat.lines())
        )
        await chat.pilot.click(mark, offset=(4, 0))
        await chat.until(lambda: "two" in "".join(chat.lines()) and not mark.display)
        await chat.until(lambda: transcript.scroll_y == transcript.max_scroll_y)
        client.replies.gate.set()
        await chat.until(lambda: "two three" in "".join(chat.lines()))

    run(client, flow, chat=name)


@pytest.mark.parametrize("clicks", [True, False])
def test_start_of_an_opened_thought_is_visible(clicks: bool) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("Why?")
        await chat.until(lambda: any("▸ Thought" in line for line in chat.lines()))
        if clicks:
            await chat.pilot.click("Reasoning WordButtons")
        else:
            await chat.pilot.press("ctrl+o")
        lines = await at_rest(chat.pilot, chat.lines)
        assert any("▾ Thought" in line for line in lines)
        assert any("thought 0," in line for line in lines)
        assert not any("thought 99," in line for line in lines)

    thoughts = " ".join(f"thought {number}," for number in range(100))
    run(
        ScriptedClient([ReasoningDelta(thoughts), TextDelta("Because."), ReplyEnd(Finish.COMPLETE)]),
        flow,
        size=(60, 15),
    )


def test_end_of_a_running_reply_stays_visible_when_its_thought_is_opened() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("Why?")
        await chat.until(lambda: any("▸ Thought" in line for line in chat.lines()))
        await chat.pilot.click("Reasoning WordButtons")
        await chat.until(lambda: any("thought 99," in line for line in chat.lines()))
        assert "Because." in "".join(await at_rest(chat.pilot, chat.lines))

    thoughts = " ".join(f"thought {number}," for number in range(100))
    run(ScriptedClient([ReasoningDelta(thoughts), TextDelta("Because."), WAIT]), flow, size=(60, 15))
