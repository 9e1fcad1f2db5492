"""`ingle completion`: print a script with which a shell completes commands, options, and names."""

import click
from click.shell_completion import get_completion_class

from app.errors import AppError

EXAMPLES = """\b
Examples:
  ingle completion bash > ~/.local/share/bash-completion/completions/ingle
  ingle completion zsh > ~/.zfunc/_ingle          if fpath has ~/.zfunc before compinit runs
  ingle completion fish > ~/.config/fish/completions/ingle.fish
"""

_VARIABLE = "_INGLE_COMPLETE"  # the variable with which a shell requests completions, in click's protocol


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL: bash (4.4 or newer), zsh, or fish."""
    kind = get_completion_class(shell)
    if kind is None:
        raise AppError(f"there is no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "ingle", _VARIABLE).source())
