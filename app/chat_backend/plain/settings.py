"""Commands of the plain chat about the settings of a chat."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from tui import sampling_fields
from tui.client import Client, ClientError
from tui.open_chat import find_preset, name_preset
from tui.sampling_fields import InvalidField
from tui.types import NO_PRESET, Chat, ChatSettings, FullContext

_FULL = {how.value.partition("_")[0]: how for how in FullContext}
_THINKING: dict[str, bool | None] = {"on": True, "off": False, "": None}


class PlainSettings:
    """Settings of the open chat. `say` writes a line."""

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
            self._say(f"{name}: {value or 'model default'}")

    async def set(self, rest: str) -> None:
        """Set one setting by name. Without a value, reset it to the model's default."""
        name, _, value = rest.partition(" ")
        chat = await self._current()
        if name == "system":
            settings = replace(chat.settings, system=value.strip())
        else:
            settings = _changed(chat.settings, name, value.strip())
        await self._chats.configure(chat.summary.id, settings)
        self._say(f"{name}: {value.strip() or 'reset'}")

    async def preset(self, name: str) -> None:
        """Apply a preset. Without a name, list the presets."""
        presets, chat = await self._chats.presets(), await self._current()
        names = ", ".join([*(one.name for one in presets), NO_PRESET])
        if not name:
            self._say(f"preset: {name_preset(presets, chat.settings) or NO_PRESET}. Available: {names}.")
        elif (settings := find_preset(presets, name)) is None:
            raise ClientError(f"there is no preset {name}", f"Available: {names}.")
        else:
            await self._chats.configure(chat.summary.id, settings)
            self._say(f"Preset {name} applied.")


def _texts(settings: ChatSettings) -> dict[str, str]:
    """Return the values of the settings as text, by the names that the user types."""
    thinking = next(text for text, value in _THINKING.items() if value is settings.sampling.thinking)
    full = next(text for text, how in _FULL.items() if how is settings.full_context)
    return {**sampling_fields.texts(settings.sampling), "thinking": thinking, "full": full}


def _changed(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    """Return settings with one value changed. Raises ClientError for an unknown name or an invalid value."""
    typed = _texts(settings)
    if name not in typed:
        raise ClientError(f"there is no setting {name}".rstrip(), f"Available: {', '.join(NAMES)}.")
    typed[name] = value
    if typed["thinking"] not in _THINKING:
        raise ClientError(f"thinking cannot be {value}", "Use on or off.")
    if name == "full" and value and value not in _FULL:
        raise ClientError(f"full cannot be {value}", f"Use one of: {', '.join(_FULL)}.")
    try:
        sampling = sampling_fields.parse(typed, thinking=_THINKING[typed["thinking"]])
    except InvalidField as problem:
        raise ClientError(str(problem)) from problem
    return replace(settings, sampling=sampling, full_context=_FULL.get(typed["full"], FullContext.ASK))


NAMES = ("system", *_texts(ChatSettings()))
