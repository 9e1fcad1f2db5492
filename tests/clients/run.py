"""Run real clients against real servers: `tests/clients/run.sh [--list] [--keep] [NAME...]`.

The program installs each client into a separate environment, starts `ingle serve`, runs the client's driver, and prints
a table of clients and cases. It uses the network only to install packages; drivers connect to 127.0.0.1.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import platformdirs

from tests.clients.agents.agent import NOTE
from tests.clients.cases import CASES, TOOL_NAME
from tests.clients.driver_process import Outcome, run_driver
from tests.clients.environments import Environments, NotInstalled
from tests.clients.report import Row, as_markdown, as_text
from tests.clients.scripted_model import Call
from tests.clients.servers import Server, Servers
from tests.clients.table import Client, read_clients


def main() -> int:
    """Return exit status 1 if a case failed without a known reason, otherwise 0."""
    parser = argparse.ArgumentParser(prog="tests/clients/run.sh", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the clients and exit")
    parser.add_argument("--keep", action="store_true", help="keep the installed clients in the user's cache folder")
    parser.add_argument("--markdown", type=Path, help="file for the table as Markdown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingle-clients-") as scratch:
        project = Path(scratch, "project")
        clients = read_clients(project / NOTE)
        if arguments.list:
            print("\n".join(client.name for client in clients))
            return 0
        if unknown := set(arguments.names) - {client.name for client in clients}:
            parser.error(f"no such client: {', '.join(sorted(unknown))}")
        kept = platformdirs.user_cache_path("inglenook-tests") / "clients"
        environments = Environments(kept if arguments.keep else Path(scratch, "environments"))
        chosen = [client for client in clients if client.name in arguments.names or not arguments.names]
        rows = list(_rows(chosen, Servers(Path(scratch), _calls(clients)), environments, project))
    print(as_text(rows))
    if arguments.markdown:
        page = arguments.markdown.read_text(encoding="utf-8") if arguments.markdown.exists() else ""
        arguments.markdown.write_text(as_markdown(rows, page), encoding="utf-8")
    return int(any(row.has_failure for row in rows))


def _calls(clients: Sequence[Client]) -> Sequence[Call]:
    return [Call(TOOL_NAME, {"city": "Paris"}), *(client.calls for client in clients if client.calls)]


def _rows(chosen: Sequence[Client], servers: Servers, environments: Environments, project: Path) -> Iterator[Row]:
    """Install and run the clients in order, and yield their rows. A server starts when a client first needs it, and
    keeps running.
    """
    running: dict[str, Server] = {}
    with ExitStack() as stack:
        for client in chosen:
            for name in {client.server_of(case) for case in CASES} - running.keys():
                running[name] = stack.enter_context(servers.running(name))
            row = _row(client, environments, running, project)
            print(as_text([row]), file=sys.stderr, flush=True)
            yield row


def _row(client: Client, environments: Environments, servers: Mapping[str, Server], project: Path) -> Row:
    try:
        installed = environments.install(client.environment)
    except NotInstalled as problem:
        return Row(client, {}, dict.fromkeys(CASES, Outcome(False, f"not installed: {problem}")))
    outcomes: dict[str, Outcome] = {}
    # run all cases of a server in one process, because some libraries take seconds to import
    for name, server in servers.items():
        cases = [case for case in CASES if client.server_of(case) == name]
        outcomes.update(run_driver(client, installed, server, project, cases))
    return Row(client, installed.versions, outcomes)


if __name__ == "__main__":
    sys.exit(main())
