"""All commands, options, settings, variables, files, and links in the documents exist."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from app.chat_backend.plain.commands import ONLY_IN_PLAIN
from app.cli import ingle
from app.settings.settings import FORMER_NAMES, SETTINGS, Inside
from engine.config import MemoryLimit
from tests.support.markdown import (
    anchors,
    contents_entries,
    fenced_blocks,
    headings,
    inline_code,
    links,
    table_rows,
)
from tui.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_CONTENTS = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "BENCHMARKS", "CONTRIBUTING", "RELIABILITY", "SECURITY")),
]
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / ".github" / "pull_request_template.md", *WITH_CONTENTS]
OTHER_VARIABLES = {"INGLE_TEST_GPU"}  # variables that only tests read
SEPARATORS = ";|&()<>\n"

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


# -- README and contents lists


def test_readme_has_at_most_150_lines() -> None:
    assert len(read(README).splitlines()) <= 150


def test_readme_links_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in PAGES} <= set(links(read(README)))


def test_figures_of_the_readme_are_measured() -> None:
    measured = "".join(read(ROOT / name) for name in ("BENCHMARKS.md", "RELIABILITY.md"))
    section = read(README).partition("## Differences from other engines")[2].partition("\n## ")[0]
    figures = re.findall(r"\d[\d,.]*\d", section)
    assert figures
    assert [figure for figure in figures if figure not in measured] == []


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^ *(pip install .*)$", read(README), re.MULTILINE)
    assert commands[0].startswith("pip install . && ingle run ")
    assert commands[1] in read(ROOT / ".ci/run").splitlines()


@pytest.mark.parametrize("path", WITH_CONTENTS, ids=lambda path: path.name)
def test_contents_list_matches_the_sections(path: Path) -> None:
    text = read(path)
    assert contents_entries(text) == [heading for level, heading in headings(text) if level == 2]


@every_document
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in links(read(path)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(read(target)), link


# -- commands


def commands_in(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without the assignments before the command."""
    script = re.sub(r"(?:^|\s)# .*$", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(script, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= set(SEPARATORS):
            if words:
                yield words
            words = []
        elif words or not re.match(r"\w+=|time$", word):
            words.append(word)


def check_command(words: list[str], *, whole: bool) -> None:
    """Raise an error if the command or one of its options does not exist.

    With `whole`, the required arguments must also be present.
    """
    match words:
        case ["ingle", *rest]:
            rest = [str(ROOT / "README.md") if word == "FILE" else word for word in rest]
            check_ingle([re.sub(r"^[A-Z_]+$", "1", word) for word in rest], whole=whole)
        case ["python", "-m", "pytest", *rest]:
            check_pytest(rest)
        case ["python", "-m", module, *rest] if module.startswith("tests."):
            check_options(rest, read(ROOT / f"{module.replace('.', '/')}.py"))
        case ["make", *targets]:
            assert all(re.search(rf"^{target}:", read(ROOT / "Makefile"), re.MULTILINE) for target in targets), words
        case [program, *rest] if program.endswith(".sh"):
            check_options(rest, read(ROOT / program))
        case [path, *_] if path.startswith("tests/"):
            check_pytest(words)


def check_pytest(words: list[str]) -> None:
    check_options(
        words, "\n".join(read(ROOT / name) for name in ("tests/conftest.py", "tests/support/sampled_cases.py"))
    )
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def check_options(words: list[str], source: str) -> None:
    options = [word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")]
    assert [option for option in options if option not in source and option != "--timeout"] == []


def check_ingle(words: list[str], *, whole: bool) -> None:
    if words and words[0] in ("--version", "--help"):
        return
    command: click.Command = ingle
    context = click.Context(ingle, info_name="ingle")
    words = words if words and not words[0].startswith("-") else ["chat", *words]
    while isinstance(command, click.Group) and words:
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    if isinstance(command, click.Group):
        return
    try:
        command.make_context(command.name, list(words), parent=context.parent)
    except click.exceptions.Exit:
        return  # --help was given
    except click.MissingParameter:
        assert not whole
    if context.command_path.startswith("ingle config "):
        check_setting(words)


def check_setting(words: list[str]) -> None:
    match words:
        case [name] if name != "1" and not name.startswith("-"):
            assert name in SETTINGS
        case [name, value] if "1" not in (name, value) and value != "-":
            SETTINGS[name].parse(value)


@every_document
def test_shell_commands_exist(path: Path) -> None:
    for language, block in fenced_blocks(read(path)):
        if language == "sh":
            for words in commands_in(block):
                check_command(words, whole=True)


@every_document
def test_commands_within_sentences_exist(path: Path) -> None:
    for code in inline_code(read(path)):
        if code.partition(" ")[0] in ("ingle", "python", "make") or code.startswith(("tests/", "INGLE_")):
            for words in commands_in(code):
                check_command(words, whole=False)


def options_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) is not None:
                yield from options_of(below)


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    """The options of all commands, and the options in the sources of test programs."""
    sources = [read(ROOT / name) for name in tracked_files() if re.match(r"tests/.*\.(py|sh)$", name)]
    return {*options_of(ingle), "--help", *re.findall(r"(?<![\w-])--\w[\w-]*", "\n".join(sources))}


@every_document
def test_options_within_sentences_exist(path: Path, known_options: set[str]) -> None:
    named = {option for code in inline_code(read(path)) for option in re.findall(r"(?:^| )(--\w[\w-]*)", code)
             if code.startswith("--")}  # fmt: skip
    assert named - known_options == set()


@pytest.mark.parametrize(
    "command",
    [
        "ingle frobnicate",
        "ingle serve --frobnicate",
        "ingle quantize a b --to int3",
        "ingle config set contxt 4",
        "ingle config set context long",
        "ingle cache frobnicate",
        "python -m pytest --frobnicate",
        "python -m tests.frobnicate",
        "INGLE_THREADS=1 ingle pull --frobnicate",
        "ls | ingle run - --frobnicate",
    ],
)
def test_check_reports_wrong_commands(command: str) -> None:
    *_, words = commands_in(command)
    with pytest.raises((click.ClickException, AssertionError, KeyError, ValueError, FileNotFoundError)):
        check_command(words, whole=True)


# -- settings and variables


@every_document
def test_environment_variables_exist(path: Path) -> None:
    known = {f"INGLE_{name.upper()}" for name in (*SETTINGS, *FORMER_NAMES)} | OTHER_VARIABLES
    assert set(re.findall(r"\bINGLE_[A-Z_]*[A-Z]\b", read(path))) - known == set()


def shown_default(name: str) -> str | None:
    """Return the default of a setting as docs/settings.md shows it, or None if it depends on the machine."""
    match SETTINGS[name].default:
        case Inside(setting, folder):
            return f"`{folder}` in `{setting}`"
        case bool(is_on):
            return "`yes`" if is_on else "`no`"
        case MemoryLimit():
            return "`auto`"
        case None if name.startswith(("kv_", "idle_")):
            return "`auto`"
        case str() | int() as value:
            return f"`{value}`"
        case None | tuple() | Mapping():
            return "none"
        case _:
            return None


def test_settings_page_lists_every_setting() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(read(ROOT / "docs/settings.md")) if len(row) == 5}
    assert set(rows) - {"setting"} == set(SETTINGS)
    options = set(options_of(ingle))
    for name, setting in SETTINGS.items():
        _, variable, flag, default, meaning = rows[name]
        assert variable == f"`INGLE_{name.upper()}`"
        assert not flag or flag.strip("`") in options, name
        assert bool(flag) == (f"--{name.replace('_', '-')}" in options), name
        assert shown_default(name) in (None, default), name
        assert all(f"`{other}`" in meaning for other in setting.also), name


@pytest.mark.parametrize("name", ["settings.md", "server.md"])
def test_examples_of_the_config_file_are_read(name: str) -> None:
    examples = [block for language, block in fenced_blocks(read(ROOT / "docs" / name)) if language == "toml"]
    assert examples
    for example in examples:
        for key, value in tomllib.loads(example).items():
            SETTINGS[key].parse(value)


@every_document
def test_lines_of_the_config_file_within_sentences_are_settings(path: Path) -> None:
    lines = (re.fullmatch(r"([a-z_]+) = .+", code) for code in inline_code(read(path)))
    assert {line[1] for line in lines if line} <= set(SETTINGS)


# -- files


@every_document
def test_named_files_exist(path: Path) -> None:
    files = tracked_files()
    for code in inline_code(read(path)):
        for name in code.split():
            if re.fullmatch(r"(app|engine|quant|tui|tests|docs|packaging)/[a-z0-9_./-]+", name):
                assert (ROOT / name).exists(), name
            elif re.fullmatch(r"[a-z0-9_/]+\.py", name):
                assert any(f"/{file}".endswith(f"/{name}") for file in files), name


def test_tables_named_in_contributing_exist_in_the_named_files() -> None:
    named = re.findall(r"`(\w+)`\s+in\s+`([a-z0-9_/]+\.py)`", read(ROOT / "CONTRIBUTING.md"))
    assert len(named) > 5
    assert [(table, name) for table, name in named if not re.search(rf"\b{table}\b", read(ROOT / name))] == []


# -- the chat


def test_chat_page_lists_every_command() -> None:
    rows = [row for row in table_rows(read(ROOT / "docs/chat.md")) if len(row) == 3]
    shown = {row[0].strip("`"): row[1].strip("`") for row in rows if row[0].startswith("`/")}
    assert shown == {f"/{command.name} {command.takes}".strip(): command.shown_key for command in COMMANDS}


def test_slash_commands_within_sentences_exist() -> None:
    known = {name for command in (*COMMANDS, *ONLY_IN_PLAIN) for name in (command.name, *command.aliases)}
    named = {match[1] for code in inline_code(read(ROOT / "docs/chat.md")) if (match := re.match(r"/(\w+)", code))}
    assert named <= known
