"""Compares every screen with its snapshot. See snapshots.py."""

import asyncio
from pathlib import Path

import pytest

from tests.tui.snapshots import FOLDER, LOOKS, STEPS, pictures

TAKES = 3  # the end of a scroll bar sometimes differs by a fraction of a cell; a real fault occurs in every take


@pytest.mark.share(2)
@pytest.mark.parametrize("name", STEPS)
def test_screen_matches_its_snapshot(name: str, tmp_path: Path) -> None:
    changed = {tmp_path / f"{name}-{look}.svg" for look in LOOKS}
    for _ in range(TAKES):
        for look, svg in asyncio.run(pictures(STEPS[name], list(LOOKS))).items():
            seen = tmp_path / f"{name}-{look}.svg"
            seen.write_text(svg, encoding="utf-8")
            if seen.read_bytes() == (FOLDER / seen.name).read_bytes():
                changed.discard(seen)
        if not changed:
            return
    assert not changed, f"look at these; if they are right: python -m tests.tui.snapshots {name}"
