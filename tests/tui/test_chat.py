"""Tests of the chat screen with keys and a scripted client."""

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import HERE, USAGE, WAIT, ScriptedClient
from tui.client import ClientError, NotLoaded
from tui.types import (
    ChatId,
    ContextBudget,
    Finish,
    Message,
    MessageId,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    Role,
    TextDelta,
)
from tui.widgets.folded import Folded, Reasoning
from tui.widgets.outcome import explain
from tui.widgets.top_bar import TopBar

END = ReplyEnd(Finish.COMPLETE, USAGE)


def test_message_and_reply_are_shown() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("What is this?", enter=False)
        await chat.pilot.press("ctrl+j", "x", "enter")
        await chat.until(lambda: len(chat.views()) == 2 and chat.conversation.current_reply is None)
        assert chat.texts() == ["What is this?\nx", "An *answer*."]
        assert chat.composer.area.text == ""
        assert "212 tokens · 45 tok/s · 0.41 s to first" in chat.label("MessageView.assistant MessageHeader")
        chat.views()[-1].focus()
        await chat.pilot.press("ctrl+o")
        assert "1,204 of 1,235 prompt tokens cached (1,188 device, 16 disk)" in chat.label(".details")
        await chat.pilot.press("ctrl+o")
        assert chat.label(".details") == ""
        chat.composer.area.focus()
        await chat.pilot.press("ctrl+o")
        assert "1,204 of 1,235 prompt tokens cached" in chat.label(".details")
        assert chat.composer.area.has_focus
        await chat.pilot.press("ctrl+o")
        await chat.until(lambda: chat.app.screen.query_one(TopBar).chat_title == "A title of the client")

    run(ScriptedClient([TextDelta("An "), TextDelta("*answer*."), END]), flow)


def test_details_that_were_unfolded_during_the_reply_are_hidden_together() -> None:
    client = ScriptedClient([ReasoningDelta("Hm."), TextDelta("Yes."), END])

    async def flow(chat: Chatting) -> None:
        await chat.say("Why?")
        folded = chat.views()[-1].query_one(Folded)
        folded.folded = False
        await chat.pilot.press("ctrl+o")
        assert (folded.folded, chat.label(".details")) == (True, "")
        await chat.pilot.press("ctrl+o")
        assert not folded.folded
        assert chat.label(".details")

    run(client, flow)


def test_prompt_has_the_focus_after_a_selected_reply_is_generated_again() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("Why?")
        chat.views()[-1].focus()
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: len(chat.client.replies.asked) == 2 and chat.composer.area.has_focus)

    run(ScriptedClient(), flow)


def test_message_can_be_sent_while_the_model_loads() -> None:
    async def flow(chat: Chatting) -> None:
        bar = chat.app.screen.query_one(TopBar)
        status = chat.composer.status
        await chat.until(lambda: "smollm2:135m: reading the weights, 50 %" in str(status.render()))
        await chat.type("early")
        await chat.until(lambda: chat.texts() == ["early"])
        assert bar.activity == "waiting"
        chat.client.engine.loads.set()
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.texts() == ["early", "late"])
        assert chat.views()[-1].message.model == HERE.name
        assert str(status.render()).startswith(HERE.name)

    run(ScriptedClient([WAIT, TextDelta("late"), END]), flow, loaded=False)


def test_failed_load_is_shown_once_and_retried_by_sending() -> None:
    client = ScriptedClient([NotLoaded("It is broken.", "Mend it.")], [TextDelta("whole"), END])
    client.engine.problem = ClientError("It is broken.", "Mend it.")
    budget = client.context.budget
    measured: list[str] = []

    async def no_budget(chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        measured.append(typed)
        if client.engine.problem is not None:
            raise NotLoaded("It is broken.", "Mend it.")
        return await budget(chat, leaf, typed)

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "No model." in str(chat.composer.status.render()))
        await chat.type("one", enter=False)
        await chat.until(lambda: "one" in measured)
        assert "It is broken." in chat.label("#welcome")
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.label(".outcome").startswith("✗ It is broken.\nMend it."))
        await chat.until(lambda: client.engine.tried == 1 and "No model." in str(chat.composer.status.render()))
        client.engine.problem = None
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["one", "whole"])
        await chat.until(lambda: HERE.name in str(chat.composer.status.render()))
        assert chat.notices() == []

    client.context.budget = no_budget  # type: ignore[method-assign]
    run(client, flow)


def test_escape_stops_prefill() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("long")
        await chat.until(lambda: chat.app.screen.query_one(TopBar).activity == "reading")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.client.replies.closed == 1)
        assert chat.conversation.current_reply is None
        assert chat.texts() == ["long"]

    run(ScriptedClient([PromptProgress(100, 900), WAIT, TextDelta("never"), END]), flow)


def test_details_key_adds_no_line_to_an_error_without_details() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: "The engine stopped." in chat.label(".outcome"))
        before = chat.label(".outcome")
        await chat.pilot.press("ctrl+o")
        assert chat.label(".outcome") == before

    run(ScriptedClient([TextDelta("x"), ReplyEnd(Finish.FAILED, error="the engine stopped.")]), flow)


def test_failed_reply_keeps_its_error() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and chat.conversation.current_reply is None)
        reason, remedy, *_ = chat.label(".outcome").splitlines()
        assert (reason, remedy) == ("✗ The [b]engine[/b] stopped.", "It was restarted.")
        assert "incomplete" not in chat.label(".outcome")
        assert chat.notices() == []
        chat.views()[-1].focus()
        await chat.pilot.press("ctrl+o")
        assert "incomplete chunked read" in chat.label(".outcome")
        await chat.pilot.click(".outcome", offset=(5, 3))
        await chat.until(lambda: len(chat.client.replies.asked) == 2)

    failed = ReplyEnd(
        Finish.FAILED, error="the [b]engine[/b] stopped. It was restarted.\npeer closed: incomplete chunked read"
    )
    run(ScriptedClient([TextDelta("as far as"), failed]), flow)


def test_error_of_a_reply_that_did_not_start_stays_until_retry() -> None:
    async def flow(chat: Chatting) -> None:
        def why() -> str:
            return chat.label("MessageView .outcome").partition("\nretry")[0]

        await chat.say("go")
        await chat.until(lambda: why() == "✗ The [b]key[/b] is wrong.\nGive another.")
        name = chat.conversation.chat.id
        assert name is not None
        await chat.conversation.open_new()
        assert why() == ""
        await chat.conversation.open(name)
        await chat.until(lambda: why() == "✗ The [b]key[/b] is wrong.\nGive another.")
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: len(chat.client.replies.asked) == 2)
        assert why() == ""
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.texts() == ["go", "now"] and chat.conversation.current_reply is None)
        assert not chat.views()[0].message.error

    wrong = ClientError("the [b]key[/b] is wrong.", "Give another.")
    run(ScriptedClient([wrong], [WAIT, TextDelta("now"), END]), flow)


def test_name_of_a_model_at_the_start_of_an_error_is_unchanged() -> None:
    found = explain(Message(MessageId("m"), None, Role.USER, "go", 0.0, error="smollm2:135m is not there. Pull it."))
    assert found == ("smollm2:135m is not there.", "Pull it.", "")


def test_escape_stops_a_reply_and_keeps_its_text() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.conversation.current_reply is None)
        assert chat.texts() == ["go", "begun "]
        assert "stopped" in chat.label("MessageView.assistant MessageHeader")
        assert chat.label(".outcome").startswith("! You stopped this reply.")

    run(ScriptedClient([TextDelta("begun "), WAIT, TextDelta("never"), END]), flow)


def test_escape_cuts_off_an_unresponsive_engine() -> None:
    async def flow(chat: Chatting) -> None:
        chat.client.replies.deaf = True
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("escape", "escape")
        await chat.until(lambda: chat.client.replies.closed == 1)
        assert chat.views()[1].message.finish is Finish.STOPPED

    run(ScriptedClient([TextDelta("begun "), WAIT, TextDelta("never"), END]), flow)


def test_question_stopped_before_its_reply_offers_to_retry() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.conversation.current_reply)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.label(".outcome").startswith("✗ No reply yet."))
        assert chat.conversation.current_reply is None
        chat.client.replies.gate.set()
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["go", "begun"])
        assert chat.label(".outcome") == ""

    run(ScriptedClient([WAIT, TextDelta("begun"), END]), flow)


def test_message_is_queued_during_a_reply() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("two")
        await chat.until(lambda: chat.label("#queue").startswith("next: two\n"))
        chat.client.replies.gate.set()
        await chat.until(lambda: len(chat.views()) == 4 and chat.conversation.current_reply is None)
        assert chat.texts() == ["one", "first", "two", "second"]

    run(ScriptedClient([TextDelta("first"), WAIT, END], [TextDelta("second"), END]), flow)


@pytest.mark.parametrize("crashes", [True, False])
def test_queue_waits_after_a_reply_that_failed_or_was_stopped(crashes: bool) -> None:
    """The queued messages stay separate, and the text in the prompt stays as it is."""

    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("two")
        await chat.type("three")
        await chat.type("a draft", enter=False)
        if crashes:
            chat.client.replies.gate.set()
        else:
            await chat.pilot.press("escape")
        waiting = "next: two\nnext: three\n      ⏎ sends the next one · ↑ takes the last one back"
        await chat.until(lambda: chat.label("#queue") == waiting)
        assert (chat.composer.area.text, chat.client.chats.sent) == ("a draft", ["one"])
        await chat.pilot.press("ctrl+l", "enter")
        await chat.until(lambda: chat.client.chats.sent == ["three", "two", "one"])
        await chat.until(lambda: chat.texts()[-2:] == ["three", "Hello."])
        assert chat.label("#queue") == ""

    ended = ClientError("The engine is gone.") if crashes else END
    run(ScriptedClient([TextDelta("first"), WAIT, ended], [TextDelta("Hello."), END]), flow)


def test_queue_continues_after_the_failed_reply_is_retried() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("two")
        chat.client.replies.gate.set()
        await chat.until(lambda: "⏎ sends" in chat.label("#queue"))
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["one", "Hello.", "two", "Hello."])

    failing = [TextDelta("first"), WAIT, ClientError("The engine is gone.")]
    run(ScriptedClient(failing, [TextDelta("Hello."), END]), flow)


def test_reasoning_is_folded_and_opens_with_a_key() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("think")
        reasoning = chat.views()[1].query_one(Reasoning)
        assert str(reasoning.query_one("WordButtons").render()).startswith("▸ Thought for ")
        assert not reasoning.query_one(".folded-text").display
        await chat.pilot.press("shift+tab", "ctrl+o")
        await chat.until(lambda: reasoning.query_one(".folded-text").display)
        assert str(reasoning.query_one(".folded-text").render()) == "Hm. [b]Well[/b]."

    run(ScriptedClient([ReasoningDelta("Hm. "), ReasoningDelta("[b]Well[/b]."), TextDelta("Yes."), END]), flow)


def test_end_of_long_reasoning_is_shown_while_it_grows() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("think")
        await chat.until(lambda: chat.app.screen.query(Reasoning))
        reasoning = chat.app.screen.query_one(Reasoning)
        reasoning.folded = False
        body = reasoning.query_one(".folded-text")
        await chat.until(lambda: str(body.render()).endswith("the last one"))
        assert str(body.render()) == f"… {(long + 'the last one')[-4000:]}"
        chat.client.replies.gate.set()
        await chat.until(lambda: str(body.render()).startswith("a thought"))
        assert str(body.render()) == long + "the last one"

    long = "a thought, " * 1000
    run(ScriptedClient([ReasoningDelta(long), ReasoningDelta("the last one"), WAIT, TextDelta("Yes."), END]), flow)


def test_long_message_is_shortened_and_copied_whole() -> None:
    async def flow(chat: Chatting) -> None:
        client = chat.client
        await chat.conversation.open(client.keep("Long", long, "an answer"))
        await chat.until(lambda: len(chat.views()) == 2)
        assert str(chat.views()[0].query_one(".typed").render()).endswith("a … 980,000 more characters")
        chat.views()[0].focus()
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: chat.app.clipboard == long)

    long = "a" * 1_000_000
    run(ScriptedClient(), flow)


def test_edited_message_becomes_a_branch() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.pilot.press("ctrl+up")
        assert chat.composer.area.text == "one"
        await chat.say(" more")
        assert chat.texts() == ["one more", "second"]
        assert "2/2" in chat.label("MessageView:first-child MessageHeader")
        chat.views()[0].focus()
        await chat.pilot.press("left")
        await chat.until(lambda: chat.texts() == ["one", "first"])
        assert len(chat.client.replies.asked) == 2

    run(ScriptedClient([TextDelta("first"), END], [TextDelta("second"), END]), flow)


def test_regenerated_reply_is_a_sibling() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["one", "second"] and chat.conversation.current_reply is None)
        assert "2/2" in chat.label("MessageView:last-of-type MessageHeader")
        chat.views()[1].focus()
        await chat.pilot.press("left")
        await chat.until(lambda: chat.texts() == ["one", "first"])

    run(ScriptedClient([TextDelta("first"), END], [TextDelta("second"), END]), flow)


def test_user_can_rewrite_a_reply() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "first")
        await chat.type("!")
        await chat.until(lambda: chat.texts() == ["one", "first!"])
        assert [message.role for message in chat.conversation.chat.path()] == [Role.USER, Role.ASSISTANT]
        assert len(chat.client.replies.asked) == 1

    run(ScriptedClient([TextDelta("first"), END]), flow)


def test_chat_continues_after_a_failed_reply() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: chat.label(".outcome").startswith("✗ The engine is gone.\nStart it again."))
        assert chat.texts() == ["one"]
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["one", "back"])

    run(ScriptedClient([ClientError("The engine is gone.", "Start it again.")], [TextDelta("back"), END]), flow)


def test_reply_continues_while_another_chat_is_open() -> None:
    client = ScriptedClient([TextDelta("begun, "), WAIT, TextDelta("done"), END])
    other = client.keep("Other", "old question", "old answer")

    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        mine = chat.conversation.chat.id
        assert mine is not None
        await chat.conversation.open(other)
        assert chat.texts() == ["old question", "old answer"]
        await chat.conversation.open(mine)
        assert chat.texts() == ["one", "begun, "]
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.texts() == ["one", "begun, done"])
        await chat.conversation.open(other)
        assert chat.texts() == ["old question", "old answer"]

    run(client, flow)
