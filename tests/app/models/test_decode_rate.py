"""The decode rate of a machine: storage, and the expected speed of other models."""

from pathlib import Path

import pytest

from app.models.decode_rate import DecodeRate, expected_speed, is_fluent, likely_rate, remember_rate, remembered_rate


def test_expected_speed_is_rate_per_weight_byte() -> None:
    assert expected_speed(10e9, 2_500_000_000) == pytest.approx(4.0)
    assert expected_speed(0.0, 2_500_000_000) is None
    assert expected_speed(10e9, None) is None


@pytest.mark.parametrize(
    ("device", "measured", "weights", "fluent"),
    [
        ("cpu", 0.0, 3_000_000_000, True),
        ("cpu", 0.0, 3_100_000_000, False),
        ("cpu", 30e9, 5_900_000_000, True),
        ("cpu", 1e9, 210_000_000, False),
        ("cuda", 0.0, 70_000_000_000, True),
    ],
)
def test_speed_is_fluent_from_5_tokens_per_second(device: str, measured: float, weights: int, fluent: bool) -> None:
    assert is_fluent(expected_speed(likely_rate(device, measured), weights)) == fluent


def test_rate_is_remembered_until_another_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert remembered_rate(folder) is None
    remember_rate(folder, DecodeRate("cpu", 0.0))
    assert remembered_rate(folder) is None
    remember_rate(folder, DecodeRate("cpu", 8e9))
    remember_rate(folder, DecodeRate("cuda", 0.0))
    assert remembered_rate(folder) == DecodeRate("cpu", 8e9)


def test_damaged_file_is_no_rate(tmp_path: Path) -> None:
    remember_rate(tmp_path, DecodeRate("cpu", 8e9))
    [file] = tmp_path.iterdir()
    file.write_bytes(b"\xff{")
    assert remembered_rate(tmp_path) is None
