"""Whether this Python and this torch can train at all, asked before torch is loaded. Knows versions, nothing else."""

from __future__ import annotations

import os
import re
import sys

from outlast.errors import EnvironmentFault

__all__ = ["check_versions", "installed"]

PYTHON, TORCH = (3, 11), (2, 9)
NEEDED = ("torch", "numpy", "xxhash")


def installed() -> dict[str, str | None]:
    """The versions of what training needs; None for what is not installed."""
    folders = _metadata_folders()
    return {name: folders[name][0] if len(folders[name]) == 1 else _asked_of_python(name) for name in NEEDED}


def _metadata_folders() -> dict[str, list[str]]:
    """The versions in the names of the folders that installers leave on the path (`torch-2.13.0.dist-info`)."""
    found: dict[str, list[str]] = {name: [] for name in NEEDED}
    for place in dict.fromkeys(sys.path):
        try:
            folders = [name for name in os.listdir(place or ".") if name.endswith(".dist-info")]
        except OSError:
            continue  # a zip file, or nothing
        for folder in folders:
            name, _, version = folder.removesuffix(".dist-info").partition("-")
            if name in found:
                found[name].append(version)
    return found


def _asked_of_python(name: str) -> str | None:
    """What is installed in any other way. Not asked first, as `importlib.metadata` parses all that a package says of
    itself as a mail: that took a third of the time of `doctor --quick`."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(python: tuple[int, ...] = sys.version_info[:2], found: dict[str, str | None] | None = None) -> None:
    """EnvironmentFault, naming what is missing or too old."""
    found = installed() if found is None else found
    if python[:2] < PYTHON:
        raise EnvironmentFault(
            f"outlast needs Python {_dotted(PYTHON)} or newer, this is {_dotted(python)} ({sys.executable})",
            remedy="make the environment with a newer Python",
        )
    missing = [name for name, version in found.items() if version is None]
    if missing:
        raise EnvironmentFault(
            f"training needs {', '.join(missing)}, not installed for {sys.executable}",
            remedy="pip install 'outlast[train]'",
        )
    numbers = re.match(r"(\d+)\.(\d+)", found["torch"] or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < TORCH:
        raise EnvironmentFault(
            f"training needs torch {_dotted(TORCH)} or newer, this is {found['torch']}",
            remedy=f"pip install 'torch>={_dotted(TORCH)}'",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
