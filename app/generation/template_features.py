"""Features of a chat template, found by rendering small conversations with it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import TemplateError, TemplateUnavailable
from app.generation.conversation import Json, Message
from app.generation.template import ChatTemplateRenderer

_SYSTEM_TEXT, _TOOL_NAME = "zxqsaid", "zxqnamed"  # texts that occur in no template
_THINKS = re.compile(r"think>|\[THINK\]|reasoning_effort")
_USER = Message("user", "Hello")
_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "Probes", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The features of a chat template."""

    system: bool  # whether it renders system messages
    tools: bool  # whether it renders tools
    thinking: bool  # whether it can switch thinking on or off, or contains reasoning markup


def probe_template(template: str, bos_token: str, renderer: ChatTemplateRenderer) -> TemplateFeatures:
    """Find the features of a template. Raises TemplateUnavailable if no template can be rendered."""

    def rendered(*messages: Message, tools: bool = False, **variables: Json) -> str:
        """Return the rendered text, or an empty string if the template fails."""
        try:
            known = {"bos_token": bos_token, "eos_token": "", **variables}
            return renderer.render(template, messages, tools=[_TOOL] if tools else None, variables=known)
        except TemplateUnavailable:
            raise
        except TemplateError:
            return ""

    messages = Message("system", _SYSTEM_TEXT), _USER
    switched = rendered(_USER, enable_thinking=True) != rendered(_USER, enable_thinking=False)
    return TemplateFeatures(
        # Some templates render a system message only together with tools.
        system=_SYSTEM_TEXT in rendered(*messages) + rendered(*messages, tools=True),
        tools=_TOOL_NAME in rendered(_USER, tools=True),
        thinking=switched or _THINKS.search(template) is not None,
    )
