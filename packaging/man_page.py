"""Print the man page of `ingle`, rendered from the help of its commands and tables of the documents."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.cli import COMMANDS, ingle

DOCS = Path(__file__).resolve().parent.parent / "docs"


def escaped(text: str) -> str:
    """Return text whose characters mean themselves in roff, also at the start of a line."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def marked(text: str) -> str:
    """Return a sentence of Markdown as roff: code is bold, and links keep their text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = text.split("`")
    return "".join(f"\\fB{escaped(part)}\\fR" if i % 2 else escaped(part) for i, part in enumerate(parts))


def paragraphs(help_text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text. Those that start with a backspace keep their layout, as in click."""
    for i, paragraph in enumerate(inspect.cleandoc(help_text).split("\n\n")):
        if i:
            yield ".PP"
        first, _, rest = paragraph.partition("\n")
        if first == "\b":
            yield from laid_out(rest)
        else:
            yield marked(" ".join(paragraph.split()))


def options_of(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
            names, meaning = record
            yield from (".TP", f"\\fB{escaped(names)}\\fR", marked(" ".join(meaning.split())))


def section_of(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """Yield the lines of a command and of the commands below it."""
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {escaped(context.command_path)} {escaped(usage)}"
    yield from paragraphs(command.help or "")
    yield from options_of(command, context)
    yield from examples(command.epilog or "")
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            if found := command.get_command(context, below):
                yield from section_of(found, below, context)


def examples(epilog: str) -> Iterator[str]:
    if lines := epilog.partition("Examples:\n")[2]:
        yield from (".PP", "Examples:", *laid_out(lines))


def laid_out(text: str) -> Iterator[str]:
    """Yield lines that keep their line breaks and spaces."""
    yield from (".RS", ".nf", escaped(text.rstrip()), ".fi", ".RE")


def table(document: str, heading: str) -> Iterator[str]:
    """Yield the first two columns of the first table below a heading of a document."""
    text = (DOCS / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", text.partition("\n## ")[0], re.MULTILINE)
    for term, meaning in rows[1:]:
        yield from (".TP", marked(term), marked(meaning))


def man_page(version: str, date: str) -> Iterator[str]:
    context = click.Context(ingle, info_name="ingle")
    yield f'.TH INGLE 1 "{date}" "Inglenook {version}" "User Commands"'
    yield from (".SH NAME", f"ingle \\- {escaped((ingle.help or '').rstrip('.'))}")
    yield from (".SH SYNOPSIS", "\\fBingle\\fR [\\fIcommand\\fR] [\\fIoptions\\fR]")
    yield from (".SH DESCRIPTION", "Without a command, \\fBingle\\fR opens the chat.")
    yield "\\fBingle\\fR \\fIcommand\\fR \\fB\\-\\-help\\fR prints the help of a command."
    yield from examples(ingle.epilog or "")
    yield ".SH COMMANDS"
    for name, entry in COMMANDS.items():
        yield from section_of(entry.load(), name, context)
    yield from (".SH EXIT STATUS", *table("commands.md", "Exit statuses"))
    yield from (".SH ENVIRONMENT", "Every setting has a variable: \\fBINGLE_\\fR and the setting's name in capitals.")
    yield "\\fBingle config list\\fR prints the settings, their values, and their origins."
    yield from (".SH FILES", *table("install.md", "Folders and files"))


if __name__ == "__main__":
    click.echo("\n".join(man_page(*sys.argv[1:3])))
