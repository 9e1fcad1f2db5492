"""The model that suits this machine best, of the few that are recommended for chats (families.toml), the best first.

Whether one fits, `app.models.fit` says, by the headers that the Hub sends. Importing it loads torch.
"""

from dataclasses import replace

from app.config import Settings
from app.errors import ModelNotFound
from app.models.fit import ModelFit, fit_model
from app.models.machine_memory import is_likely_to_fit, machine_memory
from app.models.store import ModelStore
from app.progress import Progress, SilentProgress

# Of weights, which a CPU reads once for each token: with 30 GB/s or more, as desktops have, words come as fast as
# people read them.
_FLUENT_BYTES = 3_000_000_000


def recommended_fit(settings: Settings, progress: Progress | None = None) -> ModelFit:
    """The first of the recommended models that fits; where a CPU computes, the first that is fast enough, too.

    Raises ModelNotFound where none does, Offline, or AppError where the Hub refuses.
    """
    memory = machine_memory(settings)
    for known in ModelStore(settings).families.recommended:
        if is_likely_to_fit(known.usual_size, memory):  # so that no header is fetched in vain
            found = fit_model(known.name, settings, progress or SilentProgress())
            if found.is_possible and (found.fit.device == "cuda" or found.size <= _FLUENT_BYTES):
                return replace(found, name=known.name)
    raise ModelNotFound("no recommended model fits this machine", "All that are known: ingle ls --catalog.")
