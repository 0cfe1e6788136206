"""Every error outlast raises, with its stable code.

    OutlastError
    ├── ConfigError            bad input: an option, a TOML key, an argument           exit 2
    ├── EnvironmentFault       this machine cannot do it: disk, port, file system      exit 3
    ├── MembershipError        refused or removed from a run                           exit 4
    │   ├── SignatureMismatch    numerics differ from the run's                        exit 4
    │   ├── Evicted              the run went on without this replica                  exit 4
    │   └── DeviceFault          this device computes wrongly, each time               exit 4
    ├── TrainingError          the user's loop, model or data                          exit 5
    │   ├── PoisonMicrobatch     two replicas failed on the same microbatch            exit 5
    │   ├── StateDiverged        replicas that must be equal are not                   exit 5
    │   ├── LoopUnrepeatable     the loop does what no joiner could repeat             exit 5
    │   ├── GuardStop            a guard's verdict is to stop                          exit 5
    │   └── StepMisuse           the loop broke the rules of a step                    exit 5
    ├── FleetLost              nobody alive holds the training state                   exit 6
    ├── CheckpointError        a checkpoint cannot be written, read or trusted         exit 7
    │   ├── Damage               bytes of it are not what its manifest says             exit 7
    │   └── Unsaved              training finished; its newest steps are in no checkpoint  exit 10
    ├── WireRefusal            a connection that is not of this run                    exit 4
    ├── ProveError             a run that should have survived did not                 exit 9
    ├── ProtocolViolation      an invariant does not hold: a bug in outlast            exit 8
    └── ViewAbandoned          internal: this view is over; never reaches the user

Role: the one vocabulary of failure. Messages say what happened, where, what the system did about it, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "CheckpointError", "ConfigError", "Damage", "DeviceFault", "EnvironmentFault", "Evicted", "FleetLost", "GuardStop",
    "LoopUnrepeatable", "MembershipError",
    "OutlastError", "PoisonMicrobatch", "ProtocolViolation", "ProveError", "SignatureMismatch", "StateDiverged",
    "StepMisuse", "TrainingError", "Unsaved", "ViewAbandoned", "WireRefusal", "nearest",
]  # fmt: skip


class OutlastError(Exception):
    """Base of all errors. `code` is stable (documented under reference/errors); `exit_code` is the process's."""

    code: ClassVar[str] = "OUTLAST"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str = "", did: str = "", remedy: str = "") -> None:
        """`where`: host, replica, step; `did`: what the system did about it; `remedy`: what the reader can do."""
        super().__init__(message)
        self.message, self.where, self.did, self.remedy = message, where, did, remedy

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}" + (f" ({self.where})" if self.where else "")]
        lines += [f"  {label}: {text}" for label, text in (("done", self.did), ("remedy", self.remedy)) if text]
        return "\n".join(lines)


class ConfigError(OutlastError, ValueError):
    code, exit_code = "CONFIG", 2


class EnvironmentFault(OutlastError):
    code, exit_code = "ENVIRONMENT", 3


class MembershipError(OutlastError):
    code, exit_code = "MEMBERSHIP", 4


class SignatureMismatch(MembershipError):
    code = "SIGNATURE"


class Evicted(MembershipError):
    code = "EVICTED"


class DeviceFault(MembershipError):
    """A device gives wrong results for the same inputs, or its memory changes: nothing more is computed on it."""

    code = "DEVICE"


class TrainingError(OutlastError):
    code, exit_code = "TRAINING", 5


class PoisonMicrobatch(TrainingError):
    code = "POISON"


class StateDiverged(TrainingError):
    code = "DIVERGED"


class LoopUnrepeatable(TrainingError):
    """What the loop, the model or the data do depends on more than a replica that joins can be given (rules 41, 42)."""

    code = "LOOP"


class GuardStop(TrainingError):
    code = "GUARD"


class StepMisuse(TrainingError):
    code = "STEP"


class FleetLost(OutlastError):
    code, exit_code = "FLEET_LOST", 6


class CheckpointError(OutlastError):
    code, exit_code = "CHECKPOINT", 7


class WireRefusal(OutlastError):
    """The other end of a connection does not know the run's secret, or breaks the framing."""

    code, exit_code = "WIRE", 4


class ProveError(OutlastError):
    """A run that should have survived did not, or an expected moment never came."""

    code, exit_code = "PROVE", 9


class Damage(CheckpointError):
    """Bytes that are not what a manifest says, or a manifest that says what cannot be.

    `file`: the file's name in the store; `offset` and `bytes`: where in it, if known; `what`: the finding.
    """

    code = "CHECKPOINT_DAMAGED"

    def __init__(self, what: str, *, file: str, offset: int = 0, bytes: int = 0) -> None:
        place = f"{file}, bytes {offset} to {offset + bytes}" if bytes else file
        super().__init__(what, where=place, remedy="`outlast ckpt verify` lists every wrong byte and its tensors")
        self.what, self.file, self.offset, self.bytes = what, file, offset, bytes


class Unsaved(CheckpointError):
    """Training finished, and its newest steps are in no checkpoint: not an end like any other."""

    code, exit_code = "UNSAVED", 10

    @classmethod
    def of(cls, steps: int, newest: int, url: str, reason: str) -> Unsaved:
        """`newest`: the step of the newest checkpoint, -1 for none; `reason`: why there is no newer one."""
        there = f"the newest one there is of step {newest}" if newest >= 0 else "there is none"
        return cls(
            f"training finished, but step {steps} is in no checkpoint at {url}: {there}",
            where=reason,
            did="what the script itself wrote after its loop is not touched by this",
            remedy="see to the place, and run it again: it goes on from the newest checkpoint",
        )


class ProtocolViolation(OutlastError, AssertionError):
    code, exit_code = "PROTOCOL", 8


class ViewAbandoned(OutlastError):
    """The view this member was exchanging in is over. Caught by the training session; never reaches the user."""

    code = "VIEW"


def nearest(
    name: object, known: Iterable[str], otherwise: str | None = None, *, both: bool = False, cutoff: float = 0.6
) -> str:
    """A remedy for a misspelt name: "did you mean 'x'?", or where nothing is near `otherwise` ("one of a, b, c").

    `both`: the question and then `otherwise`, for short lists of which the reader wants to see the rest. `cutoff`: how
    alike is near, from 0 to 1.
    """
    import difflib  # only where there is something to say: the command line starts without it

    names = list(known)
    listed = f"one of {', '.join(names)}" if otherwise is None else otherwise
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    if not close:
        return listed
    return f"did you mean {close[0]!r}?" + (f" {listed}" if both else "")
