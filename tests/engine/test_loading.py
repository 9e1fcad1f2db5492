from pathlib import Path

import pytest

from engine import loading, models
from engine.checkpoint_config import Metadata
from engine.errors import UnsupportedModel
from engine.loading import LoadOptions, float32_bytes, load_engine
from engine.request import SamplingParams
from quant.gguf import GGUFFile
from tests.engine.tiny_llama import make
from tests.gguf_bytes import small_file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny")).path


def answer(path: Path, options: LoadOptions) -> list[int]:
    with GGUFFile(path) as file:
        engine = load_engine(file, options)
    request = engine.request(tuple(range(30)), SamplingParams(temperature=0, max_tokens=8), frozenset())
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_ids


def test_little_memory_changes_the_speed_and_not_the_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = answer(tiny, LoadOptions())
    monkeypatch.setattr(loading, "available_memory", lambda: 0)
    assert answer(tiny, LoadOptions()) == plenty


def test_progress_counts_every_byte_of_the_tensors(tiny: Path) -> None:
    reports: list[tuple[int, int]] = []
    with GGUFFile(tiny) as file:
        load_engine(file, LoadOptions(), lambda done, total: reports.append((done, total)))
        total = sum(tensor.nbytes for tensor in file.tensors.values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.parametrize(("asked", "given"), [(0, 512), (100, 100), (10_000, 512)])
def test_the_context_is_what_is_asked_for_up_to_the_models_own(tiny: Path, asked: int, given: int) -> None:
    with GGUFFile(tiny) as file:
        assert load_engine(file, LoadOptions(context_length=asked)).config.context_length == given


def test_the_estimate_covers_the_matrices(tiny: Path) -> None:
    with GGUFFile(tiny) as file:
        config = models.read_config(Metadata(file.metadata, "llama"))
        assert 0.9 < float32_bytes(config) / sum(tensor.nbytes for tensor in file.tensors.values()) < 1.1


def test_an_unknown_backend_is_refused(tiny: Path) -> None:
    with GGUFFile(tiny) as file, pytest.raises(UnsupportedModel, match="'abacus'"):
        load_engine(file, LoadOptions(backend="abacus"))


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().data)
    with GGUFFile(path) as file, pytest.raises(UnsupportedModel, match=r"llama\."):
        load_engine(file, LoadOptions())
