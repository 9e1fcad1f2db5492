"""Format the results of all clients, as text for the terminal and as the last part of the page docs/clients.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.clients.cases import CASES
from tests.clients.driver_process import Outcome
from tests.clients.table import Client

WIDTH = 300  # maximum length in characters of an error below the table


@dataclass(frozen=True)
class Row:
    """The results of one client: its installed versions, and an outcome per case."""

    client: Client
    versions: Mapping[str, str]
    outcomes: Mapping[str, Outcome]

    @property
    def has_failure(self) -> bool:
        """Whether a case failed for which the table of clients has no known reason."""
        return any(self.cell(case) == "failed" for case in CASES)

    def cell(self, case: str) -> str:
        """Return "ok", "failed", or the known reason of the failure from the table of clients."""
        if self.outcomes[case].ok:
            return "ok"
        return self.client.reasons.get(case, "failed")

    def version(self) -> str:
        """Return the versions of the client's packages that the table shows."""
        shown = self.client.shown or self.versions
        return ", ".join(f"{name} {self.versions[name]}" for name in shown if name in self.versions)


def as_text(rows: Sequence[Row]) -> str:
    """Return the results as aligned columns, followed by the failures."""
    lines = [["client", *CASES], *([row.client.name, *map(row.cell, CASES)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    faults = [
        f"{row.client.name}, {case}: {' '.join(row.outcomes[case].detail.split())[:WIDTH]}"
        for row in rows
        for case in CASES
        if not row.outcomes[case].ok
    ]
    return "\n".join([*table, *faults])


def as_markdown(rows: Sequence[Row], page: str = "") -> str:
    """Return the page docs/clients.md with these results instead of earlier ones, with versions but without a date."""
    return page.partition(HEADING)[0] + "\n".join([INTRODUCTION, *map(_line, rows), ""])


def _line(row: Row) -> str:
    return f"| {row.client.title} | {row.version()} | {' | '.join(map(row.cell, CASES))} |"


HEADING = "## Tests of clients\n"
INTRODUCTION = f"""\
{HEADING}
`tests/clients/run.sh` installs each of these clients, starts `ingle serve`, and runs five cases with the client. The
model is SmolLM2 135M for libraries. Agents, and tool calls of clients that cannot force one, use a model with scripted
replies and a context of 40,960 tokens.

## Cases

| case | expected result |
|---|---|
| turn | The client shows a whole reply. |
| stream | The reply arrives in several pieces. |
| tool | The model calls a tool; the client reads its name and arguments. An agent runs the tool and sends its result. |
| wrong model | The client reports an error that names the model. |
| too long | The client reports that the prompt is too long, with the error that it has for this. |

## Results

| client | version | {" | ".join(CASES)} |
|---|---|{"---|" * len(CASES)}"""
