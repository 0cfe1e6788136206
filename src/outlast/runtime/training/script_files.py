"""Fingerprints of the files that a training script is made of, as this process has loaded them.

A replica that is started hours later reads them again; where somebody has saved another version meanwhile, it would
compute something else than the others. Which files are compared is decided by the coordinator (`core/protocol/fleet/`),
for replicas may have imported different ones when they are asked.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from outlast.core.protocol import FILE

__all__ = ["script_files"]

_MOST = 500  # files; a larger project is compared in part, in the order of their names
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def script_files() -> dict[str, str]:
    """Return a fact for each file of the user's own code: `FILE` and its path, to the start of its SHA-256.

    The user's own is what lies neither in Python's library nor among installed packages. The main script is taken as it
    was compiled, modules as they lie on the disk.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    base = os.path.dirname(os.path.abspath(main)) if main else os.getcwd()
    own = sorted(_own({file for file in map(_file_of, list(sys.modules.values())) if file}))[:_MOST]
    rows = ((path, _content(path, main)) for path in own)
    return {FILE + os.path.relpath(path, base): hashlib.sha256(c).hexdigest()[:12] for path, c in rows if c is not None}


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _own(files: Iterable[str]) -> set[str]:
    """Return the user's own of thousands of files. Where Python's library lies is asked once: each answer takes as long
    as all else that is done here for hundreds of files."""
    library = sysconfig.get_paths()
    places = (library["stdlib"], library["platstdlib"], str(Path(__file__).parents[2]))
    found = {os.path.abspath(file) for file in files}
    return {path for path in found if not path.startswith(places) and _INSTALLED.isdisjoint(path.split(os.sep))}


def _content(path: str, main: str | None) -> bytes | None:
    if main is not None and path == os.path.abspath(main):
        return "".join(linecache.getlines(path)).rstrip().encode()
    try:
        return Path(path).read_bytes()
    except OSError:
        return None
