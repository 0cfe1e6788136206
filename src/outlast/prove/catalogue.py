"""The catalogue of faults: what each is, what must follow from it, and what of it can be put into a run here. Pure.

Classes contain each other: a crash is an omission of everything that comes after it, and an omission is a Byzantine
fault that happens to be silent. `by`: the command that injects it; "" where none can, and then `why_not` says why.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CATALOGUE", "FaultKind"]

Class = Literal["crash", "omission", "Byzantine"]
Layer = Literal["hardware", "software"]

_SAME = "the bits of an undisturbed run; the dead one's microbatches of one step are computed again"
_AGAIN = "the bits of an undisturbed run; steps since the newest generation are computed again"
_HELD = "the step is held, the true gradient applied, the replica named and replaced"
_BOUNDED = "training goes on; what the lie can do is bounded by the rule"
_FM, _SURVIVE, _GUARDS, _AUDITS = "explanation/failure-model", "how-to/survive", "how-to/guards", "how-to/audits"
_RULES, _HEALTH, _SAVES, _TRUST = "how-to/rules", "how-to/health", "how-to/checkpoints", "explanation/trust"
_PROVE, _DEBUG, _PROTOCOL, _HOSTS = "how-to/prove", "how-to/debug", "explanation/protocol", "how-to/hosts"
_OF_RANKS, _RANKS = "outlast prove run --ranks 2 --faults ", "how-to/ranks"
_RUN, _PHASES, _VIRTUAL = "outlast prove run --faults ", "outlast prove faults", "outlast prove protocol"
_FLIPS, _LIES, _STRANGER = "outlast prove corruption", "outlast prove attacks --attacks ", "outlast prove strikes"
_NO_DEVICE = "no device can be made to do so from software"


class FaultKind(NamedTuple):
    """`truth`: how it is known that it happened; `expected`: what must follow; `defence`: what of outlast answers it;
    `page`: where that is written, under docs/."""

    name: str
    kind: Class
    layer: Layer
    truth: str
    expected: str
    defence: str
    page: str
    by: str = ""
    why_not: str = ""


CATALOGUE: tuple[FaultKind, ...] = (
    # --- crash: a process or machine ends
    FaultKind("killed replica", "crash", "software", "SIGKILL sent, exit seen by the kernel", _SAME,
              "the agent's pidfd, a new view", _FM, _RUN + "kill"),
    FaultKind("dead rank of a replica", "crash", "software", "SIGKILL to a rank that is not its replica's lead", _SAME,
              "its agent ends the replica's other ranks, a new view", _RANKS, _OF_RANKS + "kill"),
    FaultKind("segmentation fault", "crash", "software", "SIGSEGV sent", _SAME, "a new view", _FM, _RUN + "segv"),
    FaultKind("failed assertion in native code", "crash", "software", "SIGABRT sent", _SAME, "a new view", _FM,
              _RUN + "abort"),
    FaultKind("lost mapped page", "crash", "hardware", "SIGBUS sent, as for a page that memory cannot give", _SAME,
              "a new view", _FM, _RUN + "bus"),
    FaultKind("out of memory", "crash", "software", "the address space is limited to less than is used", _SAME,
              "a new view, the error told by the agent", _FM, _RUN + "memory"),
    FaultKind("out of descriptors", "crash", "software", "the limit of open files is lowered to 4", _SAME, "a new view",
              _FM, _RUN + "descriptors"),
    FaultKind("file that may not grow", "crash", "software", "the limit of file sizes is lowered to 4 KiB",
              _SAME, "a new view, a successor", _FM, _RUN + "filesize"),
    FaultKind("processor time used up", "crash", "software", "the limit of processor time is lowered to a second",
              _SAME, "a new view", _FM, _RUN + "cputime"),
    FaultKind("exception in the loop", "crash", "software", "raised at a fault point", _SAME, "the error is told; a "
              "second one on the same microbatch ends the run", _FM, _PHASES),
    FaultKind("exit without a word", "crash", "software", "_exit at a fault point", _SAME, "a new view", _FM, _PHASES),
    FaultKind("death in each phase of a step", "crash", "software", "a fault point of that phase", _SAME,
              "kept gradients, orphans computed again", _PROTOCOL, _RUN + "phase"),
    FaultKind("second death during a recovery", "crash", "software", "fault points in two members", _SAME,
              "one more view", _FM, _PHASES),
    FaultKind("power brown-out", "crash", "hardware", "several processes killed within a second", "the same bits, or "
              "truly lost if none is left that held the state", "checkpoints, spares", _SURVIVE, _RUN + "brownout"),
    FaultKind("whole fleet lost", "crash", "hardware", "every replica struck", _AGAIN, "generations", _SAVES,
              _RUN + "brownout"),
    FaultKind("dead spare", "crash", "software", "SIGKILL to a spare", "nothing but its replacement", "restarts",
              _SURVIVE, _RUN + "kill"),
    FaultKind("dead coordinator", "crash", "software", "SIGKILL to it", "nothing while nobody else dies", "its record, "
              "a successor", _FM, _RUN + "kill"),
    FaultKind("dead agent", "crash", "software", "SIGKILL to it", "its replicas die with it, those of others go on",
              "agents, the parent's death signal", _SURVIVE, _RUN + "kill"),
    FaultKind("dead parent of replicas", "crash", "software", "SIGKILL to the process they are forked from", "the next "
              "replica starts slower", "a program of its own", _FM, _RUN + "kill"),
    FaultKind("preemption", "crash", "software", "SIGTERM to a replica", "it leaves after a step, and nothing is lost",
              "graceful leave", "how-to/run", _RUN + "term"),
    FaultKind("death in a save", "crash", "software", "a fault point of each phase of a save", "the generation before "
              "it stands, or the new one is whole", "parts, heads, generations", _SAVES, _PHASES),
    FaultKind("power cut of the only machine", "crash", "hardware", "-", _AGAIN, "generations on a disk that survives",
              _FM, why_not="nothing on the machine is left that could judge; a reboot would end the campaign as well"),
    FaultKind("host without power", "crash", "hardware", "its link is cut, then all of it killed: no connection ends",
              _SAME, "silence removes a host, which may come back", _HOSTS, _RUN + "power"),
    FaultKind("accelerator that fell off the bus", "crash", "hardware", "XID 79 in the kernel's log", _SAME,
              "readings, a new view", _HEALTH, why_not=_NO_DEVICE),
    FaultKind("uncorrectable memory error", "crash", "hardware", "XID 48 or 95, ECC counters", _SAME, "readings, a new "
              "view, the diary", _HEALTH, why_not=_NO_DEVICE),
    FaultKind("dead host", "crash", "hardware", "all of an agent's processes end at once", _SAME, "replicas under "
              "several agents", _SURVIVE, _RUN + "kill"),
    # --- omission: somebody is silent, late or cut off, and says nothing wrong
    FaultKind("stopped replica", "omission", "software", "SIGSTOP, the kernel's state T", _SAME, "learned deadlines",
              _FM, _RUN + "stop"),
    FaultKind("paused replica", "omission", "software", "SIGSTOP, then SIGCONT", "the same bits, with a stall or a new "
              "view", "learned deadlines, fenced epochs", _FM, _RUN + "pause"),
    FaultKind("stopped rank of a replica", "omission", "software", "SIGSTOP to one rank, whose siblings wait for it",
              _SAME, "learned deadlines of each rank", _RANKS, _OF_RANKS + "stop"),
    FaultKind("paused rank of a replica", "omission", "software", "SIGSTOP to one rank, then SIGCONT", "the same bits, "
              "with a stall or a new view", "learned deadlines of each rank", _RANKS, _OF_RANKS + "pause"),
    FaultKind("stopped coordinator", "omission", "software", "SIGSTOP to it", "a successor after a second", "its "
              "progress block", _FM, _RUN + "stop"),
    FaultKind("stopped agent", "omission", "software", "SIGSTOP to it", "it is continued", "the launcher", _FM,
              _RUN + "stop"),
    FaultKind("hung collective", "omission", "software", "a fault point that never returns", _SAME, "learned deadlines "
              "of each phase", _FM, _PHASES),
    FaultKind("interpreter held by native code", "omission", "software", "a fault point that spins", _SAME,
              "progress is read from shared memory, not asked for", _FM, _PHASES),
    FaultKind("one deaf pair", "omission", "software", "a member is mute towards one peer", _SAME, "the roll call",
              _PROTOCOL, _PHASES),
    FaultKind("slow link", "omission", "hardware", "what goes to a host passes at 4 Mbit/s", _SAME, "learned deadlines",
              _HOSTS, _RUN + "slowlink"),
    FaultKind("late messages", "omission", "hardware", "delays in virtual time", _SAME, "learned deadlines", _PROTOCOL,
              _VIRTUAL),
    FaultKind("broken connection", "omission", "hardware", "a cut in virtual time", "one of the two is removed",
              "suspicion, a new view", _PROTOCOL, _VIRTUAL),
    FaultKind("one-way partition", "omission", "hardware", "a cut in one direction, in virtual time", _SAME,
              "the lease", _PROTOCOL, _VIRTUAL),
    FaultKind("lossy link", "omission", "hardware", "bursts of packets to a host are dropped", _SAME, "TCP, the lease",
              _HOSTS, _RUN + "lossy"),
    FaultKind("pulled cable", "omission", "hardware", "a host's link is down, and no connection ends",
              _SAME, "silence removes a host", _HOSTS, _RUN + "cable"),
    FaultKind("broken path between two hosts", "omission", "hardware", "packets between the two go nowhere, and to all "
              "others arrive", _SAME, "one end of each broken path is removed", _HOSTS, _RUN + "path"),
    FaultKind("kernel that hangs", "omission", "hardware", "SIGSTOP to every process of a host", _SAME,
              "silence removes a host", _HOSTS, _RUN + "hang"),
    FaultKind("full disk", "omission", "software", "all room of the file system under the checkpoints is taken",
              "training goes on, the save is told as failed", "old generations stand", _SAVES, _RUN + "full"),
    FaultKind("read-only disk", "omission", "hardware", "the file system under the checkpoints is remounted",
              "training goes on, the save is told as failed", "old generations stand", _SAVES, _RUN + "readonly"),
    FaultKind("disk that never answers", "omission", "hardware", "the file system under the checkpoints is frozen: who "
              "writes waits in the kernel's state D", "training goes on, the save is late or told as failed",
              "saves on threads of their own", "explanation/checkpoints", _RUN + "frozen"),
    FaultKind("driver stuck in state D", "omission", "hardware", "the kernel's state D", "the replica is given up",
              "learned deadlines; its slot is not used again", _FM, why_not=_NO_DEVICE + "; a frozen disk puts who "
              "saves into this state, a trainer not"),
    FaultKind("slowed processor", "omission", "hardware", "SIGSTOP and SIGCONT in turn, ten times a second, as a "
              "processor that is too hot is clocked down", "the same bits, later", "shares of work, learned deadlines",
              _HEALTH, _RUN + "slow"),
    FaultKind("thermal throttling of an accelerator", "omission", "hardware", "a reading", "a slower step, told of",
              "readings", _HEALTH, why_not=_NO_DEVICE),
    FaultKind("clock that jumps", "omission", "hardware", "the wall clock that the run's processes read is moved by up "
              "to a day, ahead or back", "nothing", "no promise rests on wall clocks", _FM, _RUN + "clock"),
    # --- Byzantine: something is wrong, and looks right
    FaultKind("flipped bit in a gradient", "Byzantine", "hardware", "a bit of a chosen element is flipped", _HELD,
              "audits", _AUDITS, _FLIPS),
    FaultKind("flipped bit in a parameter", "Byzantine", "hardware", "a bit of a chosen element is flipped",
              "the replica is replaced, or all go back", "agreement of states", _GUARDS, _FLIPS),
    FaultKind("flipped bit in an optimizer's moment", "Byzantine", "hardware", "a bit of a chosen element is flipped",
              "the replica is replaced, or all go back", "agreement of states", _GUARDS, _FLIPS),
    FaultKind("bit stuck at a value", "Byzantine", "hardware", "the bit is flipped in each step", _HELD, "audits, "
              "quarantine", _AUDITS, _FLIPS),
    FaultKind("wrong sum", "Byzantine", "hardware", "a bit of a partial sum is flipped after its fingerprint", _HELD,
              "audits of sums", _AUDITS, _FLIPS),
    FaultKind("wrong matrix product", "Byzantine", "hardware", "a bit of a product is flipped", "computed again",
              "sums that check themselves", _HEALTH, _FLIPS),
    FaultKind("flipped sign", "Byzantine", "software", "one replica's rows are negated", _BOUNDED, "robust rules",
              _RULES, _LIES + "sign_flip"),
    FaultKind("scaled gradient", "Byzantine", "software", "one replica's rows are scaled", _BOUNDED, "robust rules",
              _RULES, _LIES + "scaling"),
    FaultKind("little is enough", "Byzantine", "software", "rows just inside the honest spread", _BOUNDED,
              "robust rules with neighbours mixed", _RULES, _LIES + "alie"),
    FaultKind("inner product manipulation", "Byzantine", "software", "rows against the honest mean", _BOUNDED,
              "robust rules", _RULES, _LIES + "ipm"),
    FaultKind("mimicry", "Byzantine", "software", "one honest row is copied", _BOUNDED, "robust rules with neighbours "
              "mixed", _RULES, _LIES + "mimic"),
    FaultKind("wrong labels", "Byzantine", "software", "one replica's labels are rotated", _BOUNDED, "robust rules",
              _RULES, _LIES + "label_flip"),
    FaultKind("random bits", "Byzantine", "hardware", "rows of noise", _BOUNDED, "robust rules", _RULES,
              _LIES + "random_bits"),
    FaultKind("stale gradient", "Byzantine", "software", "rows of an earlier step", _BOUNDED, "robust rules", _RULES,
              _LIES + "stale"),
    FaultKind("different things to different members", "Byzantine", "software", "each peer is told another row",
              "the liar is removed", "digests of what was heard", _RULES, _LIES + "inconsistent"),
    FaultKind("numbers that are not finite", "Byzantine", "hardware", "rows of NaN", "the step is skipped or the row "
              "left out", "guards, rules", _GUARDS, _LIES + "nan"),
    FaultKind("liars in agreement", "Byzantine", "software", "all rows of a host lie alike", _BOUNDED, "hosts as fault "
              "domains", _RULES, _LIES + "colluding_groups"),
    FaultKind("reducer that lies", "Byzantine", "software", "a slice is reduced wrongly", "named before anything is "
              "applied", "reductions computed twice", _RULES, _LIES + "lying_reducer"),
    FaultKind("stranger at the door", "Byzantine", "software", "junk, floods, half and replayed greetings, counted by "
              "who sends them", "refused before it is decoded, told of once", "the door", _TRUST, _STRANGER),
    FaultKind("randomness of the loop's own", "Byzantine", "software", "two undisturbed runs that differ", "the run is "
              "refused, and the microbatch named", "two runs of the first microbatch", _PROVE, "outlast prove run"),
    FaultKind("wrong data order", "Byzantine", "software", "digests of batches that differ between runs", "named by "
              "step and microbatch", "samples are a function of position", _PROVE, "outlast prove run"),
    FaultKind("state that nobody registered", "Byzantine", "software", "a variable of the loop that a replacement ends "
              "with otherwise", "named, with the argument that registers it", "the witness", _PROVE,
              "outlast prove run"),
    FaultKind("damaged checkpoint", "Byzantine", "hardware", "a byte of a stored part is changed", "skipped, and the "
              "generation before it loaded", "a checksum for each chunk", _SAVES,
              why_not="in the tests of checkpoints, not in a campaign"),
    FaultKind("torn write", "Byzantine", "hardware", "a part is cut short", "invisible, as no head names it",
              "heads are published last", "explanation/checkpoints",
              why_not="in the tests of checkpoints, not in a campaign"),
    FaultKind("replica of other code", "Byzantine", "software", "-", "refused at the start where files differ",
              "hashes of the script's files", _TRUST, why_not="replicas are taken to run the script that they were "
              "started with"),
    FaultKind("members that lie together about what they heard", "Byzantine", "software", "-", "not promised",
              "none", _FM, why_not="outside of what is promised: see the failure model"),
)  # fmt: skip
