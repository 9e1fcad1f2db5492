"""The table of the models screen: names, sizes, and states, with columns that the width of the terminal allows."""

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from tui import figures
from tui.downloads import Downloads, describe_progress
from tui.engine_types import ModelInfo
from tui.plain_text import model_name, shortened, single_line
from tui.widgets.listing import Listing

_BESIDE = 38  # width in cells of the columns quant, size, and state, also during a download
# column -> minimum width in cells of a terminal that shows it, and the width of the column
_OPTIONAL = {"license": (76, 14), "speed": (100, 13)}
_LEAST = 20  # minimum width in cells of the name
_TITLES = {"name": "Model", "quantization": "Quant", "size": "Size", "state": "State"}


class ModelTable(Listing):
    """Shows models in the order in which they are given."""

    def __init__(self, downloads: Downloads, offline_reason: Callable[[], str], loading: Callable[[], str]) -> None:
        """Create an empty table.

        `offline_reason` returns why no model can be downloaded, or "". `loading` returns the name of the model that is
        being loaded, or "".
        """
        super().__init__()
        self._downloads = downloads
        self._offline_reason = offline_reason
        self._loading_model = loading
        self._models: dict[str, ModelInfo] = {}
        self.can_focus = False

    @property
    def model(self) -> ModelInfo | None:
        """The model of the highlighted row."""
        return None if self.chosen is None else self._models[self.chosen]

    def find(self, name: str) -> ModelInfo | None:
        """Return the listed model of this name."""
        return self._models.get(name)

    def show_models(self, models: Sequence[ModelInfo]) -> None:
        """Replace all models."""
        self._models = {model.name: model for model in models}
        self.draw()

    def replace(self, model: ModelInfo) -> None:
        """Replace the listed model of the same name."""
        self._models[model.name] = model
        self.draw()

    def draw(self) -> None:
        """Draw all rows for the current width of the terminal."""
        self.show_header, columns = bool(self._models), self._columns()
        if [key.value for key in self.columns] != columns:
            self._set_columns(columns)
        beside = _BESIDE + sum(_OPTIONAL[key][1] for key in columns if key in _OPTIONAL)
        rows = {name: self._texts(model, beside) for name, model in self._models.items()}
        self.show({name: [_cell(texts[key]) for key in columns] for name, texts in rows.items()})

    def update_states(self) -> None:
        """Draw the states that have changed, such as those of downloads."""
        for name, model in self._models.items():
            state = _cell(self._state(model))
            if self.get_cell(name, "state") != state:
                self.update_cell(name, "state", state, update_width=True)

    def _columns(self) -> list[str]:
        """Return the keys of the columns: those for which the terminal is wide enough, and that some model fills."""
        width, models = self.app.size.width, self._models.values()
        optional = [key for key, (least, _) in _OPTIONAL.items() if width >= least]
        filled = [key for key in ("quantization", "size", *optional) if any(getattr(model, key) for model in models)]
        return [key for key in (*_TITLES, *_OPTIONAL) if key in ("name", "state", *filled)]

    def _set_columns(self, columns: Sequence[str]) -> None:
        """Replace the columns. The rows remain, so that the cursor keeps its row."""
        for key in [*self.columns]:
            self.remove_column(key)
        for name in columns:
            self.add_column(_TITLES.get(name, name.title()), key=name)

    def _texts(self, model: ModelInfo, beside: int) -> Mapping[str, str]:
        """Return the text of each column. `beside`: width in cells of the columns beside the name."""
        return {
            "name": shortened(single_line(model_name(model.name)), max(_LEAST, self.app.size.width - beside)),
            "quantization": model.quantization,
            "size": figures.approximate_size(model.size, is_estimate=model.is_estimate),
            "state": self._state(model),
            "license": model.license,
            "speed": figures.expected_speed(model.speed),
        }

    def _state(self, model: ModelInfo) -> str:
        progress = self._downloads.progress.get(model.name)
        if progress is not None:
            return describe_progress(progress)
        if model.loaded:
            return "in use"
        if model.installed and model.name == self._loading_model():
            return "loading"
        if model.elsewhere:
            return "available"
        if model.installed:
            return "installed"
        if model.arrived:
            share = "" if model.is_estimate else figures.percent(model.arrived, model.size or 0)
            return f"paused at {share or figures.size(model.arrived)}"
        if self._offline_reason():
            return "offline"
        fit = "" if model.fits is None else "fits" if model.fits else "too large"
        return f"{fit}, recommended" if model.is_recommended else fit


def _cell(text: str) -> Text:
    return Text(single_line(text), no_wrap=True)
