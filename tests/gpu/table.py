"""Print figures as a table."""

from collections.abc import Iterable, Mapping

from tests.gpu.figures import Figure

MARKS = {None: "", True: "met", False: "MISSED"}


def table(figures: Mapping[str, Iterable[Figure]], faults: Mapping[str, str]) -> str:
    """Return the table, part by part. A part that failed has a line with its error."""
    lines = []
    for part, found in figures.items():
        lines += [f"-- {part}", *map(_line, found)]
        lines += [f"   FAILED: {faults[part]}"] if part in faults else []
    marks = [figure.met for found in figures.values() for figure in found]
    return "\n".join(
        [*lines, f"{marks.count(True)} targets met, {marks.count(False)} missed, {len(faults)} parts failed"]
    )


def _line(figure: Figure) -> str:
    share = "" if figure.fraction is None else f"{figure.fraction:8.3f} of {figure.of}"
    return f"   {figure.name:<58} {figure.value:10.4g} {figure.unit:<8} {share:<24} {_aim(figure)}".rstrip()


def _aim(figure: Figure) -> str:
    aims = [f"at least {figure.least:g}"] if figure.least is not None else []
    aims += [f"at most {figure.most:g}"] if figure.most is not None else []
    return f"{MARKS[figure.met]} ({', '.join(aims)})" if aims else ""
