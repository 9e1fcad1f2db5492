"""`ingle completion`: a script that has a shell complete commands, options and names."""

import click
from click.shell_completion import get_completion_class

from app.errors import AppError

EXAMPLES = """\b
Examples:
  ingle completion bash > ~/.local/share/bash-completion/completions/ingle
  ingle completion zsh > ~/.zfunc/_ingle          with ~/.zfunc in fpath, before compinit
  ingle completion fish > ~/.config/fish/completions/ingle.fish
"""

_VARIABLE = "_INGLE_COMPLETE"  # by which a shell asks this program, in click's protocol


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script for a SHELL: bash from 4.4 on, zsh or fish."""
    kind = get_completion_class(shell)
    if kind is None:
        raise AppError(f"there is no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "ingle", _VARIABLE).source())
