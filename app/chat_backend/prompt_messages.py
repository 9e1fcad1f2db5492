"""Builds the body of a request: the messages of a branch, and the sampling parameters."""

from collections.abc import Mapping, Sequence

from app.generation.options import VARIED_TEMPERATURE
from app.history.records import Chat, Role, SamplingChoice, StoredMessage, ToolStep

_DRAWN = {"temperature": VARIED_TEMPERATURE}
_IN_PLACE = "Summary of the conversation so far:\n"


def prompt_messages(chat: Chat, branch: Sequence[StoredMessage], *, with_reasoning: bool) -> list[Mapping[str, object]]:
    """Return the messages of a branch in OpenAI's format, oldest first.

    Messages that are left out are replaced with the branch's newest summary. Attachments come before the message's
    text.
    """
    summaries = chat.trim.by_message
    newest = next((summaries[message.id] for message in reversed(branch) if message.id in summaries), "")
    summary = f"{_IN_PLACE}{newest}" if newest else ""
    system = "\n\n".join(part for part in (chat.settings.system, summary) if part)
    messages: list[Mapping[str, object]] = [{"role": "system", "content": system}] if system else []
    left_out = set(chat.trim.left_out)
    for message in branch:
        if message.id in left_out:
            continue
        messages += step_messages(message.steps, message.id, with_reasoning=with_reasoning)
        if not (message.text or message.attachments):
            continue
        thought = {"reasoning_content": message.reasoning} if with_reasoning and message.reasoning else {}
        messages.append({"role": message.role.value, "content": prompt_text(message), **thought})
    return messages


def step_messages(steps: Sequence[ToolStep], message: int, *, with_reasoning: bool) -> list[Mapping[str, object]]:
    """Return the tool calls of a reply and their results. Calls of one turn share a message, as the model wrote them.

    The ids of the calls are derived from the id of the message, so that later requests send the same prompt.
    """
    turns: list[list[tuple[str, ToolStep]]] = []
    for index, step in enumerate(steps):
        named = (f"call_{message}_{index}", step)
        if step.joins_previous and turns:
            turns[-1].append(named)
        else:
            turns.append([named])
    return [part for turn in turns for part in _turn_messages(turn, with_reasoning=with_reasoning)]


def _turn_messages(turn: Sequence[tuple[str, ToolStep]], *, with_reasoning: bool) -> list[Mapping[str, object]]:
    first = turn[0][1]
    reasoning = {"reasoning_content": first.reasoning} if with_reasoning and first.reasoning else {}
    calls = [
        {"id": name, "type": "function", "function": {"name": step.name, "arguments": step.arguments}}
        for name, step in turn
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": step.result} for name, step in turn]
    return [{"role": "assistant", "content": first.text, **reasoning, "tool_calls": calls}, *results]


def prompt_text(message: StoredMessage) -> str:
    """Return a message's text with its attachments."""
    files = [f"File {file.name}:\n```\n{file.text}\n```" for file in message.attachments]
    return "\n\n".join([*files, message.text]) if message.role is Role.USER else message.text


def retry_temperature(chosen: SamplingChoice, default_sampling: Mapping[str, float | int]) -> float | None:
    """Return the temperature of a retry that would otherwise repeat the reply; None if the settings apply."""
    return _DRAWN["temperature"] if chosen.temperature is None and _is_greedy(default_sampling) else None


def _is_greedy(default_sampling: Mapping[str, float | int]) -> bool:
    return default_sampling.get("temperature") == 0


def sampling_fields(
    chosen: SamplingChoice, default_sampling: Mapping[str, float | int], *, retry: bool = False
) -> dict[str, object]:
    """Return the sampling fields of a request: the chat's settings, or the model's defaults if unset.

    With `retry`, greedy decoding is replaced with sampling, because it would repeat the previous reply.
    """
    names = [name for name in SamplingChoice.__struct_fields__ if name != "thinking"]
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    thinking = {} if chosen.thinking is None else {"chat_template_kwargs": {"enable_thinking": chosen.thinking}}
    drawn = _DRAWN if retry and _is_greedy(default_sampling) else {}
    return {**default_sampling, **drawn, **given, **thinking}
