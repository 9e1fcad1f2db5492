"""Converts records of the history to the types that the screens use, and back.

A chat id is the chat's number in the history. The prefix PRIVATE marks chats of the history in memory.
"""

from collections.abc import Collection, Container, Mapping, Sequence

from app.history import records
from app.history.notices import HistoryNotice
from tui import types
from tui.plain_text import single_line

PRIVATE = "private-"

_FINISH = {
    records.State.COMING: types.Finish.CUT_OFF,
    records.State.WHOLE: types.Finish.COMPLETE,
    records.State.CUT: types.Finish.LENGTH,
    records.State.STOPPED: types.Finish.STOPPED,
    records.State.EDITED: types.Finish.EDITED,
    records.State.FAILED: types.Finish.FAILED,
}
_WORDS = 8  # a chat without a title is shown with the first words of its first message: at most 8
_TITLE = 60  # maximum length of these words in characters


def chat_id(chat: int, *, private: bool) -> types.ChatId:
    return types.ChatId(f"{PRIVATE}{chat}" if private else str(chat))


def message_id(message: int) -> types.MessageId:
    return types.MessageId(str(message))


def summary_of(chat: records.Chat, *, private: bool, replying_elsewhere: bool = False) -> types.ChatSummary:
    return types.ChatSummary(
        id=chat_id(chat.id, private=private),
        title=title_of(chat),
        updated=chat.changed,
        message_count=chat.num_messages,
        pinned=chat.is_pinned,
        archived=chat.is_archived,
        private=private,
        replying_elsewhere=replying_elsewhere,
    )


def title_of(chat: records.Chat) -> str:
    """Return the title of a chat; if it has none, the first words of its first message."""
    return single_line(chat.title) or first_words(chat.beginning)


def first_words(text: str) -> str:
    words = single_line(text).split()
    title = " ".join(words[:_WORDS])[:_TITLE]
    is_cut = len(words) > _WORDS or len(title) == _TITLE
    return title.rstrip(",;") + ("…" if is_cut else "")


def chat_of(
    chat: records.Chat,
    messages: Sequence[records.StoredMessage],
    draft: str,
    *,
    private: bool,
    in_progress: Collection[int],
    elsewhere: Container[int] = (),
) -> types.Chat:
    """Convert a chat and its messages.

    `in_progress`: numbers of the replies that this program is generating, and of the questions that wait for one.
    `elsewhere`: those of other windows.
    """
    known = {message.id for message in messages}
    answered = {message.parent for message in messages}.union(in_progress)
    return types.Chat(
        summary=summary_of(chat, private=private),
        settings=settings_of(chat.settings),
        messages=tuple(message_of(message, known, in_progress, elsewhere, answered) for message in messages),
        leaf=message_id(chat.shown) if chat.shown in known and chat.shown is not None else None,
        draft=draft,
        left_out=frozenset(message_id(message) for message in chat.trim.left_out),
        summaries=tuple(types.Summary(message_id(last), text) for last, text in chat.trim.by_message.items()),
    )


def message_of(
    message: records.StoredMessage,
    known: Container[int] | None = None,
    in_progress: Container[int] = (),
    elsewhere: Container[int] = (),
    answered: Container[int | None] | None = None,
) -> types.Message:
    """Convert a message. A message whose parent is not in `known` becomes the first of a branch: its parent was lost.

    `in_progress` and `elsewhere`: see `chat_of`. `answered`: numbers of the messages that need no reply; None: all.
    """
    parent = message.parent if message.parent is not None and (known is None or message.parent in known) else None
    is_reply = message.role is records.Role.ASSISTANT
    if is_reply:
        is_over = message.id not in in_progress
        is_elsewhere = message.state is records.State.COMING and message.id in elsewhere
        finish = finish_of(message.state, message.usage)
    else:
        is_over = answered is not None and message.id not in answered
        is_elsewhere, finish = message.id in elsewhere, types.Finish.UNANSWERED
    return types.Message(
        id=message_id(message.id),
        parent=None if parent is None else message_id(parent),
        role=types.Role.ASSISTANT if is_reply else types.Role.USER,
        text=message.text,
        created=message.created,
        attachments=tuple(types.Attachment(file.name, file.text) for file in message.attachments),
        reasoning=message.reasoning,
        reasoning_seconds=message.reasoning_seconds,
        steps=tuple(step_of(step) for step in message.steps),
        model=message.model,
        finish=None if not is_over else types.Finish.ELSEWHERE if is_elsewhere else finish,
        usage=usage_of(message.usage),
        error=message.usage.error if message.usage else "",
    )


def finish_of(state: records.State, usage: records.StoredUsage | None) -> types.Finish:
    """Return why a reply ended. If it is not known whether the context was full, it was cut at max_tokens."""
    if state is records.State.CUT and usage is not None and usage.is_context_full:
        return types.Finish.CONTEXT_FULL
    return _FINISH[state]


def step_of(step: records.ToolStep) -> types.ToolStep:
    return types.ToolStep(step.name, step.arguments, step.result, step.is_error, step.text, step.reasoning)


def usage_of(usage: records.StoredUsage | None) -> types.Usage | None:
    """Convert the usage of a reply. Returns None if it is unknown, as for failed replies, which store only an error."""
    if usage is None or usage.error:
        return None
    return types.Usage(
        sources=usage.sources,
        reply_tokens=usage.reply_tokens,
        queue_seconds=usage.queue_seconds,
        prompt_seconds=usage.prompt_seconds,
        reply_seconds=usage.reply_seconds,
        miss=usage.miss,
        is_detailed=usage.is_detailed,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        retry_temperature=usage.retry_temperature,
    )


def notice_of(notice: HistoryNotice) -> types.Notice:
    return types.Notice(notice.message, notice.remedy, notice.is_saved)


def sampling_of(recommended: Mapping[str, float]) -> types.Sampling:
    """Return a model's recommended sampling without the values that the settings do not have."""
    top_k = recommended.get("top_k")
    return types.Sampling(
        temperature=recommended.get("temperature"),
        top_p=recommended.get("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=recommended.get("min_p"),
        repetition_penalty=recommended.get("repetition_penalty"),
    )


def settings_of(settings: records.ChatSettings) -> types.ChatSettings:
    chosen = settings.sampling
    sampling = types.Sampling(**{name: getattr(chosen, name) for name in records.SamplingChoice.__struct_fields__})
    full_context = types.FullContext(settings.when_full.value)
    return types.ChatSettings(settings.system, sampling, full_context, frozenset(settings.disabled_tools))


def stored_settings(settings: types.ChatSettings) -> records.ChatSettings:
    chosen = settings.sampling
    sampling = records.SamplingChoice(
        **{name: getattr(chosen, name) for name in records.SamplingChoice.__struct_fields__}
    )
    when_full = records.WhenFull(settings.full_context.value)
    return records.ChatSettings(settings.system, sampling, when_full, tuple(sorted(settings.disabled_tools)))
