"""Tests for the menu above the prompt: commands, arguments, files, and earlier inputs."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.geometry import Region

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.commands import COMMANDS, Owner
from tui.completion import find_request
from tui.engine_types import ModelInfo
from tui.file_search import Files, find_files
from tui.fuzzy import rank
from tui.screens.chat_dialogs import ChatDialogs
from tui.screens.models import ModelsScreen
from tui.types import Attachment, ChatSettings, Preset
from tui.widgets.conversation import Conversation


async def write(chat: Chatting, text: str) -> None:
    """Write text into the prompt, and wait until the menu is shown."""
    chat.composer.area.write(text)
    await chat.until(lambda: chat.composer.menu.is_open and chat.composer.menu._text == text)


def labels(chat: Chatting) -> list[str]:
    return [one.label for one in chat.composer.menu._shown]


def test_slash_lists_all_commands_with_keys_and_aliases() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("/")
        await chat.until(lambda: len(labels(chat)) == len(COMMANDS))
        assert chat.composer.menu.display
        await write(chat, "/mod")
        await chat.until(lambda: any("Switch model" in line and "/model" in line for line in chat.lines()))
        assert any("F2" in line for line in chat.lines())

    run(ScriptedClient(), flow, size=(120, 40))


@pytest.mark.parametrize(
    ("typed", "row", "size"),
    [
        ("/", "New chat (also /clear) F5", (60, 15)),
        ("/rename", "Rename this chat (also /rename)", (60, 15)),
        ("/edit", "Edit your last message (keeps the old branch)", (80, 24)),
    ],
)
def test_descriptions_of_commands_fit_into_small_terminals(typed: str, row: str, size: tuple[int, int]) -> None:
    async def flow(chat: Chatting) -> None:
        await write(chat, typed)
        await chat.until(lambda: any(row in " ".join(line.split()) for line in chat.lines()))

    run(ScriptedClient(), flow, size=size)


def test_menu_in_a_small_terminal_has_six_rows_and_tells_how_many_there_are() -> None:
    async def flow(chat: Chatting) -> None:
        await write(chat, "/")
        await chat.until(lambda: chat.composer.menu.size.height == 6)
        assert f"esc close · {len(COMMANDS)} rows" in chat.lines()[chat.composer.area.region.bottom - 1]
        await write(chat, "/archive")
        await chat.until(lambda: f"esc close · {len(labels(chat))} rows" in str(chat.composer.area.border_subtitle))

    run(ScriptedClient(), flow, size=(60, 15))


def test_expired_hint_leaves_the_menu_keys_visible() -> None:
    async def flow(chat: Chatting) -> None:
        chat.composer.area.hint("a hint", 0.2)
        await write(chat, "/mod")
        await chat.pilot.pause(0.4)
        assert "tab complete" in str(chat.composer.area.border_subtitle)

    run(ScriptedClient(), flow)


def test_arrows_choose_and_enter_runs_a_command() -> None:
    async def flow(chat: Chatting) -> None:
        await write(chat, "/mod")
        assert labels(chat)[:2] == ["/models", "/load NAME"]
        await chat.pilot.press("down", "up", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
        assert chat.composer.area.text == ""

    run(ScriptedClient(), flow)


def test_enter_before_the_menu_is_shown_runs_the_command_of_a_unique_prefix() -> None:
    async def flow(chat: Chatting) -> None:
        chat.at_once(*"/mode", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))

    run(ScriptedClient(), flow)


def test_escape_closes_the_menu_until_the_command_is_gone() -> None:
    async def flow(chat: Chatting) -> None:
        await write(chat, "/se")
        await chat.pilot.press("escape", "t")
        assert chat.composer.area.text == "/set"
        assert not chat.composer.menu.is_open
        chat.composer.area.write("")
        await chat.pilot.pause()
        await write(chat, "/se")

    run(ScriptedClient(), flow)


def test_arguments_of_commands_are_completed() -> None:
    client = ScriptedClient()
    client.chats.kept_presets["pirate"] = Preset("pirate", ChatSettings("Talk like a pirate."))

    async def flow(chat: Chatting) -> None:
        await write(chat, "/preset p")
        await chat.pilot.press("tab")
        assert chat.composer.area.text == "/preset pirate"
        await write(chat, "/preset n")
        assert [label.split()[0] for label in labels(chat)] == ["none"]
        await write(chat, "/set t")
        await chat.pilot.press("tab")
        assert chat.composer.area.text in ("/set temperature ", "/set top_p ", "/set top_k ")
        await write(chat, "/model smol")
        assert "smollm2:135m" in labels(chat)
        await write(chat, "/model llama")
        assert [one.help for one in chat.composer.menu._shown] == ["42.5 GB  too large"]
        await write(chat, "/theme hearth-l")
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: chat.app.theme == "hearth-light")
        await write(chat, "/export ")
        assert labels(chat) == ["new-chat.md", "new-chat.json"]

    run(client, flow)


@pytest.mark.parametrize(
    ("typed", "takes"),
    [
        ("/theme light", True),
        ("/attach read", True),
        ("/load smol", True),
        ("/load org/smol", False),
        ("/backup read", False),
        ("/export read", False),
        ("/theme ", False),
    ],
)
def test_enter_takes_the_first_argument_of_a_list_but_no_name_of_a_new_file(typed: str, takes: bool) -> None:
    request = find_request(typed, len(typed))
    assert request is not None
    assert request.takes_first is takes


def test_file_chosen_from_the_menu_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "notes.txt").write_text("some notes")
    (tmp_path / "other.md").write_text("other")
    monkeypatch.chdir(tmp_path)

    async def flow(chat: Chatting) -> None:
        await write(chat, "Summarize @not")
        assert labels(chat) == ["src/notes.txt"]
        await chat.pilot.press("enter")
        await chat.until(lambda: "notes.txt" in chat.label("#attached"))
        assert chat.composer.area.text == "Summarize src/notes.txt "
        assert chat.client.replies.asked == []
        await write(chat, "/attach oth")
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: "other.md" in chat.label("#attached"))
        chat.composer.area.write("me@example.org")
        await chat.pilot.pause()
        assert not chat.composer.menu.is_open

    run(ScriptedClient(), flow)


def test_name_of_a_refused_file_leaves_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_bytes(b"text\0more")
    (tmp_path / "data.dat").write_bytes(b"\0")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"see @")
        await chat.until(lambda: labels(chat) == ["notes"])
        await chat.pilot.press("tab")
        await chat.until(chat.notices)
        await chat.until(lambda: chat.composer.area.text == "see ")
        await chat.pilot.press("x")
        assert chat.composer.area.text == "see x"

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    ("columns", "shown"), [(80, "Ask anything   (/ commands   @ files)"), (40, "Ask anything"), (14, "Ask anything")]
)
def test_placeholder_fits_the_prompt(columns: int, shown: str) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.composer.area.placeholder == shown)
        await chat.pilot.resize_terminal(30, 24)
        await chat.until(lambda: chat.composer.area.placeholder == "Ask anything")

    run(ScriptedClient(), flow, size=(columns, 24))


def test_earlier_inputs_are_searched() -> None:
    async def flow(chat: Chatting) -> None:
        for text in ("about trees", "about rivers", "about treaties"):
            await chat.say(text)
        chat.client.chats.sent.insert(0, "of another window: trend")
        await chat.pilot.press("ctrl+r", *"tre")
        await chat.until(lambda: labels(chat) == ["of another window: trend", "about treaties", "about trees"])
        await chat.pilot.press("ctrl+r", "ctrl+r", "enter")
        assert chat.composer.area.text == "about trees"
        assert not chat.composer.menu.is_open
        assert len(chat.client.replies.asked) == 3
        await chat.pilot.press("ctrl+r", "escape", "x")
        assert chat.composer.area.text == "about treesx"
        assert not chat.composer.menu.is_open
        await chat.pilot.press("ctrl+r")
        await chat.until(lambda: labels(chat) == ["No earlier input matches."])
        await chat.pilot.press("backspace")
        await chat.until(lambda: labels(chat) == ["about trees"])

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("size", [(60, 15), (80, 18), (80, 24), (120, 40)])
def test_prompt_stays_visible_with_a_menu_and_with_many_lines(size: tuple[int, int]) -> None:
    screen = Region(0, 0, *size)

    async def flow(chat: Chatting) -> None:
        area = chat.composer.area
        await write(chat, "/")
        await chat.until(lambda: chat.composer.menu.region.height > 2)
        await chat.until(lambda: chat.composer.region.bottom == size[1] - 1)
        await chat.until(lambda: screen.contains_region(area.region))
        assert any("│ /" in line for line in chat.lines())
        await chat.type("\n".join(f"line {number}" for number in range(17)), enter=False)
        await chat.until(lambda: any("line 16" in line for line in chat.lines()))
        await chat.until(lambda: screen.contains_region(area.region))
        await write(chat, "\n".join(["x"] * 16) + "\n@")
        await chat.until(lambda: any("@" in line for line in chat.lines()))
        await chat.until(lambda: screen.contains_region(area.region))

    run(ScriptedClient(), flow, size=size)


def test_prompt_with_an_attachment_and_many_lines_has_its_whole_border() -> None:
    async def flow(chat: Chatting) -> None:
        chat.composer.attached.add(Attachment("notes.txt", "text"))
        await chat.type("\n".join(f"line {number}" for number in range(17)), enter=False)
        await chat.until(lambda: any("line 16" in line for line in chat.lines()))
        await chat.until(lambda: any("notes.txt" in line for line in chat.lines()))
        area = chat.composer.area.region
        assert chat.lines()[area.bottom - 1].startswith("╰")
        assert area.bottom <= chat.composer.status.region.y

    run(ScriptedClient(), flow, size=(80, 24))


def test_ranking_prefers_prefixes_then_words_then_letters_in_order() -> None:
    names = ["xsearchx", "my search", "search", "searching", "s-e-a-r-c-h", "other"]
    assert rank("search", names, lambda name: [name], 9) == [
        "search",
        "searching",
        "my search",
        "xsearchx",
        "s-e-a-r-c-h",
    ]


def test_menu_of_files_lists_only_files_that_can_be_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "b.txt", "c.PDF"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    async def flow(chat: Chatting) -> None:
        await write(chat, "see @")
        assert labels(chat) == ["b.txt"]

    run(ScriptedClient(), flow)


def test_menu_of_files_to_import_lists_json_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    for name in ("notes.txt", "chats.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    async def flow(chat: Chatting) -> None:
        await write(chat, "/import ./")
        assert labels(chat) == ["./chats.json", "./old/"]

    run(ScriptedClient(), flow)


def test_file_search_respects_gitignore_and_hides_dot_files(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in (".gitignore", "kept.txt", "left.log", ".hidden/inner.txt", "deep/er/kept.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("*.log")
    assert find_files("", tmp_path) == Files(["kept.txt", "deep/er/kept.py"])


def test_file_search_has_a_limit_and_lists_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.file_search.LIMIT", 30)
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "above").symlink_to(tmp_path.parent)
    assert len(find_files("", tmp_path).names) == 30
    assert not find_files("", tmp_path).is_cut
    assert find_files(f"{tmp_path}/", Path()).is_cut
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "last.txt").touch()
    assert find_files("", tmp_path).is_cut
    assert f"{tmp_path}/more/last.txt" in find_files(f"{tmp_path}/more/", Path()).names
    assert find_files("/nowhere at all/", Path()) == Files([])


def test_file_search_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.file_search.SECONDS", -1.0)
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
    assert find_files("", tmp_path) == Files([], is_cut=True)


def test_lists_are_read_once_while_the_menu_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    client, reads = ScriptedClient(), list[str]()
    installed = client.models.installed

    async def counted() -> Sequence[ModelInfo]:
        reads.append("models")
        return await installed()

    def found(typed: str, folder: Path) -> Files:
        reads.append(typed or "all")
        return Files([f"{typed}{name}" for name in ("main.py", "make.sh", "readme.md", ".profile")])

    client.models.installed = counted  # type: ignore[method-assign]
    monkeypatch.setattr("tui.file_search.find_files", found)

    async def flow(chat: Chatting) -> None:
        for text, first, count in (("@mak", "make.sh", 1), ("@ma", "main.py", 2), ("@./", "./main.py", 3)):
            await write(chat, text)
            assert (labels(chat)[0], len(labels(chat))) == (first, count)
        await write(chat, "@./.p")
        assert labels(chat)[0] == "./.profile"
        assert reads == ["all", "./"]
        reads.clear()
        for text in ("/load ", "/load s", "/load sm"):
            await write(chat, text)
        assert reads == ["models"]
        chat.composer.area.write("")
        await chat.until(lambda: not chat.composer.menu.is_open)
        await write(chat, "/load s")
        assert reads == ["models", "models"]

    run(client, flow)


def test_menu_says_that_files_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.file_search.find_files", lambda *_: Files(["main.py", "make.sh"], is_cut=True))

    async def flow(chat: Chatting) -> None:
        await write(chat, "@ma")
        assert labels(chat) == [
            "main.py",
            "make.sh",
            "Only the first 2 files are listed. Type a folder, such as ./src/",
        ]
        await write(chat, "@other")
        assert len(labels(chat)) == 1
        await chat.pilot.press("down", "tab")
        assert chat.composer.area.text == "@other"

    run(ScriptedClient(), flow)


def test_every_command_of_the_dialogs_has_one() -> None:
    client = ScriptedClient()
    dialogs = ChatDialogs(Conversation(client), client, "")
    assert {one.action for one in COMMANDS if one.owner is Owner.DIALOGS} == dialogs.by_action.keys()
