"""The files that replicas compare are the user's own, and to find them takes no time worth telling."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest

from outlast.core.protocol import FILE
from outlast.runtime.training.script_files import script_files


def _add(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"NAME = {name!r}\n")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    return path


def test_what_is_installed_is_not_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _add(tmp_path / "site-packages-of-mine", "outlast_test_mine", monkeypatch)
    _add(tmp_path / "lib" / "site-packages", "outlast_test_installed", monkeypatch)
    _add(tmp_path / "dist-packages" / "deep", "outlast_test_of_debian", monkeypatch)
    found = {Path(name.removeprefix(FILE)).name: digest for name, digest in script_files().items()}
    assert found[mine.name] == hashlib.sha256(mine.read_bytes()).hexdigest()[:12]
    others = {"outlast_test_installed.py", "outlast_test_of_debian.py", "pathlib.py", "script_files.py"}
    assert not others & found.keys()


def test_where_python_s_library_lies_is_asked_once() -> None:
    asked = 0

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal asked
        asked += event == "call" and frame.f_code is sysconfig.get_paths.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        script_files()
    finally:
        sys.setprofile(before)
    assert asked == 1
