"""Loading of a model, as the chat screen shows it: in the status line and on the welcome page."""

from collections.abc import AsyncGenerator

from tui.client import ClientError, Engine
from tui.engine_types import Loading
from tui.plain_text import capitalized
from tui.show_errors import show_error
from tui.widgets.conversation import Conversation

_NONE = "No model. F2 to choose one."


async def follow(conversation: Conversation, loading: AsyncGenerator[Loading, None], endpoint: str) -> None:
    """Show the progress of loading a model. Use the model once it is loaded.

    `endpoint`: address of the endpoint that has the models; "" if they are on this machine.
    """
    status, welcome = conversation.composer.status, conversation.welcome
    model = conversation.model
    try:
        async for step in loading:
            model = step.model if step.loaded else ""
            status.loading_model = step
            welcome.show_loading(step)
    except ClientError as error:
        if not model:
            welcome.show_failure(error, has_models=not endpoint)
        if model or not (welcome.display or conversation.shows_why_no_reply):
            show_error(conversation, error)
    welcome.show_loaded(model)
    conversation.use_model(model)
    status.model = model or (f"No model. Your next message tries again: {endpoint}" if endpoint else _NONE)
    status.loading_model = None
    conversation.composer.measure()


async def watch_engine(conversation: Conversation, engine: Engine) -> None:
    """Show when the engine exits, for example because memory ran out, which model answers after a restart, and a
    warning about it.

    A restarted engine may be that of another window, which names the same model by its path.
    """
    status, warning = conversation.composer.status, ""
    async for loaded in engine.loaded_models():
        model = loaded.model
        status.is_stopped = not model
        if status.loading_model is None:
            conversation.welcome.show_loaded(model)
        if model:
            status.model = model
            conversation.use_model(model)
            if loaded.warning and loaded.warning != warning:
                conversation.app.notify(capitalized(loaded.warning), severity="warning", markup=False)
            warning = loaded.warning or warning
