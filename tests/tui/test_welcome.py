"""Tests for the view of an empty chat."""

import re

import pytest

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import KNOWN, ScriptedClient
from tui.client import ClientError
from tui.engine_types import Loading, Recommendation
from tui.screens.models import ModelsScreen


def test_empty_chat_shows_loading_progress_and_disappears_with_the_first_message() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "50 %" in chat.label("#welcome"))
        assert "You can already type. Your message is sent when the model is ready." in chat.label("#welcome")
        chat.client.engine.loads.set()
        await chat.until(lambda: "smollm2:135m is ready." in chat.label("#welcome"))
        await chat.say("one")
        assert not chat.conversation.welcome.display
        assert chat.texts() == ["one", "Hello."]
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: chat.conversation.welcome.display and not chat.conversation.transcript.display)

    run(ScriptedClient(), flow, loaded=False)


def test_better_model_is_recommended_to_new_users() -> None:
    client = ScriptedClient()
    client.models.better = Recommendation(KNOWN.name, "fits: 32k context; needs 3.2 GB, 8.0 GB free")

    async def flow(chat: Chatting) -> None:
        line = "This machine can run qwen3:4b (fits: 32k context)   Get it [F2]"
        await chat.until(lambda: line in chat.label("#welcome"))
        assert chat.notices() == []
        await chat.pilot.press("f2")
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))

    run(client, flow)


def test_enter_in_an_empty_chat_continues_the_last_one() -> None:
    client = ScriptedClient()
    client.keep("Older", "a question", "an answer", pinned=True)
    client.keep("Newer, " + "and long " * 20, "another", "words")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "Continue: Newer, and long and long" in chat.label("#welcome"))
        assert re.search(r"long an… · \d{4}-\d\d-\d\d \[⏎\]", chat.label("#welcome"))
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.texts() == ["another", "words"])
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: chat.conversation.welcome.display)
        assert "Continue" not in chat.label("#welcome")

    run(client, flow)


def test_unreachable_endpoint_is_named_and_another_model_is_not_suggested() -> None:
    client = ScriptedClient()
    client.models.remote = "http://gpu-box:8000/v1"
    client.engine.problem = ClientError("The server does not respond.", "Check the address, or try again.")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "The server does not respond." in chat.label("#welcome"))
        assert "Check the address, or try again.\nRetry [⏎]\n" in chat.label("#welcome")
        status = await at_rest(chat.pilot, lambda: chat.composer.status.render().plain)
        assert status == "No model. Your next message tries again: http://gpu-box:8000/v1"

    run(client, flow)


def test_offered_chat_is_the_newest_of_all_windows() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "is ready" in chat.label("#welcome"))
        client.keep("Of another window", "a question", "an answer")
        await chat.until(lambda: "Continue: Of another window" in chat.label("#welcome"))
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])

    run(client, flow)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
def test_long_reasons_are_wrapped_and_the_left_edge_is_fixed(size: tuple[int, int]) -> None:
    client = ScriptedClient()
    reason = "the server at http://127.0.0.1:9/v1 does not respond: All connection attempts failed"
    client.engine.problem = ClientError(reason)

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "50 %" in chat.label("#welcome"))
        edge = chat.app.screen.query_one("#welcome").region.x
        chat.client.engine.loads.set()
        await chat.until(lambda: "✗" in chat.label("#welcome"))
        shown = chat.app.screen.query_one("#welcome").region
        lines = [line[shown.x : shown.right] for line in await at_rest(chat.pilot, chat.lines)]
        assert reason.replace("the server", "The server") in " ".join(" ".join(lines).split())
        assert shown.x == edge

    run(client, flow, size=size, loaded=False)


def test_failed_load_names_the_reason_and_enter_retries() -> None:
    client = ScriptedClient()
    client.engine.problem = ClientError("No model named nosuch:9b", "Installed: smollm2:135m.")
    client.keep("Last", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "No model named nosuch:9b" in chat.label("#welcome"))
        assert "Installed: smollm2:135m." in chat.label("#welcome")
        await chat.until(lambda: "Continue: Last" in chat.label("#welcome"))
        assert chat.label("#welcome").count("[⏎]") == 1
        client.engine.problem = None
        await chat.pilot.press("enter")
        await chat.until(lambda: "smollm2:135m is ready." in chat.label("#welcome"))
        assert client.engine.tried == 1

    run(client, flow)


def test_welcome_lines_fit_a_small_terminal() -> None:
    client = ScriptedClient()
    client.models.better = Recommendation(KNOWN.name, "fits: 32k context; needs 3.2 GB, 8.0 GB free")
    client.keep("Newer", "another", "words")

    async def flow(chat: Chatting) -> None:
        shown = ("is ready", "This machine", "Continue: Newer", "F1 help")
        await chat.until(lambda: all(any(words in line for line in chat.lines()) for words in shown))

    run(client, flow, size=(60, 15))


def test_enter_after_a_command_opens_no_chat() -> None:
    """A second Enter after /private must not send the next message to the last chat."""
    client = ScriptedClient()
    client.keep("Last", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "Continue: Last" in chat.label("#welcome"))
        chat.composer.area.write("/private")
        await chat.pilot.press("enter", "enter")
        await chat.until(lambda: chat.conversation.chat.private)
        await at_rest(chat.pilot, chat.lines)
        assert chat.conversation.chat.id is None
        assert "Continue" not in chat.label("#welcome")

    run(client, flow)


def test_stage_is_shown_without_the_name_of_the_model() -> None:
    async def flow(chat: Chatting) -> None:
        welcome = chat.conversation.welcome
        for stage, amount, shown in (
            ("Preparing the engine, once on this machine", "", "Preparing the engine, once on this machine"),
            ("Preparing m for this machine", "", "Preparing for this machine"),
            ("Loading m", "0.0 of 98.4 MB", "Loading, 0.0 of 98.4 MB"),
        ):
            welcome.show_loading(Loading("m", stage, amount=amount))
            assert shown in chat.label("#welcome").splitlines()

    run(ScriptedClient(), flow)
