"""Tests for attaching files."""

from pathlib import Path

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.client import ClientError
from tui.drafts import LARGEST, Prompt, dropped_path, read_attachment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which has the files notes.txt, src/main.py, and picture.png."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print()")
    (tmp_path / "notes.txt").write_text("some notes")
    (tmp_path / "picture.png").write_bytes(b"\0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_file_becomes_an_attachment(tmp_path: Path) -> None:
    path = tmp_path / "a file.py"
    path.write_text("\ufeffprint('é')\n", encoding="utf-8")
    found = read_attachment(path)
    assert (found.name, found.text) == ("a file.py", "print('é')\n")


def test_refusal_says_what_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF\0" + b"x" * LARGEST)
    (tmp_path / "long.txt").write_bytes(b"x" * (LARGEST + 1))
    reasons = {}
    for name in ("", "a.pdf", "long.txt"):
        with pytest.raises(ClientError) as refused:
            read_attachment(tmp_path / name)
        reasons[name] = refused.value.sentences
    assert reasons == {
        "": f"Cannot attach {tmp_path}, because it is a folder. Attach its files.",
        "a.pdf": "The file a.pdf is not text. Only text files can be attached.",
        "long.txt": "The file long.txt is larger than 2 MB. Attach only the part that you need.",
    }


def test_names_of_files_are_written_as_the_user_typed_them() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/attach srv")
        await chat.until(lambda: chat.notices() == ["There is no file srv. Check the path."])

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"text\0more", b"x" * (LARGEST + 1), None])
def test_files_that_are_not_text_are_rejected(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ClientError) as refused:
        read_attachment(path)
    assert refused.value.remedy


def test_pasted_file_path_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "a file.txt"
    path.write_text("x")
    escaped = str(path).replace(" ", "\\ ")
    for pasted in (str(path), f"'{path}'", escaped, f"file://{path} \n"):
        assert dropped_path(pasted) == path
    for pasted in ("a file.txt", f"{path}\nmore", str(tmp_path), "/no/such/file", "/" * 5000):
        assert dropped_path(pasted) is None


@pytest.mark.parametrize(
    ("typed", "sent", "names"),
    [
        ("read @notes.txt now", "read notes.txt now", ["notes.txt"]),
        ("@src/main.py", "src/main.py", ["main.py"]),
        (
            "compare (see @notes.txt, @./src/main.py).",
            "compare (see notes.txt, ./src/main.py).",
            ["notes.txt", "main.py"],
        ),
        ("@notes.txt and @notes.txt", "notes.txt and notes.txt", ["notes.txt"]),
        ("ask @someone or @~somename @ me@notes.txt", "ask @someone or @~somename @ me@notes.txt", []),
        ("what is in @src", "what is in @src", []),
    ],
)
def test_typed_names_of_files_are_attached_when_the_message_is_sent(
    folder: Path, typed: str, sent: str, names: list[str]
) -> None:
    async def flow(chat: Chatting) -> None:
        chat.composer.area.write(typed + " ")
        await chat.say("")
        message = chat.conversation.chat.path()[0]
        assert (message.text, [file.name for file in message.attachments]) == (sent, names)
        assert chat.notices() == []

    run(ScriptedClient(), flow)


def test_file_chosen_in_the_menu_and_typed_again_is_attached_once(folder: Path) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"see @not")
        await chat.until(lambda: chat.composer.menu.is_open)
        await chat.pilot.press("tab")
        await chat.until(lambda: "notes.txt" in chat.label("#attached"))
        await chat.say("and @notes.txt again")
        message = chat.conversation.chat.path()[0]
        assert message.text == "see notes.txt and notes.txt again"
        assert [file.name for file in message.attachments] == ["notes.txt"]

    run(ScriptedClient(), flow)


def test_undo_in_the_empty_prompt_puts_removed_attachments_back(folder: Path) -> None:
    async def flow(chat: Chatting) -> None:
        for name in ("notes.txt", "src/main.py"):
            chat.composer.attach_path(folder / name)
        await chat.pilot.press("backspace")
        assert [file.name for file in chat.composer.prompt.attachments] == ["notes.txt"]
        assert "main.py" in chat.notices()[-1]
        await chat.pilot.press("ctrl+z")
        chat.composer.action_detach()
        await chat.pilot.press("ctrl+z", "ctrl+z")
        assert [file.name for file in chat.composer.prompt.attachments] == ["notes.txt", "main.py"]

    run(ScriptedClient(), flow)


def test_message_that_names_a_refused_file_returns_to_the_prompt(folder: Path) -> None:
    async def flow(chat: Chatting) -> None:
        chat.composer.attach_path(folder / "notes.txt")
        await chat.type("what is on @picture.png ?")
        await chat.until(chat.notices)
        assert chat.notices() == ["The file picture.png is not text. Only text files can be attached."]
        assert chat.composer.area.text == "what is on @picture.png ?"
        assert [file.name for file in chat.composer.prompt.attachments] == ["notes.txt"]
        assert chat.client.replies.asked == []

    run(ScriptedClient(), flow)


def test_edited_reply_attaches_no_file(folder: Path) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("hello")
        reply = chat.conversation.chat.path()[1]
        chat.composer.edit(reply, Prompt(reply.text))
        chat.composer.area.write("see @notes.txt now")
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.conversation.chat.path()[-1].text == "see @notes.txt now")

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    ("question", "asked", "typed"),
    [("read @notes.txt", "read notes.txt", ""), ("see @picture.png", None, "see @picture.png")],
)
def test_question_given_at_startup_attaches_the_files_that_it_names(
    folder: Path, question: str, asked: str | None, typed: str
) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.composer.area.text == typed and bool(chat.notices()) is not bool(asked))
        if asked:
            await chat.until(lambda: chat.texts()[:1] == [asked])
            assert [file.name for file in chat.conversation.chat.path()[0].attachments] == ["notes.txt"]

    run(ScriptedClient(), flow, question=question)
