"""Does a device still give the answers that it must? Asked for a time, in rounds, with what it said wrong.

Role: `outlast health test`, an admission test before a replica joins, the test of a device that something named. It
needs no run. A wrong answer is asked for twice more: a device that is right then was wrong by chance (`transient`), one
that is not is broken (`persistent`). A device that is right gives the same bits every time, so nothing that is right is
ever reported on a device whose kernels are deterministic.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from outlast.errors import ConfigError
from outlast.health._answers import Answers
from outlast.health._collectives import Unanswered, collectives
from outlast.health._kernels import Case, cases
from outlast.tensors import fingerprint

__all__ = ["DeviceTest", "WrongAnswer", "device_identity", "QuestionsInTurn", "device_of", "ask_device"]

_ASKED_AGAIN = 2
_SELDOM = 100  # rounds to one with collectives, which wait for sockets and would take most of the time


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`case` was answered wrongly in `round`; `num_wrong` elements differed from what is known, -1 where only
    fingerprints are. `kind`: "transient" if it was right when asked again, "persistent" if not; "unlike" if it agrees
    with itself and not with others of its kind."""

    case: str
    round: int
    kind: Literal["transient", "persistent", "unlike"]
    num_wrong: int
    evidence: str


class DeviceTest(msgspec.Struct, frozen=True, kw_only=True):
    """What a test found. `wrong`: the first hundred; `num_wrong`: all. `learned`: cases whose answers were not known
    for this kind of device, and are now."""

    device: str
    device_kind: str
    seconds: float
    rounds: int
    num_asked: int
    operations: float
    num_wrong: int
    wrong: list[WrongAnswer]
    learned: int

    @property
    def passed(self) -> bool:
        """Whether every answer was right."""
        return self.num_wrong == 0


def device_of(name: str) -> torch.device:
    """From what was typed: "auto" is the first accelerator, else the processor. ConfigError for what is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", remedy="cpu, cuda:0, or auto") from error
    return device


def device_identity(device: torch.device) -> tuple[str, str]:
    """(which one it is, its kind with everything that may change the bits of its answers)."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name} {getattr(facts, 'uuid', device)}", f"{facts.name}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return str(device), f"cpu {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def ask_device(
    device: torch.device,
    *,
    seconds: float = 0.0,
    size: int = 256,
    answers: Answers | None = None,
    strike: Callable[[str, Tensor], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[int, float], None] | None = None,
) -> DeviceTest:
    """Ask every question, at least once and until `seconds` have passed.

    `answers`: those of this kind of device, read and added to; without any a device is held to itself alone. `strike`:
    called with each case's name and answer, to put faults in. `told(round, seconds)`: after each round.
    """
    name, kind = device_identity(device)
    asked, together = list(cases(device, size)), list(collectives(device, size))
    known = answers.of(kind, size) if answers is not None else {}
    wrong: list[WrongAnswer] = []
    learned = rounds = num_wrong = num_asked = 0
    operations = 0.0
    start = clock()
    while rounds == 0 or clock() - start < seconds:
        these = together if rounds % _SELDOM == 0 else []
        for case, found, new in _ask_all(asked, these, known, rounds, strike):
            num_asked += 1
            learned, operations = learned + new, operations + case.operations
            if found is not None:
                num_wrong += 1
                wrong += [found] if len(wrong) < 100 else []
        rounds += 1
        if told is not None:
            told(rounds, clock() - start)
    if answers is not None and learned and not num_wrong:
        answers.keep(kind, size, known)
    return DeviceTest(
        device=name,
        device_kind=kind,
        seconds=clock() - start,
        rounds=rounds,
        num_asked=num_asked,
        operations=operations,
        num_wrong=num_wrong,
        wrong=wrong,
        learned=learned if not num_wrong else 0,
    )


def _ask_all(
    asked: list[Case], together: list[Case], known: dict[str, int], number: int, strike: Any
) -> Iterator[tuple[Case, WrongAnswer | None, int]]:
    """Each case with what `_ask` says of it; none of the collectives, `together`, once one of them did not end."""
    for case in (*asked, *together):
        try:
            yield case, *_ask(case, known, number, strike)
        except Unanswered as error:
            together.clear()
            print(f"outlast: no collectives are asked for any more: {case.name}: {error}", file=sys.stderr)
            return


class QuestionsInTurn:
    """The same questions, one a call: for a device that has other things to do. It is held to itself alone, and to what
    is known of exact answers. `operations`: about how many each takes, by name, in the order of asking."""

    def __init__(
        self, device: torch.device, size: int = 32, strike: Callable[[str, Tensor], None] | None = None
    ) -> None:
        self._asked = list(cases(device, size))
        self.operations = {case.name: case.operations for case in self._asked}
        self._known: dict[str, int] = {}
        self._strike = strike
        self.num_asked = 0

    def ask(self) -> WrongAnswer | None:
        """Ask the next question; None if the answer is right."""
        rounds, place = divmod(self.num_asked, len(self._asked))
        self.num_asked += 1
        return _ask(self._asked[place], self._known, rounds, self._strike)[0]


def _ask(
    case: Case, known: dict[str, int], number: int, strike: Callable[[str, Tensor], None] | None
) -> tuple[WrongAnswer | None, int]:
    """(what was wrong, whether the answer is new)."""

    def answer() -> Tensor:
        out = case.compute()
        if strike is not None:
            strike(case.name, out)
        return out.cpu()

    first = answer()
    said, new = fingerprint(first), 0
    if case.name not in known:
        if case.expected is not None:
            known[case.name] = fingerprint(case.expected)
        else:  # nobody has answered it before: twice alike, and near the truth
            again = fingerprint(answer())
            if again != said:
                return _undecided(case, number, [said, again, fingerprint(answer())]), 0
            if not _near(case, first):
                return WrongAnswer(
                    case=case.name,
                    round=number,
                    kind="persistent",
                    num_wrong=-1,
                    evidence="the same bits twice, and far from the true values",
                ), 0
            known[case.name] = said
        new = 1
    if said == known[case.name]:
        return None, new
    later = [fingerprint(answer()) for _ in range(_ASKED_AGAIN)]
    return _settle(case, number, known[case.name], later, first), new


def _undecided(case: Case, number: int, prints: list[int]) -> WrongAnswer:
    """An answer that nobody knows came out otherwise the second time."""
    once = len(set(prints)) == 2
    return WrongAnswer(
        case=case.name,
        round=number,
        kind="transient" if once else "persistent",
        num_wrong=-1,
        evidence="one of three answers was another" if once else "three answers, all different",
    )


def _settle(case: Case, number: int, right: int, later: list[int], first: Tensor) -> WrongAnswer:
    """What kind of wrong it is, from the answers that followed."""
    count = int((first != case.expected).sum()) if case.expected is not None else -1
    if all(print_ == right for print_ in later):
        kind: Literal["transient", "persistent", "unlike"] = "transient"
        evidence = f"wrong once, then right {len(later)} times"
    elif case.expected is None and len({fingerprint(first), *later}) == 1 and _near(case, first):
        kind, evidence = "unlike", "other bits than devices of its kind gave, each time"
    else:
        kind, evidence = "persistent", f"wrong again in {sum(p != right for p in later)} of {len(later)} further times"
    return WrongAnswer(case=case.name, round=number, kind=kind, num_wrong=count, evidence=evidence)


def _near(case: Case, answer: Tensor) -> bool:
    if case.near is None:
        return True
    true, limit = case.near
    return bool(((answer.double() - true).abs() <= limit * (1 + true.abs())).all())
