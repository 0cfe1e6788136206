"""`outlast run` on a real terminal: the script's words stand above a picture that is drawn again and again."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import threading

import torch
import outlast

run = outlast.join()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = [torch.ones(4)] * 64
training = run.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch_size=4, microbatches=4)
for step in training.steps(until=8):
    for batch in step:
        step.backward(model(batch).square().mean())
    if step.number in (2, 5):
        print(f"at step {step.number} the script speaks", flush=True)
        threading.Event().wait(1.0)
"""


def output_of(terminal: int) -> str:
    """Everything, until the last process has closed it."""
    said = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            data = b""
        if not data:
            return said.decode("utf-8", "replace")
        said += data


@pytest.mark.process
def test_the_script_speaks_above_the_bar(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.toml").write_text("[run]\nheartbeat_s = 0.1\n")
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    options = ["--config", "run.toml", "--replicas", "2", "--run-dir", "here"]
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast", "run", *options, "train.py"], cwd=tmp_path, env=environ,
        stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    said = output_of(ours)
    os.close(ours)
    assert process.wait(60) == 0, said
    for number in (2, 5):
        assert said.count(f"at step {number} the script speaks\r\n") == 1
    assert "\x1b[" in said, "the picture is drawn over itself"
    assert "━" in said, "there is a bar, though nobody told the launcher how many steps"
    assert re.search(r"step \d of 8", said)
    picture_before = said.index("━")
    assert picture_before < said.rindex("the script speaks") < said.rindex("━")
