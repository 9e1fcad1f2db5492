"""Requests of LM Studio's API about a model: every field that is read, with its type and its bounds."""

from typing import Annotated

from msgspec import Meta, Struct

from app.server.field_types import ModelName, PositiveCount

Name = Annotated[ModelName, Meta(min_length=1)]


class LoadRequest(Struct, kw_only=True):
    """POST /api/v1/models/load."""

    model: Name
    context_length: PositiveCount | None = None
    echo_load_config: bool | None = None


class UnloadRequest(Struct):
    """POST /api/v1/models/unload."""

    instance_id: Name


class DownloadRequest(Struct):
    """POST /api/v1/models/download."""

    model: Name
