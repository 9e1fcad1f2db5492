"""Options of commands whose values are read from texts by functions of others."""

from collections.abc import Callable

import click


def read_by(read: Callable[[str], int]) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """A callback of an option whose value is read from a text."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else read(value)
        except ValueError as problem:
            raise click.BadParameter(str(problem)) from None

    return callback
