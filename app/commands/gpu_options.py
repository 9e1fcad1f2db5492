"""The flags by which a command is told of a GPU; the same wherever an engine is started."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

GPU_OPTIONS = ("device", "gpu_memory", "deterministic")


def gpu_options(command: Command) -> Command:
    for option in (
        click.option("--deterministic", is_flag=True, default=None, help="The same reply alone and among others."),
        click.option("--gpu-memory", metavar="SIZE", help="What to take of a GPU's memory, at most: 20GB, or 80%."),
        click.option("--device", help="Where to compute: auto, cpu, cuda, or cuda:1 for the second GPU."),
    ):
        command = option(command)
    return command
