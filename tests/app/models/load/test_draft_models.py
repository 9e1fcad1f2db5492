"""`draft`: which model drafts for another one, its vocabulary, and that it is used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.models.fit import memory_plan
from app.models.load import loaded_model
from app.models.load.draft_models import find_draft_model, known_draft_model
from app.models.load.loaded_model import ChatModel, load_model
from app.models.load.model_loader import ModelLoader
from app.models.load.planned_memory import LoadPlan
from app.models.store import ModelStore
from app.models.stored_model import LOCAL_FILE, StoredModel, stored_model
from app.progress import SilentProgress
from app.settings.settings import Settings
from app.text.tokenizer import Tokenizer
from engine.checkpoints.checkpoint import Checkpoint
from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import DRAFT_CONTEXT, ModelEngine, load_engine
from tests.app.models.tiny_model import settings_in
from tests.support.random_gguf import SIZES, write


class Saying(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def settings_of(folder: Path, draft: object, **more: object) -> Settings:
    return settings_in(folder, kernels="reference", context=64, kv_disk_gb="0", draft=str(draft), **more)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("qwen3:8b", "qwen3:0.6b"),
        ("bartowski/Qwen_Qwen3-8B-GGUF:Q8_0", "qwen3:0.6b"),
        ("smollm2:360m", "smollm2:135m"),
        ("qwen3:0.6b", None),
        ("smollm2:135m", None),
        ("org/unknown-GGUF:Q4_K_M", None),
        ("/models/mine.gguf", None),
    ],
)
def test_known_draft_model(name: str, draft: str | None) -> None:
    assert known_draft_model(name) == draft


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return made(tmp_path / "target.gguf")


def made(path: Path, vocabulary: int = 512, seed: int = 0) -> Path:
    write(path, "Q8_0", replace(SIZES["tiny"], vocabulary=vocabulary), seed)
    return path


def stored(path: Path) -> StoredModel:
    return stored_model(str(path), path, LOCAL_FILE)


def drafts_with_a_model(model: ChatModel) -> bool:
    drafter = model.engine._scheduler._verification.drafter
    return drafter is not None and drafter._model is not None


def test_model_with_the_same_vocabulary_drafts(tmp_path: Path, target: Path) -> None:
    plain = load_model(stored(target), settings_of(tmp_path, "none"), SilentProgress())
    assert not drafts_with_a_model(plain)
    other = made(tmp_path / "other.gguf", seed=1)
    model = load_model(stored(target), settings_of(tmp_path, other), SilentProgress())
    assert drafts_with_a_model(model)


def test_model_with_another_vocabulary_is_refused_before_loading(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = made(tmp_path / "other.gguf", vocabulary=400)
    monkeypatch.setattr("app.models.load.loaded_model.load_engine", None)
    with pytest.raises(UnsupportedModel, match=r"other.gguf cannot draft for target.gguf: token 397 ") as refused:
        load_model(stored(target), settings_of(tmp_path, other), SilentProgress())
    assert "--draft" in refused.value.remedy


def test_drafts_off_loads_no_draft_model(tmp_path: Path, tokenizer: Tokenizer, target: Path) -> None:
    settings = settings_of(tmp_path, target, drafts="off")
    assert find_draft_model(stored(target), tokenizer, settings, SilentProgress()) is None


def test_auto_without_a_known_model_says_so(tmp_path: Path, tokenizer: Tokenizer, target: Path) -> None:
    progress = Saying()
    assert find_draft_model(stored(target), tokenizer, settings_of(tmp_path, "auto"), progress) is None
    assert progress.said == ["No small model is known that could draft for target.gguf."]


def planned(target: Path, settings: Settings) -> LoadPlan:
    given = {"target": stored(target)}
    return ModelLoader(settings, ModelStore(settings), given, {}, SilentProgress())._plan("target")


def test_memory_of_the_draft_model_is_planned(tmp_path: Path, target: Path) -> None:
    other = made(tmp_path / "other.gguf", seed=1)
    settings = replace(settings_of(tmp_path, other), context=0)
    alone = planned(target, replace(settings, draft="none"))
    both = planned(target, settings)
    own = memory_plan(stored(other), replace(settings, context=DRAFT_CONTEXT))
    assert alone.plan.draft == alone.useful.draft == 0
    assert both.plan.draft == both.useful.draft == own.least > own.weights
    assert both.plan.least == alone.plan.least + own.least
    assert both.plan.most == alone.plan.most + own.least


def test_draft_model_that_is_not_stored_yet_takes_no_planned_memory(tmp_path: Path, target: Path) -> None:
    assert planned(target, settings_of(tmp_path, "qwen3:0.6b")).plan.draft == 0


def test_load_leaves_memory_for_the_draft_model(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[LoadOptions] = []

    def load(checkpoint: Checkpoint, given: LoadOptions, *rest: Any, **more: Any) -> ModelEngine:
        options.append(given)
        return load_engine(checkpoint, given, *rest, **more)

    monkeypatch.setattr(loaded_model, "load_engine", load)
    settings = settings_of(tmp_path, made(tmp_path / "other.gguf", seed=1))
    plan = planned(target, settings).plan
    model = load_model(stored(target), settings, SilentProgress(), plan.allotted(LoadOptions(), plan.most))
    assert options[0].draft_memory == plan.draft
    assert model.needs.total == plan.weights + plan.steps + plan.draft
    assert drafts_with_a_model(model)
