"""Details of a stored model, collected from its headers, the catalog, and its chat template, without loading it."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

from app.generation.template import ChatTemplateRenderer
from app.generation.template_features import TemplateFeatures, probe_template
from app.models.catalog import Catalog, Sampling
from app.models.hub_models import HubModels
from app.models.model_header import read_header
from app.models.repository import RepositoryName
from app.models.sampling_defaults import catalogued_sampling
from app.models.stored_model import StoredModel
from app.models.tensor_classes import UNUSED, TensorClass, classes_of

Kind: TypeAlias = Literal["chat", "embedding"]


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """Details of a model. None: unknown. For `template`, None: the model has no template."""

    name: str
    path: Path
    source: str
    size: int  # size of the model's file, if it was read and there is only one
    sha256: str | None  # digest of the model's file, if it was read and there is only one
    stored_at: str | None
    architecture: str | None
    parameters: int
    quantization: str | None
    context_length: int | None
    vocab_size: int | None
    template: TemplateFeatures | None
    fills_in_the_middle: bool
    sampling: Sampling | None
    license: str | None
    tensors: list[TensorClass]
    chat_template: str = ""
    active_parameters: int = 0  # number of weights that compute one token; less than all in a mixture of experts
    problem: str = ""  # why this version of ingle cannot run the model; empty: no reason is known

    @property
    def format(self) -> Literal["gguf", "safetensors"]:
        return "safetensors" if self.path.is_dir() else "gguf"

    @classmethod
    def unknown(cls, name: str) -> Self:
        """Return the details of a model about which nothing is known."""
        return cls(
            name=name,
            path=Path(name),
            source="",
            size=0,
            sha256=None,
            stored_at=None,
            architecture=None,
            parameters=0,
            quantization=None,
            context_length=None,
            vocab_size=None,
            template=None,
            fills_in_the_middle=False,
            sampling=None,
            license=None,
            tensors=[],
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model from its files."""

    details: ModelDetails
    kind: Kind = "chat"
    context_length: int = 0  # length of the context that would fit into memory, in tokens


def details_of(
    stored: StoredModel, catalog: Catalog, models: HubModels, renderer: ChatTemplateRenderer | None = None
) -> ModelDetails:
    """Read the headers of a model, and probe its chat template with `renderer`, or with a new one.

    Raises ModelFileError or TemplateUnavailable.
    """
    header = read_header(stored)
    classes = classes_of(header.tensors, header.packed_bits, header.support.ignored)
    parameters = _sum_parameters(classes)
    return ModelDetails(
        name=stored.name,
        path=stored.path,
        source=stored.source,
        size=stored.size,
        sha256=stored.sha256,
        stored_at=stored.stored_at,
        architecture=header.architecture,
        parameters=parameters,
        quantization=header.quantization or stored.quantization or _most_common_type(classes),
        context_length=header.context_length,
        vocab_size=header.vocab_size,
        template=_features(header.chat_template, header.bos_token, renderer),
        fills_in_the_middle=header.fills_in_the_middle,
        sampling=catalogued_sampling(stored.name, stored.path, catalog) or header.sampling,
        license=known_license(stored, catalog, models) or header.license,
        tensors=classes,
        chat_template=header.chat_template or "",
        active_parameters=parameters - header.support.idle_parameters,
        problem=header.support.problem,
    )


def _sum_parameters(classes: Iterable[TensorClass]) -> int:
    return sum(part.parameters for part in classes if part.name != UNUSED)


def _features(template: str | None, bos_token: str, renderer: ChatTemplateRenderer | None) -> TemplateFeatures | None:
    if template is None:
        return None
    with ChatTemplateRenderer() if renderer is None else nullcontext(renderer) as one:
        return probe_template(template, bos_token, one)


def known_license(stored: StoredModel, catalog: Catalog, models: HubModels) -> str | None:
    """Return the license according to the catalog or the record of the download; None if neither has it."""
    if entry := catalog.find(stored.name):
        return entry.license
    name = RepositoryName.parse(stored.name)
    pulled = models.pulled(name) if name else None
    return (pulled.license or None) if pulled else None


def _most_common_type(classes: list[TensorClass]) -> str | None:
    """Return the type that the largest number of bytes has."""
    types = [(size, name) for part in classes for name, size in part.types.items()]
    return max(types)[1] if types else None
