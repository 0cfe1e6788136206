"""The scripts that the pages for those who come from elsewhere end with run as they stand, in a fleet of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
PAGES = sorted((TOP / "docs" / "explanation" / "coming-from").glob("*.md"))
WHOLE = re.compile(r"^```python whole\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_script_that_a_page_ends_with_runs(page: Path, tmp_path: Path) -> None:
    (script,) = WHOLE.findall(page.read_text(encoding="utf-8"))
    (tmp_path / "train.py").write_text(f"{script}\nassert step.loss == step.loss and step.number > 0\nprint('done')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
