"""What a person likes, kept in config.toml beside what he sets by hand: one place for both."""

from app.terminal_chat.told import apart


class ChatPreferences:
    """Implements `tui.client.Preferences`."""

    async def keep_theme(self, name: str) -> None:
        from app.config_file import write_setting

        await apart(write_setting, "theme", name)
