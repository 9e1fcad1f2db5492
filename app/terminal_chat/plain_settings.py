"""The settings of a chat as lines: what they are, and one set by its name."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from tui import sampling_fields
from tui.client import Client, ClientError
from tui.nouns import Chat, ChatSettings, FullContext
from tui.sampling_fields import InvalidField

_FULL = {how.value.partition("_")[0]: how for how in FullContext}
_THINKING: dict[str, bool | None] = {"on": True, "off": False, "": None}


class PlainSettings:
    """Of the chat that is open; `say` writes a line."""

    def __init__(self, client: Client, say: Callable[[str], None], current: Callable[[], Awaitable[Chat]]) -> None:
        self._chats = client.chats
        self._say = say
        self._current = current

    async def system(self, text: str) -> None:
        chat = await self._current()
        if text:
            await self._chats.configure(chat.summary.id, replace(chat.settings, system=text))
            self._say("The system prompt is set.")
        else:
            self._say(f"The system prompt: {chat.settings.system or 'none'}")

    async def show(self, rest: str) -> None:
        settings = (await self._current()).settings
        self._say(f"system: {settings.system or 'none'}")
        for name, value in _texts(settings).items():
            self._say(f"{name}: {value or 'what suits the model'}")

    async def set(self, rest: str) -> None:
        """One by its name; without a value, what suits the model."""
        name, _, value = rest.partition(" ")
        chat = await self._current()
        if name == "system":
            settings = replace(chat.settings, system=value.strip())
        else:
            settings = _changed(chat.settings, name, value.strip())
        await self._chats.configure(chat.summary.id, settings)
        self._say(f"{name}: {value.strip() or 'as at first'}")

    async def preset(self, name: str) -> None:
        presets = {preset.name: preset for preset in await self._chats.presets()}
        if name not in presets:
            raise ClientError(f"there is no preset {name}".rstrip(), f"There is: {', '.join(presets) or 'none'}.")
        await self._chats.configure((await self._current()).summary.id, presets[name].settings)
        self._say(f"The chat has the preset {name}.")


def _texts(settings: ChatSettings) -> dict[str, str]:
    """By the names that a person types."""
    thinking = next(text for text, value in _THINKING.items() if value is settings.sampling.thinking)
    full = next(text for text, how in _FULL.items() if how is settings.full_context)
    return {**sampling_fields.texts(settings.sampling), "thinking": thinking, "full": full}


def _changed(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    """Raises ClientError for a name or a value that makes no sense."""
    typed = _texts(settings)
    if name not in typed:
        raise ClientError(f"there is no setting {name}".rstrip(), f"There is: system, {', '.join(typed)}.")
    typed[name] = value
    if typed["thinking"] not in _THINKING:
        raise ClientError(f"thinking cannot be {value}", "It is on or off.")
    if name == "full" and value and value not in _FULL:
        raise ClientError(f"a full context cannot {value}", f"It can: {', '.join(_FULL)}.")
    try:
        sampling = sampling_fields.parse(typed, thinking=_THINKING[typed["thinking"]])
    except InvalidField as problem:
        raise ClientError(str(problem)) from problem
    return replace(settings, sampling=sampling, full_context=_FULL.get(typed["full"], FullContext.ASK))
