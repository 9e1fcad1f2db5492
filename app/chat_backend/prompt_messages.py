"""What a model is told of a chat: the messages of a branch as requests have them, and how the reply is to be sampled.

Refuses to know servers and where chats are kept.
"""

from collections.abc import Mapping, Sequence

from app.generation.options import VARIED_TEMPERATURE
from app.history.records import Chat, Role, SamplingChoice, StoredMessage

_DRAWN = {"temperature": VARIED_TEMPERATURE}
_IN_PLACE = "What was said before, in short:\n"


def prompt_messages(chat: Chat, branch: Sequence[StoredMessage], *, with_reasoning: bool) -> list[Mapping[str, object]]:
    """A branch, its first message first, in OpenAI's form: without what is left out, with the branch's newest summary
    in its place and the texts of files in front of the messages that they came with."""
    summaries = chat.trim.by_message
    newest = next((summaries[message.id] for message in reversed(branch) if message.id in summaries), "")
    summary = f"{_IN_PLACE}{newest}" if newest else ""
    system = "\n\n".join(part for part in (chat.settings.system, summary) if part)
    messages: list[Mapping[str, object]] = [{"role": "system", "content": system}] if system else []
    left_out = set(chat.trim.left_out)
    for message in branch:
        if message.id in left_out or not (message.text or message.attachments):
            continue
        thought = {"reasoning_content": message.reasoning} if with_reasoning and message.reasoning else {}
        messages.append({"role": message.role.value, "content": prompt_text(message), **thought})
    return messages


def prompt_text(message: StoredMessage) -> str:
    """A message with the files that came with it."""
    files = [f"File {file.name}:\n```\n{file.text}\n```" for file in message.attachments]
    return "\n\n".join([*files, message.text]) if message.role is Role.USER else message.text


def sampling_fields(
    chosen: SamplingChoice, default_sampling: Mapping[str, float | int], *, retry: bool = False
) -> dict[str, object]:
    """The fields of a request: what was chosen, else what suits the model, where somebody knows that. `again`: for
    another reply to the same message, which would be the same one if it were not drawn at random."""
    names = [name for name in SamplingChoice.__struct_fields__ if name != "thinking"]
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    thinking = {} if chosen.thinking is None else {"chat_template_kwargs": {"enable_thinking": chosen.thinking}}
    drawn = _DRAWN if retry and default_sampling.get("temperature") == 0 else {}
    return {**default_sampling, **drawn, **given, **thinking}
