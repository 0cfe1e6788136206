"""What is kept beside a journal counts only if it is whole, of this code, and of this journal."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from outlast import journal as room
from outlast.core import events as ev
from outlast.journal import Journal, code_digest, ends_digest, sealed, unsealed


def notice(number: int) -> ev.Notice:
    return ev.Notice(at_s=float(number), level="info", text=f"{number}")


@pytest.mark.parametrize("body", [b"", b"body", bytes(100)])
def test_what_was_sealed_is_whole_or_nothing(body: bytes) -> None:
    data = sealed(b"a format 1\n", body)
    assert unsealed(b"a format 1\n", data) == body
    assert unsealed(b"a format 2\n", data) is None
    assert unsealed(b"a format 1\n", data + b"x") is None
    for at in range(len(data)):
        assert unsealed(b"a format 1\n", data[:at]) is None
        assert unsealed(b"a format 1\n", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_other_code_is_told_apart_and_code_without_its_source_keeps_nothing(tmp_path: Path) -> None:
    module, source = ModuleType("folds"), tmp_path / "folds.py"
    module.__file__ = str(source)
    assert code_digest([room, module]) is None
    digests = set()
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        digests.add(code_digest([room, module]))
    assert len(digests) == 2
    assert None not in digests


def test_a_journal_is_known_by_its_first_entry_and_the_last_that_counts(tmp_path: Path) -> None:
    found = []
    for name, numbers in (("one", (1, 2, 3)), ("same", (1, 2, 4)), ("other", (5, 2, 3))):
        with Journal.create(tmp_path / name) as journal:
            journal.append_many([notice(number) for number in numbers])
            assert journal.flush()
            found.append([ends_digest(journal, seq) for seq in (1, 2, 3, 4)])
    one, same, other = found
    assert one[:2] == same[:2]
    assert one[2] != same[2]
    assert all(mine != theirs for mine, theirs in zip(one[:3], other[:3], strict=True))
    assert [row[3] for row in found] == [None, None, None], "it has lost its end"
