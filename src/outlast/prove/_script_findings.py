"""What is wrong with a script's own training, by name: weights, samples, randomness or state that a fault would lose.

Two runs of the same script are held against each other by what their witnesses wrote, part by part, in the order in
which a difference must have come about: the weights at the start, the samples of a microbatch, its loss, the state at
the end, the variables of the loop. The first of these that differs is the cause; what follows from it is not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outlast.prove.strike_findings import StrikeFinding
from outlast.runtime.settings.witness_files import LANE, Computed, StateSeen, read_computed, read_states

__all__ = ["Witnessed", "carried_over", "microbatch_findings", "script_findings", "witnessed"]


class Witnessed(NamedTuple):
    """What the witnesses of one run wrote. `ends`: by process, of those that did all steps; `lanes`: of the ranks of
    equal place that are no leads."""

    computed: Sequence[Computed]
    starts: Mapping[str, StateSeen]
    ends: Mapping[str, StateSeen]
    lanes: Mapping[str, Mapping[str, StateSeen]] = {}


def witnessed(folder: Path, steps: int | None = None) -> Witnessed:
    """Read from a run's folder. `steps`: how many make an end; those of the longest, if it is not said."""
    ends = read_states(folder, "ends")
    most = steps if steps is not None else max((seen.steps for seen in ends.values()), default=0)
    whole = {name: seen for name, seen in ends.items() if seen.steps == most}
    lanes = {
        path.name: {name: seen for name, seen in read_states(folder, path.name).items() if seen.steps == most}
        for path in sorted(folder.glob(f"{LANE}*"))
    }
    return Witnessed(read_computed(folder), read_states(folder, "starts"), whole, lanes)


def script_findings(wanted: Witnessed, seen: Witnessed, struck: bool = False) -> list[StrikeFinding]:
    """The first cause of a difference between two runs; none if there is no difference. `struck`: whether faults were
    put into `seen`, so that state which a replacement did not get is the likely cause."""
    for found in (_starts(wanted, seen), _samples(wanted, seen, struck), _losses(wanted, seen, struck)):
        first = next(found, None)
        if first is not None:
            return [first, *_suspects(wanted, seen)] if first.check == "randomness" and struck else [first]
    return [*_ends(wanted, seen)]


def _starts(wanted: Witnessed, seen: Witnessed) -> Iterator[StrikeFinding]:
    right = next(iter(wanted.starts.values()), None)
    for who, state in seen.starts.items():
        odd = _odd(right.parts, state.parts) if right is not None else []
        if odd:
            yield StrikeFinding(
                check="weights",
                detail=f"{_few(odd)} of {_replica(who)} began with other values than in the run before: what builds "
                "the model draws from a random state that the script does not seed. Call torch.manual_seed(N) first",
            )


def _samples(wanted: Witnessed, seen: Witnessed, struck: bool) -> Iterator[StrikeFinding]:
    right = {(c.step, c.microbatch): c for c in wanted.computed}
    for one in sorted(seen.computed, key=lambda c: (c.step, c.microbatch)):
        other = right.get((one.step, one.microbatch))
        if other is not None and other.digest != one.digest:
            who = f", which {one.who} computed," if struck else ""
            yield StrikeFinding(
                check="data",
                detail=f"microbatch {one.microbatch} of step {one.step}{who} held other samples than in the run before:"
                " what the data set gives for an index depends on more than the index. It shuffles or draws by the "
                "time, by a generator of its own, or keeps what it gave before. Order and draw from torch, numpy or "
                "random, which outlast seeds by position, or from a seed that the script fixes",
            )


def _losses(wanted: Witnessed, seen: Witnessed, struck: bool) -> Iterator[StrikeFinding]:
    right = {(c.step, c.microbatch): c for c in wanted.computed}
    for one in sorted(seen.computed, key=lambda c: (c.step, c.microbatch)):
        other = right.get((one.step, one.microbatch))
        if other is not None and other.loss != one.loss:
            why = (
                f"{one.who} computed it, and did not have what the others have: state that is not registered"
                if struck
                else "the model or the loop uses randomness of its own (a generator, the time, os.urandom), or counts "
                "what this process did"
            )
            yield StrikeFinding(
                check="randomness",
                detail=f"the loss of microbatch {one.microbatch} of step {one.step} is another one from the same "
                f"samples: {why}. Draw from torch, numpy or random inside the loop, and give what the loop counts or "
                "remembers to protect(state=...)",
            )


def _ends(wanted: Witnessed, seen: Witnessed) -> Iterator[StrikeFinding]:
    pairs = [(wanted.ends, seen.ends), *((wanted.lanes.get(lane, {}), ends) for lane, ends in seen.lanes.items())]
    for right, ends in pairs:
        yield from _ended_otherwise(next(iter(right.values()), None), ends)


def _ended_otherwise(right: StateSeen | None, ends: Mapping[str, StateSeen]) -> Iterator[StrikeFinding]:
    for who, state in ends.items():
        odd = _odd(right.parts, state.parts) if right is not None else []
        if odd:
            yield StrikeFinding(
                check="state", detail=f"{_few(odd)} of {_replica(who)} ended with other values than in the run before"
            )
            return


def carried_over(alone: Witnessed, fleet: Witnessed, struck: Witnessed) -> tuple[list[StrikeFinding], list[str]]:
    """(findings, notes) of variables of the loop that every undisturbed process ends with alike, and a process of the
    struck run does not: nobody carried them over to it. Objects with a state and generators are findings; numbers and
    tensors, which may be logs, are notes."""
    found: dict[str, StrikeFinding] = {}
    notes: dict[str, str] = {}
    stable = _stable([*alone.ends.values(), *fleet.ends.values()])
    for who, state in struck.ends.items():
        for name, (kind, digest) in state.loop.items():
            if name not in stable or stable[name] == digest or name in found:
                continue
            if kind.startswith("object") or kind == "random":
                short = name.rpartition(".")[2]
                found[name] = StrikeFinding(
                    check="unregistered state",
                    detail=f"{name} ({kind}) of {_replica(who)} is not what it is in an undisturbed run: a replica "
                    f"that joins begins with a new one. Give it to protect(state={{{short!r}: {name}}})",
                )
            else:
                notes.setdefault(name, f"{name} ({kind}) of {_replica(who)} is not what it is in an undisturbed run")
    return [*found.values()], [*notes.values()]


def _suspects(wanted: Witnessed, seen: Witnessed) -> Iterator[StrikeFinding]:
    """Variables of the loop that ended otherwise, where a loss did."""
    stable = _stable(list(wanted.ends.values()))
    names = [
        name
        for state in seen.ends.values()
        for name, (_, digest) in state.loop.items()
        if name in stable and stable[name] != digest
    ]
    if names:
        yield StrikeFinding(
            check="unregistered state", detail=f"variables that ended otherwise: {_few(sorted({*names}))}"
        )


def _stable(states: Sequence[StateSeen]) -> dict[str, str]:
    """Digests of the variables in which all agree."""
    if not states:
        return {}
    first, *others = states
    return {
        name: told[1]
        for name, told in first.loop.items()
        if all(other.loop.get(name, ("", ""))[1] == told[1] for other in others)
    }


def microbatch_findings(seen: Witnessed, steps: int, committed: set[int]) -> Iterator[StrikeFinding]:
    """Every microbatch of a committed step was computed, and by whomever with one result."""
    by_place: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for one in seen.computed:
        by_place.setdefault((one.step, one.microbatch), set()).add((one.digest, one.loss))
    number = 1 + max((microbatch for _, microbatch in by_place), default=-1)
    for step in sorted(committed & set(range(steps))):
        missing = [leaf for leaf in range(number) if (step, leaf) not in by_place]
        if missing:
            yield StrikeFinding(
                check="microbatches", detail=f"step {step} was committed without microbatch {missing[0]}"
            )
            return
    for (step, leaf), results in sorted(by_place.items()):
        if len(results) > 1 and step in committed:
            yield StrikeFinding(
                check="microbatches", detail=f"microbatch {leaf} of step {step} was computed with two results"
            )
            return


def _odd(wanted: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    return [name for name in wanted.keys() | seen.keys() if wanted.get(name) != seen.get(name)]


def _few(names: Sequence[str]) -> str:
    ordered = sorted(name.removeprefix("/model/") for name in names)
    more = f" and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    return f"{ordered[0]}{more}"


def _replica(process: str) -> str:
    return process.rpartition(".")[0]
