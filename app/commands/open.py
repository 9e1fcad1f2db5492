"""`ingle open`: open the page of a running server in the browser."""

import asyncio
import sys

import click

from app.client.running_server import servers_or_service
from app.commands.options import server_port_option
from app.settings.api_keys import chosen_keys, own_key_file
from app.settings.settings import Settings, load_settings

EXAMPLES = """\b
Examples:
  ingle open
  ingle open --port 8000
  ingle open --print
"""


@click.command("open", epilog=EXAMPLES)
@server_port_option
@click.option("--print", "prints", is_flag=True, help="Print the address, and open nothing.")
def open_page(port: int | None, prints: bool) -> None:
    """Open the page of a running server in the default browser.

    The page shows the server's models, memory, and requests, and has a box to try a model. This command starts no
    server except that of an installed service. The exit status is 3 if none is running.
    """
    settings = load_settings(port=port)
    address = f"{asyncio.run(servers_or_service(settings))[0].url}/"
    if prints:
        click.echo(address)
        return
    import webbrowser

    if not webbrowser.open(address):
        click.echo(f"This machine has no browser. The page is at {address}", err=True)
        return
    click.echo(f"Opened {address}{_key_hint(settings)}", err=True)


def _key_hint(settings: Settings) -> str:
    """Describe the key that the page asks for; empty if it asks for none."""
    if chosen_keys(settings):
        return ". The page asks for your API key."
    return "" if sys.platform == "linux" else f". The page asks for the API key in {own_key_file(settings)}."
