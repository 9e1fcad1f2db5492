"""The command line: the table of commands, and how errors become messages and exit statuses.

Each command is imported only when it runs, so that `ingle --help` stays instant.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

import click
from click.exceptions import NoArgsIsHelpError

from app.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_NO_SPACE, EXIT_OK, exit_status
from app.process import memory_shortage
from app.process.memory_shortage import is_memory_shortage
from app.process.signals import interrupt_on_signals
from app.process.uninterruptible import exit_if_busy
from app.text.terminal_text import sanitize
from quant.errors import InglenookError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


@dataclass(frozen=True)
class CommandEntry:
    """The module and attribute of a command, and its line in `ingle --help`."""

    module: str
    attribute: str
    summary: str

    def load(self) -> click.Command:
        """Import the command, which may import torch. Raises TypeError if the attribute is not a command."""
        from app.settings.settings import prepare_torch

        prepare_torch()
        command = getattr(import_module(self.module), self.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.module}.{self.attribute} is not a command")
        return command


COMMANDS: Mapping[str, CommandEntry] = {
    "chat": CommandEntry("app.commands.chat", "chat", "Chat in the terminal. The default command."),
    "run": CommandEntry("app.commands.run", "run", "Ask a model one question and print the answer."),
    "serve": CommandEntry("app.commands.serve", "serve", "Serve a model to other programs over HTTP."),
    "with": CommandEntry("app.commands.with_client", "with_client", "Run an agent or another program with a model."),
    "connect": CommandEntry("app.commands.connect", "connect", "Set up a program to use the server."),
    "disconnect": CommandEntry("app.commands.connect", "disconnect", "Undo what connect wrote."),
    "ps": CommandEntry("app.commands.ps", "ps", "List running servers and their models."),
    "load": CommandEntry("app.commands.load", "load", "Load a model in a running server."),
    "unload": CommandEntry("app.commands.unload", "unload", "Unload a model of a running server."),
    "open": CommandEntry("app.commands.open", "open_page", "Open the page of a running server in the browser."),
    "stop": CommandEntry("app.commands.stop", "stop", "Stop a running server."),
    "logs": CommandEntry("app.commands.logs", "logs", "Show the log of the servers."),
    "service": CommandEntry("app.commands.service", "service", "Install a server that the system starts."),
    "share": CommandEntry("app.commands.share", "share", "Share the models of this machine with your other machines."),
    "box": CommandEntry("app.commands.box", "box", "Use the models of your other machines."),
    "pull": CommandEntry("app.commands.pull", "pull", "Download a model."),
    "ls": CommandEntry("app.commands.ls", "ls", "List the models on this machine."),
    "show": CommandEntry("app.commands.show", "show", "Show details of a model without loading it."),
    "fit": CommandEntry("app.commands.fit", "fit", "Check whether a model fits in memory before you download it."),
    "search": CommandEntry(
        "app.commands.search", "search", "Search the Hugging Face Hub for models that fit this machine."
    ),
    "rm": CommandEntry("app.commands.rm", "rm", "Remove models from this machine."),
    "quantize": CommandEntry("app.commands.quantize", "quantize", "Write a quantized copy of a model."),
    "cache": CommandEntry("app.commands.cache", "cache", "Show or clear the on-disk KV cache."),
    "bench": CommandEntry("app.commands.bench", "bench", "Measure how fast a model runs on this machine."),
    "config": CommandEntry("app.commands.config", "config", "Show and change settings."),
    "export": CommandEntry("app.commands.export", "export", "Write chats and settings to an archive."),
    "import": CommandEntry("app.commands.import_archive", "import_archive", "Add the chats of an archive or a file."),
    "completion": CommandEntry("app.commands.completion", "completion", "Print a completion script for a shell."),
    "update": CommandEntry("app.commands.update", "update", "Show how to update, and whether a newer version exists."),
    "doctor": CommandEntry("app.commands.doctor", "doctor", "Check that this machine is ready."),
}

_DEFAULT = "chat"

EXAMPLES = """\b
Examples:
  ingle                               chat with the default model, downloaded on first use
  ingle run "Why is the sky blue?"    ask the default model one question
  ingle serve                         serve an API to editors, agents, and chat programs
  ingle pull smollm2:135m             download a model now
  ingle ls --json                     list the stored models, for scripts
  ingle doctor                        find out what is wrong
"""


class LazyGroup(click.Group):
    """A group of the commands in COMMANDS, each of which is imported when it is run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Run the chat if the arguments are empty, or start with an option of the chat or a question."""
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        is_chat = not args or (args[0].startswith("-") and args[0] not in own) or " " in args[0].strip()
        # resilient parsing is shell completion, which needs the list of commands
        if is_chat and not ctx.resilient_parsing:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return COMMANDS[cmd_name].load() if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS, n=1)
            ctx.fail(f"No such command: {name}." + (f" Did you mean {near[0]}?" if near else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        found = (name for name in COMMANDS if name.startswith(incomplete))
        options = super(click.Group, self).shell_complete(ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name].summary) for name in found), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, because reading the help of each command would import it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"ingle {version('inglenook')}")
        except PackageNotFoundError:
            click.echo("ingle (run from a checkout, not installed)")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def ingle() -> None:
    """Run language models on your own computer: chat with them, or serve them to other programs."""


def main() -> int:
    """Run the command line of this process. Returns its exit status."""
    # signals then raise KeyboardInterrupt, so that child processes end and unfinished files are deleted
    interrupt_on_signals()
    try:
        # returns quietly if the reader of stdout has closed the pipe
        status = ingle.main(prog_name="ingle", standalone_mode=False)
    except InglenookError as problem:
        _complain(problem.message, problem.remedy)
        return exit_status(problem)
    except NoArgsIsHelpError as problem:
        problem.show()
        return problem.exit_code
    except click.ClickException as problem:
        _complain(_uncapitalized(problem.format_message()).removesuffix("."), _help_command(problem))
        return problem.exit_code
    except (KeyboardInterrupt, click.Abort):
        return exit_if_busy(EXIT_INTERRUPTED)
    except Exception as problem:  # noqa: BLE001  # a shortage of memory has many forms; other errors are raised again
        return _unexpected(problem)
    return status if isinstance(status, int) else EXIT_OK


def _unexpected(problem: Exception) -> int:
    """Report a lack of memory or an operating system error, and return the exit status. Raises any other error."""
    if is_memory_shortage(problem):
        _complain(memory_shortage.MESSAGE, memory_shortage.REMEDY)
        return EXIT_FAILURE
    if not isinstance(problem, OSError):
        raise problem
    _complain(f"{problem.filename or 'the system'}: {problem.strerror or problem}")
    return EXIT_NO_SPACE if problem.errno == errno.ENOSPC else EXIT_FAILURE


def _uncapitalized(message: str) -> str:
    """Return a sentence as the other errors are written: without a capital, unless its first word is a name."""
    return f"{message[:1].lower()}{message[1:]}" if message[1:2].islower() else message


def _help_command(problem: click.ClickException) -> str:
    """Return the command that prints the help to the command that was used wrongly."""
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    return f"{context.command_path} --help" if context else ""


def _complain(message: str, remedy: str = "") -> None:
    from app.progress import wrapped_line

    click.echo(wrapped_line(f"error: {sanitize(message)}"), err=True)  # the message may quote a model file
    if remedy:
        click.echo(wrapped_line(f"try: {sanitize(remedy)}"), err=True)
