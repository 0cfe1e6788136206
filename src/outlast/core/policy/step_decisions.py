"""From what was seen in a step to what is done with it: pure, so that every member decides the same.

`decide` and `remember` are functions of the settings, the remembered state and the evidence alone; `agree` finds who
differs; `escalate` is the coordinator's: what a replica that offends again deserves. Order of severity: states that
differ (nothing can be trusted), numbers that are not finite, spikes, collapse. Nothing here looks at a tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from outlast.core.policy.bands import Band
from outlast.core.policy.guard_records import (
    Confidence,
    Culprit,
    GuardEvidence,
    Guards,
    GuardState,
    OnSpike,
    Verdict,
    VerdictAction,
)

__all__ = [
    "agree",
    "can_rewind",
    "decide",
    "escalate",
    "escalate_fleeting",
    "fresh_state",
    "is_nonfinite",
    "is_spike",
    "remember",
    "unreproduced",
]

_BY_CHANCE = 0.001  # looked at after every finding: over forty of them, sound replicas are blamed in 1 run of 100
_MOST_REMEMBERED = 100_000  # skipped steps and samples; beyond that the data is at fault, and the run has long stopped


def fresh_state(guards: Guards) -> GuardState:
    """What guards remember before the first step."""
    # more patient than the verdicts are: a level is taken for new only after they have had their say
    band = Band(warmup=guards.warmup, width=guards.width, patience=guards.patience + 1)
    return GuardState(loss=band, norm=band)


def decide(guards: Guards, state: GuardState, evidence: GuardEvidence) -> Verdict:
    """The verdict on one step."""
    for found in (_on_difference, _on_undecided, _on_nonfinite, _on_spike, _on_collapse):
        verdict = found(guards, state, evidence)
        if verdict is not None:
            return verdict
    return Verdict()


def remember(guards: Guards, state: GuardState, evidence: GuardEvidence, verdict: Verdict) -> GuardState:
    """What the guards know after a step that was decided so."""
    action = verdict.action
    if action == "rewind":
        passed = (*state.passed, (verdict.to, evidence.step + 1))
        return msgspec.structs.replace(
            state,
            loss=state.loss.reset(),
            norm=state.norm.reset(),
            num_bad=0,
            num_rewinds=state.num_rewinds + 1,
            passed=passed[-_MOST_REMEMBERED:],
            rate_until=0,
        )
    after = {name: band.read(value)[1] for name, band, value, _ in _bands(guards, state, evidence)}
    changes: dict[str, object] = {
        "loss": after.get("loss", state.loss), "norm": after.get("gradient norm", state.norm),
        "num_bad": 0 if action == "apply" else state.num_bad + 1,
    }  # fmt: skip
    if action != "apply":
        changes["skipped"] = (*state.skipped, evidence.step)[-_MOST_REMEMBERED:]
    if action == "lower_rate":
        changes["rate_until"] = evidence.step + 1 + guards.rate_steps
    if action == "skip_batch":
        changes["left_out"] = tuple(sorted({*state.left_out, *_sure_samples(evidence)}))[-_MOST_REMEMBERED:]
    return msgspec.structs.replace(state, **changes)


# --- states that differ ----------------------------------------------------------------------------------------------
def agree(rows: Mapping[str, object]) -> tuple[tuple[str, ...], bool]:
    """(members that differ from the majority, whether there is one), from what each member says of its state."""
    counts = Counter(rows.values())
    if len(counts) <= 1:
        return (), True
    said, most = counts.most_common(1)[0]
    if 2 * most > len(rows):
        return tuple(name for name, value in rows.items() if value != said), True
    return tuple(rows), False


def _on_difference(guards: Guards, state: GuardState, e: GuardEvidence) -> Verdict | None:
    if not e.differing:
        return None
    if not e.majority:
        seen = f"{e.part} differs between {', '.join(e.differing)}, and no state has a majority"
        remedy = "test the memory of these replicas' devices; three replicas or more can tell which one is wrong"
        return _back_or_stop(guards, state, e, seen, Culprit(), remedy, "possible")
    who = _of(e, e.differing[0])
    others = e.num_members - len(e.differing)
    if set(e.differing) <= set(e.joined):  # what the loop does beside the outcomes is likelier than a wrong device
        return Verdict(
            action="replace",
            confidence="possible",
            culprit=Culprit(replica=e.differing[0]),
            evidence=f"{e.part} of {', '.join(e.differing)}, which has just joined, is not what {others} others have",
            remedy="what the loop changes from step to step belongs into protect(..., state={...})",
        )
    seen = f"{e.part} of {', '.join(e.differing)} differs from that of {others} other replicas, which agree"
    remedy = "its state was replaced by theirs; if it happens to this device again, test its memory"
    if guards.divergence == "stop":
        return Verdict(action="stop", evidence=seen, culprit=who, remedy="test the memory of that device")
    if guards.divergence == "rewind":
        return _back_or_stop(guards, state, e, seen, who, remedy, "certain")
    return Verdict(action="replace", evidence=seen, culprit=who, remedy=remedy)


def can_rewind(guards: Guards, state: GuardState, certified: int) -> bool:
    """Whether there is a state to go back to, and going back is still allowed."""
    return certified >= 0 and state.num_rewinds < guards.max_rewinds


def _on_undecided(guards: Guards, state: GuardState, e: GuardEvidence) -> Verdict | None:
    if not e.undecided:
        return None
    remedy = "test the devices of both; three replicas or more can tell which one is wrong"
    return _back_or_stop(guards, state, e, e.undecided, Culprit(), remedy, "possible")


def _of(e: GuardEvidence, replica: str) -> Culprit:
    known = [culprit for culprit in e.culprits if culprit.replica == replica]
    return known[0] if known else Culprit(replica=replica)


# --- numbers that are not finite -------------------------------------------------------------------------------------
def _on_nonfinite(guards: Guards, state: GuardState, e: GuardEvidence) -> Verdict | None:
    if guards.nonfinite == "off" or not is_nonfinite(e):
        return None
    seen, who = _what_is_not_finite(e), e.culprits[0] if e.culprits else Culprit(microbatch=_first(e))
    if (verdict := _on_unreal(e, seen)) is not None:
        return verdict
    if guards.nonfinite == "stop":
        return Verdict(action="stop", evidence=seen, culprit=who, remedy=_advice(who))
    if guards.nonfinite == "rewind" or state.num_bad + 1 >= guards.patience:
        return _back_or_stop(guards, state, e, seen, who, _advice(who), "certain")
    action: VerdictAction = "skip_batch" if _sure_samples(e) else "skip_step"
    return Verdict(action=action, evidence=seen, culprit=who, confidence=_sureness(who), remedy=_advice(who))


def _on_unreal(e: GuardEvidence, seen: str) -> Verdict | None:
    """What was seen came of no microbatch: computed again, the gradient is another. Then the device made it up."""
    unreal = unreproduced(e)
    if not unreal or len(unreal) < len(e.culprits) or e.num_members <= len({c.replica for c in unreal}):
        return None
    return Verdict(
        action="replace",
        evidence=f"{seen}; computed again by {unreal[0].replica}, the gradient is another",
        culprit=unreal[0],
        confidence="likely",
        fleeting=True,
        remedy="its part is computed by others and its state is replaced; if other replicas do it too, an operation "
        "makes such numbers at random: torch.use_deterministic_algorithms(True) may name it. If it alone does, test "
        "its device",
    )


def unreproduced(e: GuardEvidence) -> tuple[Culprit, ...]:
    """Findings of replicas that did not see them again when they computed the same once more."""
    return tuple(culprit for culprit in e.culprits if culprit.replica and not culprit.reproduced)


def is_nonfinite(e: GuardEvidence) -> bool:
    """Whether some loss, or the gradient, is not finite."""
    return bool(e.bad_microbatches) or (e.norm is not None and not math.isfinite(e.norm)) or not math.isfinite(e.loss)


def _what_is_not_finite(e: GuardEvidence) -> str:
    if e.bad_microbatches:
        return f"the loss of microbatch {', '.join(map(str, e.bad_microbatches))} is not finite"
    return f"the gradient's norm is {e.norm}"


def _first(e: GuardEvidence) -> int:
    return e.bad_microbatches[0] if e.bad_microbatches else -1


def _sureness(who: Culprit) -> Confidence:
    if who.reproduced:
        return "certain"
    return "likely" if who.microbatch >= 0 else "possible"


def _sure_samples(e: GuardEvidence) -> set[int]:
    return {sample for culprit in e.culprits if culprit.sure for sample in culprit.samples}


def _advice(who: Culprit) -> str:
    if who.sure:
        return f"samples {', '.join(map(str, who.samples))} hold values that are not finite: mend or drop them"
    if who.operation or who.module:
        return f"look at {who.operation or 'the operation'}" + (f" in {who.module}" if who.module else "")
    return "lower the learning rate or clip the gradient; guards=Guards(inspect=True) names the operation"


# --- spikes and collapse ---------------------------------------------------------------------------------------------
def _bands(guards: Guards, state: GuardState, e: GuardEvidence) -> list[tuple[str, Band, float, OnSpike]]:
    """What is watched for spikes: its name, band and newest value, and what is done about it."""
    norm = e.norm if e.norm is not None else math.nan
    rows = [("loss", state.loss, e.loss, guards.loss_spike), ("gradient norm", state.norm, norm, guards.norm_spike)]
    return [row for row in rows if row[3] != "off"]


def is_spike(guards: Guards, state: GuardState, e: GuardEvidence) -> bool:
    """Whether a value that is guarded is above its band."""
    return _on_spike(guards, state, e) is not None


def _on_spike(guards: Guards, state: GuardState, e: GuardEvidence) -> Verdict | None:
    for name, band, value, response in _bands(guards, state, e):
        reading, _ = band.read(value)
        if reading.finding == "spike":
            seen = f"the {name} is {reading.value:.4g}; its band ends at {reading.limit:.4g}"
            return _on_unreal(e, seen) or _spike(guards, state, e, seen, response)
    return None


def _spike(guards: Guards, state: GuardState, e: GuardEvidence, seen: str, response: OnSpike) -> Verdict:
    remedy = "look at this step's batch; a lower learning rate or a tighter clip_norm makes spikes rarer"
    lasting = state.num_bad + 1 >= guards.patience
    if response == "stop":
        return Verdict(action="stop", evidence=seen, confidence="likely", remedy=remedy)
    if response == "rewind" or (lasting and e.certified >= 0):
        if state.num_bad + 1 < min(2, guards.patience):  # one batch is passed first; a state that stays bad is left
            return Verdict(action="skip_step", evidence=seen, confidence="likely", remedy=remedy)
        return _back_or_stop(guards, state, e, seen, Culprit(), remedy, "likely")
    if response == "lower_rate" or lasting:
        return Verdict(action="lower_rate", evidence=seen, confidence="likely", remedy=remedy)
    return Verdict(action="skip_step", evidence=seen, confidence="likely", remedy=remedy)


def _on_collapse(guards: Guards, state: GuardState, e: GuardEvidence) -> Verdict | None:
    if guards.collapse == "off" or not e.collapsed:
        return None
    module, seen = e.collapsed[0]
    return Verdict(
        action="stop" if guards.collapse == "stop" else "apply",
        evidence=f"{module}: {seen}",
        culprit=Culprit(module=module),
        confidence="likely",
        remedy="a lower learning rate, another initialisation or a normalisation layer keeps units alive",
    )


def _back_or_stop(
    guards: Guards, state: GuardState, e: GuardEvidence, seen: str, who: Culprit, remedy: str, confidence: Confidence
) -> Verdict:
    if can_rewind(guards, state, e.certified):
        return Verdict(
            action="rewind",
            evidence=seen,
            culprit=who,
            confidence=confidence,
            to=e.certified,
            remedy=f"{remedy}; steps {e.certified} to {e.step} are passed",
        )
    why = f"after {state.num_rewinds} rewinds" if state.num_rewinds else "there is no certified state to go back to"
    if not guards.certify_every:
        remedy += "; Guards(certify_every=100) keeps a state to go back to"
    return Verdict(action="stop", evidence=f"{seen}; {why}", culprit=who, confidence=confidence, remedy=remedy)


# --- who offends again -----------------------------------------------------------------------------------------------
def escalate(
    slot: str, host: str, offences: Mapping[str, int], host_of: Mapping[str, str], others: Sequence[str]
) -> VerdictAction:
    """What becomes of a replica whose state or numbers were wrong: the coordinator's part of the verdict.

    `offences`: of each slot, this one included. Once may be a stray particle: its state is replaced. Twice is the
    device: it is quarantined. Two quarantined devices of one host are the host, if there are `others`.
    """
    if offences.get(slot, 0) < 2:
        return "replace"
    bad = [other for other, count in offences.items() if count >= 2 and host_of.get(other) == host]
    return "evict_host" if len(bad) >= 2 and others else "quarantine"


def escalate_fleeting(slot: str, counts: Mapping[str, int], num_slots: int) -> VerdictAction:
    """Return what becomes of a replica whose numbers were wrong, and right when they were computed again.

    Some operations of torch make a NaN at random, on any device. So a device is quarantined only where its share of all
    such findings (`counts`, by slot, this one included) cannot be chance: where one of `num_slots` equal replicas would
    have so many of them with a probability below 0.1 % (binomial tail, times the number of replicas).
    """
    total, mine, share = sum(counts.values()), counts.get(slot, 0), 1.0 / max(1, num_slots)
    tail = sum(math.comb(total, k) * share**k * (1.0 - share) ** (total - k) for k in range(mine, total + 1))
    return "quarantine" if num_slots * tail < _BY_CHANCE else "replace"
