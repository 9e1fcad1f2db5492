"""Template variables that have a value unless a request sets them. The names and meanings are llama.cpp's."""

from datetime import datetime

from app.chat.messages import Json


def default_variables(now: datetime) -> dict[str, Json]:
    """The variables by name; `now` is local time.

    Models think unless told otherwise: many templates close the thoughts where `enable_thinking` is not defined.
    `datetime` is the day alone, since a prompt with the time of day shares no prefix with any other prompt.
    """
    return {
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": "",  # Firefunction fails without it
    }
