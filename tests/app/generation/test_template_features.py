"""Features of chat templates are detected by rendering."""

from pathlib import Path

import pytest

from app.errors import TemplateUnavailable
from app.generation.template import ChatTemplateRenderer
from app.generation.template_features import TemplateFeatures, probe_template

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}now{% endif %}"


@pytest.mark.parametrize(
    ("template", "features"),
    [
        (MESSAGES, TemplateFeatures(system=True, tools=False, thinking=False)),
        (NO_SYSTEM + MESSAGES, TemplateFeatures(system=False, tools=False, thinking=False)),
        (MESSAGES + TOOLS, TemplateFeatures(system=True, tools=True, thinking=False)),
        ("{{ tools[0].function.name }}" + MESSAGES, TemplateFeatures(system=True, tools=True, thinking=False)),
        (MESSAGES + SWITCH, TemplateFeatures(system=True, tools=False, thinking=True)),
        (MESSAGES + "<think>", TemplateFeatures(system=True, tools=False, thinking=True)),
        (
            "{# system and tools are words #}{{ bos_token }}",
            TemplateFeatures(system=False, tools=False, thinking=False),
        ),
        ("{% broken", TemplateFeatures(system=False, tools=False, thinking=False)),
    ],
)
def test_template_features_are_detected(
    renderer: ChatTemplateRenderer, template: str, features: TemplateFeatures
) -> None:
    assert probe_template(template, "<s>", renderer) == features


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("Qwen-Qwen3-0.6B", TemplateFeatures(system=True, tools=True, thinking=True)),
        ("google-gemma-2-2b-it", TemplateFeatures(system=False, tools=False, thinking=False)),
        ("microsoft-Phi-3.5-mini-instruct", TemplateFeatures(system=True, tools=False, thinking=False)),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", TemplateFeatures(system=True, tools=True, thinking=False)),
        ("openai-gpt-oss-120b", TemplateFeatures(system=True, tools=True, thinking=True)),
    ],
)
def test_features_of_real_templates_are_detected(
    llama_cpp_models: Path, renderer: ChatTemplateRenderer, name: str, features: TemplateFeatures
) -> None:
    template = (llama_cpp_models / "templates" / f"{name}.jinja").read_text()
    assert probe_template(template, "<s>", renderer) == features


def test_endless_template_raises_template_unavailable() -> None:
    with ChatTemplateRenderer(seconds=0.3) as renderer, pytest.raises(TemplateUnavailable):
        probe_template("{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "", renderer)
