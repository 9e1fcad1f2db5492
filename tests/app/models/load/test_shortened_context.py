"""The note that a model's context is shorter than the model supports."""

from app.models.load.loaded_model import shortened_context
from engine.config import EngineConfig


def test_note_names_options_if_more_memory_may_be_used() -> None:
    config = EngineConfig("cuda", 65_536, 4097, model_context_length=131_072, longest_context=120_000)
    note = shortened_context(config)
    assert "65,536 tokens" in note
    assert "--context, up to 120,000" in note
    assert "--gpu-memory" in note


def test_note_says_that_the_context_does_not_fit_if_no_option_helps() -> None:
    config = EngineConfig("cpu", 20_000, 1251, model_context_length=131_072, longest_context=20_000)
    assert shortened_context(config) == (
        "The context is limited to 20,000 tokens, because the 131,072 tokens of the model do not fit in memory."
    )
