"""Which store a target means: a directory, or a URL with a scheme. No torch."""

from __future__ import annotations

from typing import Any

from outlast.checkpoint._local import LocalStore
from outlast.checkpoint._objects import ObjectStore
from outlast.checkpoint.store import Store
from outlast.errors import ConfigError

__all__ = ["open_store"]


def open_store(target: str, **options: Any) -> Store:
    """A directory, or a URL (`file://`, `s3://`, `gs://`, `az://`, `memory://`). `options` go to the object store.

    Raises `ConfigError` for a scheme that is not known.
    """
    scheme, separator, rest = target.partition("://")
    if not separator:
        return LocalStore(target)
    if scheme == "file":
        return LocalStore(rest)
    if scheme in {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "memory", "http", "https"}:
        return ObjectStore(target, **options)
    raise ConfigError(
        f"checkpoints cannot be kept at {target!r}: the scheme {scheme!r} is not known",
        remedy="give a directory, or a URL that starts with file://, s3://, gs:// or az://",
    )
