"""The file of measured tiles: it keeps all tiles, and a damaged file is ignored."""

import logging
from pathlib import Path

import pytest

from engine.backends.cuda.tile_file import read_tiles, tile_file, write_tiles
from quant.kernels.tiles import ProductShape, ProductTile
from tests.kernels.cards import CARDS

CARD = CARDS[3]
TILES = {ProductShape("q4", 4096, 14336, 8): ProductTile(16, 8, 8, 2)}
MORE = {ProductShape("q6", 512, 256, 16): ProductTile(32, 4, 16, 1)}


def test_writing_tiles_keeps_those_of_other_models(tmp_path: Path) -> None:
    assert read_tiles(tmp_path, CARD) == {}
    assert read_tiles(None, CARD) == {}
    write_tiles(tmp_path, CARD, TILES)
    assert write_tiles(tmp_path, CARD, MORE) == tile_file(tmp_path, CARD)
    assert read_tiles(tmp_path, CARD) == TILES | MORE
    assert read_tiles(tmp_path, CARDS[4]) == {}
    assert len(list(tile_file(tmp_path, CARD).parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"warps": 8', '"warps": 7'),
        ('"warps": 8', '"warps": true'),
        ('"splits": 2', '"split": 2'),
        ('"outputs": 4096', '"outputs": -1'),
        ('"kind": "q4"', '"kind": 4'),
        ("[", "{"),
        ("]", ""),
        ("[", "[1, "),
    ],
)
def test_damaged_file_is_ignored_with_a_warning(
    before: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_tiles(tmp_path, CARD, TILES)
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, after))
    with caplog.at_level(logging.WARNING):
        assert read_tiles(tmp_path, CARD) == {}
    assert "ingle bench --tune" in caplog.text
