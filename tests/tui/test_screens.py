"""Tests for the screens except the chat screen: models, engine, help, branches, links, and code."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key
from textual.widgets import Input, Markdown

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import HERE, KNOWN, USAGE, WAIT, ScriptedClient, ScriptedEngine
from tui.app import ChatApp
from tui.client import ClientError
from tui.engine_types import Loading, ModelInfo, RequestId
from tui.screens.branches import BranchesScreen
from tui.screens.choice import ChoiceScreen
from tui.screens.dialog import Confirm
from tui.screens.engine import EngineScreen
from tui.screens.help import HelpScreen
from tui.screens.models import ModelsScreen
from tui.screens.settings import SettingsScreen
from tui.types import ChatSettings, Finish, ReplyEnd, TextDelta
from tui.widgets.code_block import CodeBlock
from tui.widgets.list_items import Items
from tui.widgets.listing import Listing
from tui.widgets.rows import Rows
from tui.widgets.status_line import StatusLine
from tui.widgets.text_fields import SplitLine

END = ReplyEnd(Finish.COMPLETE, USAGE)


@pytest.fixture(autouse=True)
def no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit of large downloads, so that no download asks."""
    monkeypatch.setattr("tui.large_downloads.LARGE", 3_000_000_000)


def rows(chat: Chatting) -> list[list[str]]:
    table = chat.app.screen.query_one(Listing)
    return [[str(cell) for cell in table.get_row_at(place)] for place in range(table.row_count)]


async def models_screen(chat: Chatting, count: int = 3) -> None:
    """Open the models screen, and wait until its list is shown."""
    await chat.pilot.press("f2")
    await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen) and len(rows(chat)) == count)


def names(chat: Chatting) -> list[str]:
    return [row[0] for row in rows(chat)]


def test_state_of_a_model_that_is_being_loaded_changes_in_the_open_screen() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        status = chat.composer.status
        client.models.offered = (replace(HERE, loaded=False),)
        status.loading_model = Loading(HERE.name, "starting")
        await chat.until(lambda: rows(chat)[0][3] == "loading")
        client.models.offered = ()
        status.loading_model = None
        await chat.until(lambda: rows(chat)[0][3] == "in use")

    run(client, flow)


def test_models_screen_runs_every_model_action() -> None:
    async def flow(chat: Chatting) -> None:
        models = chat.client.models
        await models_screen(chat)
        assert names(chat) == ["smollm2:135m", "qwen3:4b", "llama3.3:70b"]
        assert [row[3] for row in rows(chat)] == ["in use", "fits", "too large"]
        await chat.until(lambda: chat.label("#fit") == "smollm2:135m: ~80 tok/s · In use · 8,192-token context")
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: rows(chat)[1][3] == "42 %, 12.3 MB/s, 47 s left")
        await chat.until(lambda: chat.label("#fit") == "qwen3:4b: Downloading: 42 %, 12.3 MB/s, 47 s left")
        await chat.pilot.press("enter")
        await chat.until(lambda: models.paused == ["qwen3:4b"])
        await chat.until(lambda: rows(chat)[1][3] == "fits")
        await chat.until(lambda: "Downloading" not in chat.label("#fit"))
        await chat.pilot.press("enter")
        await chat.until(lambda: models.pulled == ["qwen3:4b", "qwen3:4b"])
        models.gate.set()
        await chat.until(lambda: "Downloaded qwen3:4b." in chat.notices())
        await chat.until(lambda: rows(chat)[1][3] == "installed")
        await chat.pilot.press("tab", *"model", "enter")
        await chat.until(lambda: names(chat) == ["someone/Model-GGUF"])
        await chat.pilot.press("enter")
        await chat.until(lambda: names(chat) == ["someone/Model-GGUF:Q4_K_M"])
        await chat.pilot.press("escape", "escape", *["backspace"] * 5)
        await chat.until(lambda: len(rows(chat)) == 3 and rows(chat)[0][3] == "in use")
        await chat.pilot.press("up", "up", "ctrl+d")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        assert chat.label(".question").startswith("This model is in use.")
        await chat.pilot.press("enter")  # presses the button that has the focus, which cancels
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
        assert models.deleted == []
        await chat.pilot.press("enter")
        await chat.until(lambda: models.loaded == ["smollm2:135m"])
        assert chat.app.screen.query_one(StatusLine).model == "smollm2:135m"

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(("width", "has_column"), [(80, False), (120, True)])
def test_expected_speed_is_in_the_bottom_line_and_in_wide_tables(width: int, has_column: bool) -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        await chat.until(lambda: chat.label("#fit").startswith("smollm2:135m: ~80 tok/s · In use"))
        table = chat.app.screen.query_one(Listing)
        assert ("speed" in table.columns) == has_column
        if has_column:
            assert str(table.get_cell(KNOWN.name, "speed")) == "~4.6 tok/s"
            assert str(table.get_cell("llama3.3:70b", "speed")) == ""
            await chat.pilot.resize_terminal(80, 24)
            await chat.until(lambda: "speed" not in table.columns)

    run(ScriptedClient(), flow, size=(width, 40))


def test_typing_filters_the_models() -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        await chat.pilot.press(*"qw4")
        await chat.until(lambda: names(chat) == ["qwen3:4b"])
        await chat.pilot.press("x")
        await chat.until(lambda: chat.label("#note") == "No match here. Tab searches the Hub.")
        await chat.pilot.press("backspace")
        await chat.until(lambda: names(chat) == ["qwen3:4b"] and chat.label("#note") == "")
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.client.models.pulled == ["qwen3:4b"])

    run(ScriptedClient(), flow)


def test_models_are_sorted_by_size_after_the_loaded_one() -> None:
    client = ScriptedClient()
    catalog = client.models.catalog

    async def backwards() -> list[ModelInfo]:
        return [*reversed(await catalog())]

    client.models.catalog = backwards  # type: ignore[method-assign]

    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        assert names(chat) == ["smollm2:135m", "qwen3:4b", "llama3.3:70b"]

    run(client, flow)


def test_long_name_leaves_space_for_the_state() -> None:
    client = ScriptedClient()
    name = "someone/A-Model-With-A-Name-As-Long-As-They-Are-By-Now-GGUF:Q4_K_M"
    client.models.others = (ModelInfo(name, "Q4_K_M", 2_500_000_000, "apache-2.0", installed=True),)

    async def flow(chat: Chatting) -> None:
        await models_screen(chat, 4)
        await chat.until(lambda: any("GGUF:Q4_K_M" in line and "installed" in line for line in chat.lines()))
        await chat.pilot.press("down")
        await chat.until(lambda: chat.label("#fit").startswith(name))
        await chat.pilot.resize_terminal(160, 24)
        await chat.until(lambda: rows(chat)[1][0] == name)

    run(client, flow)


def test_download_of_the_engine_is_shown_and_can_be_paused() -> None:
    async def flow(chat: Chatting) -> None:
        models = chat.client.models
        models.fetching = True
        await models_screen(chat)
        await chat.until(lambda: rows(chat)[1][3] == "42 %, 12.3 MB/s, 47 s left")
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: models.paused == ["qwen3:4b"])
        await chat.until(lambda: rows(chat)[1][3] == "fits")
        await chat.pilot.press("enter")
        await chat.until(lambda: models.pulled == ["qwen3:4b", "qwen3:4b"])

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    ("other", "state"),
    [(ModelInfo("b", elsewhere=True), "available"), (ModelInfo("b", installed=True, is_own=True), "installed")],
)
def test_models_of_endpoints_and_files_of_the_user_can_only_be_loaded(
    monkeypatch: pytest.MonkeyPatch, other: ModelInfo, state: str
) -> None:
    client = ScriptedClient()
    client.models.offered = (ModelInfo("a", elsewhere=True, loaded=True), other)

    async def no_catalog() -> list[ModelInfo]:
        return []

    monkeypatch.setattr(client.models, "catalog", no_catalog)

    async def flow(chat: Chatting) -> None:
        await models_screen(chat, 2)
        assert rows(chat) == [["a", "in use"], ["b", state]]  # columns that no model fills are hidden
        await chat.pilot.press("down", "ctrl+d")
        await chat.pilot.pause()
        assert isinstance(chat.app.screen, ModelsScreen)
        await chat.pilot.press("enter")
        await chat.until(lambda: client.models.loaded == ["b"])
        assert (client.models.pulled, client.models.deleted) == ([], [])

    run(client, flow)


def test_unreachable_endpoint_is_named_above_an_empty_list_and_enter_tries_again() -> None:
    client = ScriptedClient()
    client.models.remote = "http://gpu-box:8000/v1"
    client.models.unreachable = ClientError("The server does not respond.", "Check the address, or try again.")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f2", *"xyz")
        await chat.until(lambda: chat.label("#note") == "The server does not respond. Check the address, or try again.")
        assert chat.app.screen.query_one("#filter", Input).placeholder == "Type to filter"
        await chat.pilot.press("tab")
        await chat.until(lambda: chat.lines()[-1].split()[:2] == ["⏎", "Retry"])
        assert "Hub" not in "".join(chat.lines())
        client.models.unreachable = None
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.label("#note") == "http://gpu-box:8000/v1 lists no models.")
        client.models.offered = (ModelInfo("a", elsewhere=True),)
        await chat.pilot.press("escape", "f2", "x")
        await chat.until(lambda: chat.label("#note") == "No match here.")

    run(client, flow)


def test_fit_of_the_highlighted_model_is_checked() -> None:
    async def flow(chat: Chatting) -> None:
        models = chat.client.models
        await models_screen(chat)
        assert [row[2] for row in rows(chat)] == ["145 MB", "~2.5 GB", "42.5 GB"]
        models.looks_end.clear()
        await chat.pilot.press("down", "down")
        assert chat.label("#fit") == "llama3.3:70b: Probably too large; checking …"
        models.looks_end.set()
        await chat.until(lambda: chat.label("#fit") == "llama3.3:70b: does not fit: needs 44 GB, 16 GB free")
        assert KNOWN.name not in models.looked_at  # highlighting another model cancels the check
        await chat.pilot.press("tab", *"model", "enter")
        unknown = "someone/Model-GGUF: Fit unknown; the Hub cannot be reached"
        await chat.until(lambda: chat.label("#fit") == unknown)

    run(ScriptedClient(), flow)


def test_hub_search_shows_progress_and_empty_result() -> None:
    async def flow(chat: Chatting) -> None:
        models = chat.client.models
        models.finds.clear()
        await models_screen(chat)
        await chat.pilot.press("tab", *"other", "enter")
        await chat.until(lambda: chat.label("#note") == "Searching the Hub …")
        models.finds.set()
        await chat.until(lambda: chat.label("#note") == "No results.")
        await chat.pilot.press("home", "ctrl+k", *"model", "enter")
        await chat.until(lambda: rows(chat))
        assert chat.label("#note") == ""

    run(ScriptedClient(), flow)


def test_tab_searches_the_hub_for_the_text_of_the_filter() -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        await chat.pilot.press(*"model", "tab")
        await chat.until(lambda: names(chat) == ["someone/Model-GGUF"])
        assert chat.lines()[-1].split()[:2] == ["⏎", "Open"]
        await chat.pilot.press("tab")
        await chat.until(lambda: chat.label("#note") == "No match here. Tab searches the Hub.")

    run(ScriptedClient(), flow)


def test_typing_moves_the_cursor_to_the_best_match() -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        await chat.pilot.press("down", "down")
        assert chat.app.screen.query_one(Listing).chosen == "llama3.3:70b"
        await chat.pilot.press("m")
        await chat.until(lambda: len(names(chat)) > 1)
        await chat.pilot.pause()
        assert chat.app.screen.query_one(Listing).chosen == names(chat)[0]

    run(ScriptedClient(), flow)


def test_offline_results_can_be_downloaded() -> None:
    client = ScriptedClient()
    client.models.offline = True

    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        await chat.pilot.press("tab", *"qwen", "enter")
        await chat.until(lambda: rows(chat) and chat.label("#note"))
        assert rows(chat)[0][:3] == [KNOWN.name, "Q4_K_M", "~2.5 GB"]
        assert chat.label("#note") == "The Hub cannot be reached: these are models with a short name"
        await chat.pilot.press("enter")
        await chat.until(lambda: client.models.pulled == [KNOWN.name])
        await chat.pilot.press("enter")
        await chat.until(lambda: client.models.paused == [KNOWN.name])

    run(client, flow)


def test_models_that_cannot_be_downloaded_offline_are_marked() -> None:
    client = ScriptedClient()
    client.models.reason = "offline mode is on (INGLE_OFFLINE)"

    async def flow(chat: Chatting) -> None:
        await models_screen(chat)
        assert [row[3] for row in rows(chat)] == ["in use", "offline", "offline"]
        await chat.pilot.press("down")
        assert chat.label("#fit") == "qwen3:4b: ~4.6 tok/s · Probably fits; offline mode is on (INGLE_OFFLINE)"
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.label("#note"))
        assert "⏎" not in chat.lines()[-1]
        assert chat.label("#note").startswith("qwen3:4b is not installed, and offline mode is on (INGLE_OFFLINE)")
        assert isinstance(chat.app.screen, ModelsScreen)
        assert client.models.pulled == []

    run(client, flow)


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
def test_footer_of_models_begins_with_the_action_of_enter(size: tuple[int, int]) -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat)

        def begins(keys: str) -> bool:
            return " ".join(chat.lines()[-1].split()).startswith(keys)

        await chat.until(lambda: begins("⏎ Use tab Search the Hub esc Back ^d Delete"))
        await chat.pilot.press("down")
        await chat.until(lambda: begins("⏎ Download tab Search the Hub esc Back F1 Help"))
        await chat.pilot.press("enter")
        await chat.until(lambda: begins("⏎ Pause"))
        await chat.pilot.press("tab", "m")
        await chat.until(lambda: begins("⏎ Search tab Back to the list"))
        assert "palette" not in chat.lines()[-1]
        assert chat.app.screen.query_one(Listing).max_scroll_x == 0 or size[0] < 80

    run(ScriptedClient(), flow, size=size)


def test_failed_load_leaves_the_chat_unchanged() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.type("/load llama3.3:70b")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: "llama3.3:70b does not fit. smollm2:135m is loaded again." in chat.notices())
        await chat.until(lambda: chat.app.screen.query_one(StatusLine).loading_model is None)
        assert chat.app.screen.query_one(StatusLine).model == "smollm2:135m"
        await chat.say("two")
        assert chat.texts() == ["one", "Hello.", "two", "Hello."]

    run(ScriptedClient(), flow)


def test_engine_screen_lists_and_aborts_requests() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f3")
        await chat.until(lambda: isinstance(chat.app.screen, EngineScreen) and len(rows(chat)) == 3)
        assert rows(chat)[0] == ["this chat", "interactive", "writing", "1,235", "212", "4.70 s"]
        assert rows(chat)[1][2] == "reading 23 %"
        await chat.pilot.press("down", "a")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, EngineScreen) and len(rows(chat)) == 2)
        await chat.pilot.press("up", "a")
        await chat.until(lambda: len(rows(chat)) == 1)
        assert chat.client.engine.aborted == [RequestId("2"), RequestId("1")]
        looks = chat.client.engine.looks
        await chat.until(lambda: chat.client.engine.looks > looks)

    run(ScriptedClient(), flow)


@pytest.mark.usefixtures("quick_polls")
def test_engine_screen_without_requests_lists_none_and_offers_no_abort() -> None:
    client = ScriptedClient()
    client.engine.requests = ()

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f3")
        await chat.until(lambda: "no request is running" in chat.label("#about"))
        await chat.until(lambda: chat.label("#written-rate") == "0 output tok/s · 5,678 tokens")
        assert chat.label("#read-rate") == "0 prompt tok/s · 1,234 tokens"
        await chat.pilot.pause()
        assert not any("Priority" in line or "Abort" in line for line in chat.lines())
        client.engine.requests = ScriptedEngine.requests
        await chat.until(lambda: any("Priority" in line for line in chat.lines()))
        await chat.until(lambda: "Abort" in chat.lines()[-1])

    run(client, flow)


def test_engine_screen_shows_all_figures_of_a_request_in_a_small_terminal() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f3")
        await chat.until(lambda: isinstance(chat.app.screen, EngineScreen) and len(rows(chat)) == 3)
        lines = await at_rest(chat.pilot, chat.lines)
        assert any(line.rstrip().endswith("212     4.70 s") for line in lines)
        assert any(line.split() == ["Client", "State", "Prompt", "Output", "Age"] for line in lines)
        assert not any("…" in line for line in lines[1:])
        await chat.pilot.resize_terminal(100, 30)
        await chat.until(lambda: any("interactive" in line for line in chat.lines()))

    run(ScriptedClient(), flow, size=(60, 15))


def test_engine_screen_reports_missing_statistics() -> None:
    async def flow(chat: Chatting) -> None:
        chat.client.engine.is_reported = False
        await chat.pilot.press("f3")
        await chat.until(lambda: isinstance(chat.app.screen, EngineScreen) and chat.label("#about"))
        screen = chat.app.screen
        assert chat.label("#about") == "smollm2:135m · http://127.0.0.1:4645/v1"
        assert screen.query_one("#unreported").display
        assert "no statistics" in chat.label("#unreported")
        assert not any(screen.query_one(place).display for place in ("#rates", "#amounts", "Listing"))

    run(ScriptedClient(), flow)


def test_engine_screen_shows_loading_progress() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f3")
        await chat.until(lambda: chat.label("#about") == "smollm2:135m: reading the weights, 50 %")
        chat.client.engine.loads.set()
        await chat.until(lambda: len(rows(chat)) == 3)
        assert chat.label("#about") == "smollm2:135m · 3 requests · http://127.0.0.1:4645/v1"

    run(ScriptedClient(), flow, loaded=False)


@pytest.mark.usefixtures("quick_polls")
def test_engine_error_is_shown_only_on_its_screen() -> None:
    client = ScriptedClient()
    client.engine.problem = ClientError("There is no such model", "ingle ls shows what is.")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: "There is no such model" in chat.label("#welcome"))
        await chat.pilot.press("f3")
        await chat.until(lambda: chat.label("#about") == "There is no such model. ingle ls shows what is.")
        looks = chat.client.engine.followed
        await chat.until(lambda: chat.client.engine.followed > looks + 1)
        assert chat.notices() == []

    run(client, flow)


def test_opening_a_page_replaces_the_current_one() -> None:
    async def flow(chat: Chatting) -> None:
        for _ in range(2):
            await chat.pilot.press("f2")
            await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen) and chat.app.screen.is_mounted)
            await chat.pilot.press("f3")
            await chat.until(lambda: isinstance(chat.app.screen, EngineScreen) and chat.app.screen.is_mounted)
        shown = chat.app.screen
        await chat.pilot.press("f3")
        assert chat.app.screen is shown
        await chat.pilot.press("f1")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen))
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)

    run(ScriptedClient(), flow)


def test_last_of_rapidly_opened_pages_is_shown() -> None:
    async def flow(chat: Chatting) -> None:
        for key in ("f2", "f3", "f2", "f1"):  # without a frame between two keys
            chat.app.post_message(Key(key, None))
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen) and chat.app.screen.is_mounted)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)

    run(ScriptedClient(), flow)


def test_keys_open_help_copy_the_address_and_open_the_palette() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f1")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen))
        await chat.pilot.press("escape", "f4")
        await chat.until(lambda: chat.app.clipboard == "http://127.0.0.1:4645/v1")
        await chat.pilot.press("ctrl+backslash")
        await chat.until(lambda: isinstance(chat.app.screen, ChoiceScreen) and chat.app.screen.is_mounted)
        await chat.pilot.press(*"engine", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, EngineScreen))

    run(ScriptedClient(), flow)


def test_help_lists_each_key_once_and_as_the_footer_writes_it() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f1")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen) and chat.app.screen.query(Items))
        keys, commands = (items.lines(400) for items in chat.app.screen.query(Items))
        assert [str(line) for line in keys if str(line).startswith("esc ")] != []
        assert sum("F7" in str(line) for line in (*keys, *commands)) == 1
        assert [line for line in (*keys, *commands) if re.search(r"ctrl|escape|f\d", str(line))] == []

    run(ScriptedClient(), flow)


def test_help_indents_wrapped_lines() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f1")
        await chat.until(lambda: any("the prompt" in line for line in chat.lines()))
        (wrapped,) = (line for line in chat.lines() if "Stop the reply" in line)
        indent = wrapped.index("Stop the reply")
        below = chat.lines()[chat.lines().index(wrapped) + 1]
        assert below.strip()
        assert below[:indent].isspace()

    run(ScriptedClient(), flow, size=(60, 15))


def test_no_color_variable_removes_all_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    client = ScriptedClient([TextDelta("# One\n\n```python\nprint('x')\n```\n\n[x](https://a.example)"), END])
    client.engine.loads.set()

    async def go() -> None:
        app = ChatApp(client, theme="hearth-light", colors=False)
        async with app.run_test() as pilot:
            chat = Chatting(app, pilot, client)
            await chat.say("one")
            await chat.until(lambda: app.screen.query(CodeBlock))
            assert colors(app) == {"default"}
            app.theme = "hearth-dark"
            await pilot.press("f3")
            await chat.until(lambda: isinstance(app.screen, EngineScreen) and rows(chat))
            assert colors(app) == {"default"}

    asyncio.run(go())


def colors(app: ChatApp) -> set[str | None]:
    """Return all foreground and background colors on the screen."""
    styles = [part.style for strip in app.screen._compositor.render_strips() for part in strip if part.style]
    return {color and color.name for style in styles for color in (style.color, style.bgcolor)}


def test_chosen_theme_is_saved() -> None:
    async def flow(chat: Chatting) -> None:
        kept = chat.client.preferences.themes
        assert chat.app.theme == "hearth-light"
        await chat.say("one")
        assert kept == []
        chat.app.theme = "hearth-dark"  # the palette of /theme sets the theme like this
        await chat.until(lambda: kept)
        assert kept == ["hearth-dark"]

    run(ScriptedClient(), flow, theme="hearth-light")


def test_branch_is_chosen_from_the_tree() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.type("/regenerate")
        await chat.until(lambda: chat.texts() == ["one", "second"] and chat.conversation.current_reply is None)
        await chat.pilot.press("ctrl+t")
        await chat.until(lambda: isinstance(chat.app.screen, BranchesScreen) and chat.app.screen.query(Rows))
        rows = chat.app.screen.query_one(Rows)
        assert [str(row.prompt) for row in rows.options] == ["You: one", "Reply: first", "Reply: second"]
        await chat.until(lambda: rows.highlighted == 2)
        await chat.pilot.press("up", "enter")
        await chat.until(lambda: chat.texts() == ["one", "first"])

    run(ScriptedClient([TextDelta("first"), END], [TextDelta("second"), END]), flow)


def test_tree_has_the_text_of_a_reply_that_is_being_written() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: (reply := chat.conversation.current_reply) is not None and reply.tokens)
        await chat.pilot.press("ctrl+t")
        await chat.until(lambda: isinstance(chat.app.screen, BranchesScreen) and chat.app.screen.query(Rows))
        shown = [str(row.prompt) for row in chat.app.screen.query_one(Rows).options]
        assert shown == ["You: one", "Reply: as far as"]

    run(ScriptedClient([TextDelta("as far as"), WAIT, END]), flow)


def test_branch_rows_fill_the_dialog_and_end_with_an_ellipsis() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.pilot.press("ctrl+t")
        await chat.until(lambda: isinstance(chat.app.screen, BranchesScreen) and chat.app.screen.query(Rows))
        rows = chat.app.screen.query_one(Rows)
        await chat.until(lambda: rows.size.width and rows.highlighted == 1)
        assert rows.max_scroll_x == 0
        line = chat.app.screen._compositor.render_strips()[rows.region.y + 1]
        line = line.crop(rows.content_region.x, rows.content_region.right)
        assert "…" in line.text
        assert len({one.style and one.style.bgcolor for one in line}) == 1

    run(ScriptedClient([TextDelta("word " * 40), END]), flow, size=(60, 15))


def test_branch_of_a_left_chat_is_not_shown_in_the_next() -> None:
    client = ScriptedClient()
    first, second = client.keep("First", "one", "a reply"), client.keep("Second", "another")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["one", "a reply"])
        await chat.pilot.press("ctrl+t")
        await chat.until(lambda: isinstance(chat.app.screen, BranchesScreen) and chat.app.screen.query(Rows))
        await chat.conversation.open(second)
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.pilot.pause()
        assert chat.texts() == ["another"]

    run(client, flow, chat=first)


def test_settings_apply_to_the_chat_they_were_opened_for() -> None:
    client = ScriptedClient()
    first, second = client.keep("First", "one"), client.keep("Second", "another")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["one"])
        await chat.screen.action_run_command("settings")
        await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen))
        await chat.conversation.open(second)
        chat.app.screen.dismiss(ChatSettings(system="Be brief."))
        await chat.until(lambda: chat.client.chats.chats[first].settings.system == "Be brief.")
        assert chat.client.chats.chats[second].settings.system == ""
        assert chat.conversation.chat.settings.system == ""

    run(client, flow, chat=first)


def test_only_web_addresses_open_and_only_after_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def flow(chat: Chatting) -> None:
        monkeypatch.setattr(chat.app, "open_url", opened.append)
        await chat.say("links")
        document = chat.app.screen.query_one("Document", Markdown)
        document.post_message(Markdown.LinkClicked(document, "javascript:alert(1)"))
        await chat.until(lambda: any("no web address" in notice for notice in chat.notices()))
        await chat.pilot.click("MarkdownParagraph", offset=(1, 0))
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        assert chat.label(".about") == "https://a.example/%20x?y=%5B/%5D"
        await chat.pilot.press("escape")
        await chat.pilot.pause()
        assert opened == []
        await chat.pilot.click("MarkdownParagraph", offset=(1, 0))
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: opened == ["https://a.example/%20x?y=%5B/%5D"])

    run(ScriptedClient([TextDelta("[here](<https://a.example/%20x?y=[/]>)"), END]), flow)


def test_code_is_copied_and_saved_without_overwriting(tmp_path: Path) -> None:
    there = tmp_path / "there.py"
    there.write_text("mine")

    async def flow(chat: Chatting) -> None:
        await chat.say("code")
        await chat.until(lambda: chat.app.screen.query(CodeBlock))
        block = chat.app.screen.query_one(CodeBlock)
        bar = block.query_one(SplitLine)
        copy = bar.render().plain.index("copy") + bar.gutter.left
        await chat.pilot.click(bar, offset=(copy, 0))
        await chat.until(lambda: chat.app.clipboard == "print('[/]')")
        for path in (there, tmp_path / "new.py"):
            block.action_save()
            await chat.until(lambda: chat.app.screen.query("Ask Input"))
            chat.app.screen.query_one("Ask Input", Input).value = str(path)
            await chat.pilot.press("enter")
            await chat.until(lambda: not chat.app.screen.query("Ask Input"))
        await chat.until(lambda: any("Saved to" in notice for notice in chat.notices()))
        assert there.read_text() == "mine"
        assert (tmp_path / "new.py").read_text() == "print('[/]')\n"

    run(ScriptedClient([TextDelta("```python\nprint('[/]')\n```"), END]), flow)


def test_name_for_code_is_suggested_and_cannot_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def flow(chat: Chatting) -> None:
        await chat.say("code")
        await chat.until(lambda: chat.app.screen.query(CodeBlock))
        chat.app.screen.query_one(CodeBlock).action_save()
        await chat.until(lambda: chat.app.screen.query("Ask Input"))
        field = chat.app.screen.query_one("Ask Input", Input)
        assert field.value == "snippet.py"
        await chat.pilot.press("end", "ctrl+u", "enter")
        await chat.until(lambda: "press esc to cancel" in field.placeholder)
        assert field.is_attached

    run(ScriptedClient([TextDelta("```python\nprint(1)\n```"), END]), flow)


def test_warning_about_a_loaded_model_is_shown_once() -> None:
    async def flow(chat: Chatting) -> None:
        for step in (loaded, Loading("", "stopped"), loaded):
            await chat.client.engine.loaded.put(step)
        await chat.until(chat.client.engine.loaded.empty)
        await chat.until(lambda: chat.notices() == ["The model holds little"])
        assert [one.timeout for one in chat.app._notifications] == [chat.app.NOTIFICATION_TIMEOUT]

    loaded = Loading("m", "loaded", loaded=True, warning="the model holds little")
    run(ScriptedClient(), flow)
