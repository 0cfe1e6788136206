"""The user's loop: `join`, `protect`, `steps`. Everything under it is somebody else's (`_replica.py`, `_engine.py`).

    run = outlast.join()
    training = run.protect(model, optimizer, dataset, global_batch_size=64, microbatches=8, seed=0)
    for step in training.steps(until=2000):
        for batch in step:                              # this replica's microbatches
            step.backward(loss_fn(model, batch))
        log(step.number, step.loss)                     # committed

Exhausting the inner loop commits the step; `break` or an exception never does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.policy import Guards
from outlast.core.protocol import Certificate, Compute, Exchange, Leave
from outlast.errors import ConfigError, Evicted, MembershipError, StepMisuse, ViewAbandoned
from outlast.runtime._allocator import keep_freed_memory
from outlast.runtime._arguments import check_arguments, check_once, listed, positive
from outlast.runtime._assembly import assemble
from outlast.runtime._auditing import Auditing, chosen_audit
from outlast.runtime._critical import critical_of
from outlast.runtime._data import Samples
from outlast.runtime._engine import Meta
from outlast.runtime._environment import Environment
from outlast.runtime._facts import facts_of, prepare_process
from outlast.runtime._failing import Left, exit_by_code, how_left, left_open, report_failure
from outlast.runtime._inspection import Inspection
from outlast.runtime._plain import PlainTraining
from outlast.runtime._plain_saves import PlainSaves
from outlast.runtime._plane import Plane
from outlast.runtime._repeat import Repeat
from outlast.runtime._replica import Replica
from outlast.runtime._row_settings import Given as Aggregation
from outlast.runtime._settings import Checkpoint, settings_of
from outlast.runtime._shared import Progress
from outlast.runtime._state import State, digest_of

__all__ = ["Run", "Step", "Training", "join", "pause"]


def join() -> Run:
    """Become part of the run that started this process, or a fleet of one. `OUTLAST=off` makes a plain loop of it."""
    env = Environment.read(os.environ)
    prepare_process(env)
    sys.excepthook = exit_by_code(sys.excepthook)
    return Run(env, plain=os.environ.get("OUTLAST", "on").lower() == "off")


def pause(seconds: float) -> None:
    """The loop's own code is about to be silent for up to `seconds` (a long evaluation, an upload): not a hang.

    Without it the limit is `outside_s`. Does nothing outside a run. Raises ConfigError for a negative number.
    """
    if not seconds >= 0:
        raise ConfigError(f"pause({seconds!r}) is no duration", remedy="give seconds, 0 or more")
    for progress in _active:
        progress.alive(ahead_s=seconds)


_active: list[Progress] = []  # the progress block of this process's run, once joined


class Run:
    """This process's part in a run."""

    def __init__(self, env: Environment, plain: bool = False) -> None:
        self._env, self._plain = env, plain
        _active[:] = [env.progress]
        self._training: Training | None = None

    @property
    def name(self) -> str:
        """This replica's name, slot.incarnation, e.g. `r2.1`."""
        return self._env.me

    @property
    def is_writer(self) -> bool:
        """Whether this replica writes what only one should: the first member of the view."""
        view = self._training.replica.member.view if self._training is not None else None
        return view is None or view.members[0] == self._env.me

    def protect(
        self,
        model: torch.nn.Module, optimizer: Any, dataset: Any, *, global_batch_size: int, microbatches: int,
        seed: int = 0, scheduler: Any = None, clip_norm: float | None = None, state: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0, shuffle: bool = True,
        drop_last: bool = False, bucket_mb: float = 4.0, aggregation: Aggregation = None, f: int | None = None,
        pre: str | Sequence[str] | None = None, rows: int | None = None, row_momentum: float | None = None,
        check_reducers: float | None = None, guards: Guards | str = "default",
        checkpoint: Checkpoint | Literal["auto", "off"] = "auto", audit: float | str = 0.0,
        audit_params: Sequence[str] | str = (),
    ) -> Training | PlainTraining:  # fmt: skip
        """Put the model's training under protection.

        `optimizer`, `scheduler`: one, or a list. `microbatches`: units of work in a step, the same whoever computes
        them. `state`: what else the loop changes, by name, each with `state_dict` and `load_state_dict`; what is not
        given here cannot be joined or rewound. `clip_norm`: largest global gradient norm. Batches come from
        `collate_fn` (torch's default) as in a `DataLoader`. `guards`: "default", "full", "off", or
        `outlast.Guards(...)` to choose what is watched and what follows; the run's setting if not given.
        `checkpoint`: where and how often to save; `auto` is where the run's configuration says (`--checkpoint-dir`),
        at intervals that outlast chooses. `audit`: share of microbatches that a second replica computes too, so that a
        wrong gradient is found before it is applied; "auto" lets the policy choose (what the run is told outranks it).
        `audit_params`: patterns of names of critical parameters, or "auto": a second replica reduces their gradients
        and all compare them and their moments, in every step (how-to/audits).

        `aggregation`: a robust rule in place of the mean, or rules by pattern of parameter names (how-to/rules); of
        `rows` groups of microbatches `f` may lie. What `outlast run` is told outranks these.

        Raises ConfigError for arguments that cannot work, each with what would.
        """
        check_once(self._training)
        optimizers, schedulers = listed(optimizer), listed(scheduler)
        check_arguments(
            model, optimizers, schedulers, state or {}, seed=seed, clip_norm=clip_norm, num_workers=num_workers,
            bucket_mb=bucket_mb, collate_fn=collate_fn,
        )  # fmt: skip
        samples = Samples(
            dataset, global_batch_size=positive("global_batch_size", global_batch_size),
            microbatches=positive("microbatches", microbatches), seed=seed, shuffle=shuffle, drop_last=drop_last,
            collate_fn=collate_fn, num_workers=num_workers,
        )  # fmt: skip
        _enough(self._env.config.replicas, microbatches)
        parts = State(model, optimizers, schedulers, state or {})
        keep, facts = settings_of(checkpoint, self._env.config), facts_of(self._env.config, parts, samples, clip_norm)
        chosen, critical = chosen_audit(audit, self._env.config), critical_of(parts, audit_params)
        facts["audit_params"] = ", ".join(critical)
        facts["audit"] = f"{chosen:g}" if isinstance(chosen, float) else chosen
        if self._plain:
            saves = PlainSaves(self._env, parts, keep, facts) if keep is not None else None
            return PlainTraining(parts, samples, clip_norm, seed, saves)
        robust = {
            "aggregation": aggregation, "f": f, "pre": pre, "rows": rows, "row_momentum": row_momentum,
            "check_reducers": check_reducers,
        }  # fmt: skip
        replica = assemble(
            self._env, parts, samples, facts, seed=seed, clip_norm=clip_norm, bucket_mb=bucket_mb, guards=guards,
            keep=keep, robust=robust,
        )  # fmt: skip
        self._training = Training(replica, chosen, critical)
        return self._training


class Training:
    """What `protect` returns."""

    def __init__(self, replica: Replica, audit: float | str = 0.0, critical: Sequence[str] = ()) -> None:
        self.replica, self.engine = replica, replica.engine
        self._repeat = Repeat(replica)
        self._audit = Auditing(replica, audit, critical)
        self._inspection = Inspection(replica)
        self._started = False
        self._step: Step | None = None
        self._begun: Plane | None = None  # the view's plane in which the current step's exchange has begun
        self._failed = False
        self._home = os.getpid()  # what the script forks inherits hooks and handlers, and is not the replica
        self._left: Left | None = None

    def steps(self, until: int) -> Iterator[Step]:
        """Steps 0 … until-1 that are still to be done, one object each. Returns when all replicas committed the last.

        `break` out of this loop is allowed if every replica does it after the same step.
        """
        limit = self.replica.env.until or until
        self.replica.member.until = min(positive("until", until), limit)
        self._start()
        try:
            while (todo := self.replica.resume()) is not None:
                if isinstance(todo, Leave):
                    self.replica.close_barrier(todo)
                    continue
                if self.replica.saves is not None:
                    self.replica.saves.boundary()
                self._step = Step(self, todo.step)
                yield self._step
                if self.replica.member.committed == todo.step:
                    raise left_open(todo.step, self.replica)
            self._ended()
            self.replica.close()
            if limit < until:
                raise SystemExit(0)
        except GeneratorExit:
            # `break`, or an exception on its way out: through somebody else's iterator that is known only when the
            # process ends. In the middle of a step it is never a good end.
            self._left = how_left(sys._getframe(1))
            if self._left == "break" and self.replica.saves is not None:
                with contextlib.suppress(ViewAbandoned):
                    self.replica.saves.last(final=True)
            raise

    def _ended(self) -> None:
        """The coordinator closed the run for this replica: finished is the only end after which the script goes on."""
        member = self.replica.member
        if member.leaving and not member.done:
            raise SystemExit(0)
        if member.closed == "finished" and not member.done:
            print(f"outlast: the run is over: it finished without {member.me}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if not member.done:
            raise MembershipError(
                f"the run is over: {member.closed}", where=f"replica {member.me}, step {member.committed}",
                did="this replica stops", remedy="outlast why tells what happened",
            )  # fmt: skip

    def _start(self) -> None:
        if self._started:
            raise StepMisuse("steps() was called twice", remedy="one protect() for each training")
        self._started = True
        previous = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if os.getpid() == self._home:
                self._failed = True
                self.replica.link.beat()
                if isinstance(error, Exception) and not isinstance(error, MembershipError):
                    self.replica.link.send([report_failure(self.replica, error)])
                self.replica.close()
            previous(kind, error, trace)

        sys.excepthook = failed
        atexit.register(self._at_exit)
        keep_freed_memory()
        _warm_up()
        self.replica.link.start()
        if threading.current_thread() is threading.main_thread() and self.replica.env.coordinator is not None:
            signal.signal(signal.SIGTERM, self._asked_to_leave)

    def _at_exit(self) -> None:
        """The script is over. After `break` the others must have ended at the same step."""
        if os.getpid() != self._home:
            return
        self.replica.link.beat()  # the steps since the last one are known to nobody yet
        try:
            if self._left in ("break", "unknown") and not self._failed and self._step is not None:
                if self.replica.member.committed == self._step.number:
                    raise left_open(self._step.number, self.replica)
                self.replica.leave_early()
        except MembershipError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        except StepMisuse as error:
            self.replica.link.send([report_failure(self.replica, error)])
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        finally:
            self.replica.close()

    def _asked_to_leave(self, *_: Any) -> None:
        """SIGTERM: tell the coordinator; the view without this replica takes effect after a step."""
        if os.getpid() != self._home:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.replica.link.leave()

    def fingerprint(self) -> str:
        """SHA-256 over parameters and optimizer state by name: name, dtype, shape, bytes."""
        return digest_of(self.engine.state)

    @property
    def certified(self) -> Certificate | None:
        """The newest state known to be finite, agreed and audited; None without audits."""
        return self.replica.member.audits.certificate

    # --- one step ------------------------------------------------------------------------------------------------
    def _microbatches(self, step: int) -> Iterator[Any]:
        """Batches until the step is committed: mine, and orphans of the dead."""
        replica, engine = self.replica, self.engine
        if step == 0:
            yield from self._repeat.batches(self._repeat.rounds())
        while replica.member.committed == step:
            todo = replica.resume()
            if todo is None:
                self._ended()
            if replica.member.committed != step:
                break
            if isinstance(todo, Compute):
                if engine.samples.sizes(step)[todo.microbatch] == 0:
                    engine.skip(step, todo.microbatch)
                    self._computed(todo)
                    continue
                yield from self._one(todo)
            elif isinstance(todo, Exchange):
                yield from self._exchange(todo)
        if engine.meta is None or engine.meta.step != step:  # it was given a newer state: the loop has missed steps
            raise Evicted(
                f"the run went on without this replica after step {step}", where=f"replica {replica.env.me}",
                did="it is started again", remedy="outlast why says more",
            )  # fmt: skip
        replica.enter(Phase.BODY)  # the loop's own time: an evaluation may take as long as it likes

    def _one(self, todo: Compute) -> Iterator[Any]:
        replica = self.replica
        if todo.orphan:
            replica.enter(Phase.RECOMPUTE, todo.microbatch)
        replica.enter(Phase.LOAD, todo.microbatch)
        batch = self.engine.prepare(todo.step, todo.microbatch)
        self._current, self._loss = todo, None
        replica.enter(Phase.BODY, todo.microbatch)
        yield batch
        if self._loss is None:
            raise StepMisuse(
                f"microbatch {todo.microbatch} of step {todo.step} got no backward",
                remedy="call step.backward(loss) once for each batch",
            )
        self._computed(todo)

    def _backward(self, loss: Tensor) -> None:
        todo, replica = self._current, self.replica
        if self._repeat.active:
            self._repeat.backward(loss)
            return
        if self._audit.active:
            self._audit.backward(loss)
            return
        if self._inspection.active:
            self._inspection.backward(loss)
            return
        if todo is None or self._loss is not None:
            raise StepMisuse("step.backward was called twice for one batch", remedy="add the losses, then call it once")
        replica.enter(Phase.BACKWARD, todo.microbatch)
        self.engine.begin(todo.step, todo.microbatch, self._announcer(todo))
        loss.backward()  # type: ignore[no-untyped-call]
        replica.enter(Phase.MERGE, todo.microbatch)
        self.engine.end(todo.step, todo.microbatch, float(loss.detach()))
        self._loss = float(loss.detach())
        replica.enter(Phase.BODY, todo.microbatch)

    def _announcer(self, todo: Compute) -> Callable[[int], None] | None:
        """For the last microbatch before an exchange: offer each bucket as soon as it is folded. Never raises."""
        replica = self.replica
        try:
            with replica.lock:
                _, plan = replica.member.standing()
                missing = self._missing(plan.leaves)
        except ViewAbandoned:
            return None
        last = plan.leaves[replica.env.me][-1:] == (todo.microbatch,)
        if not last or replica.plane is None or missing > 1:
            return None
        plane = self._begun = replica.plane
        trouble: list[ViewAbandoned] = []

        def announce(bucket: int) -> None:
            if not trouble:
                try:
                    if bucket == 0:
                        plane.begin(replica.task())
                    plane.offer(bucket)
                except ViewAbandoned as reason:  # recorded: acted on after the backward (13)
                    trouble.append(reason)

        return announce

    def _missing(self, leaves: Mapping[str, Sequence[int]]) -> int:
        held = {leaf for lo, hi in self.replica.member.held for leaf in range(lo, hi)}
        return len(set(leaves[self.replica.env.me]) - held)

    def _computed(self, todo: Compute) -> None:
        with self.replica.lock:
            self.replica.member.computed(todo.microbatch)
            self._audit.computed(todo.microbatch)
        self._current = None

    _current: Compute | None = None
    _loss: float | None = None

    def _exchange(self, todo: Exchange) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        try:
            self._repeat.conclude()
            self._audit.commit(todo)
            found = self.replica.exchange(todo, begun is not None and begun is self.replica.plane)
            yield from self._audit.batches(todo)
            self.replica.collect_heads(todo, found, self._audit)
            if self.replica.heads is not None and self.engine.guards.suspects(self.replica.heads[0]):
                yield from self._inspection.batches(self.replica.heads[0])
            self.replica.conclude(todo)
            self._audit.report(todo.view)
        except ViewAbandoned as reason:
            self.replica.abandon(reason)


class Step:
    """One step. Iterate it for its batches; after that it is committed and `loss` is known."""

    def __init__(self, training: Training, number: int) -> None:
        self._training, self.number = training, number

    def __iter__(self) -> Iterator[Any]:
        return self._training._microbatches(self.number)

    def backward(self, loss: Tensor) -> None:
        """Backward of this microbatch's mean loss; its gradient goes into the step's tree."""
        self._training._backward(loss)

    @property
    def loss(self) -> float:
        """Mean loss over the global batch, the same on every replica. StepMisuse before the commit."""
        return self._meta.loss

    @property
    def grad_norm(self) -> float | None:
        """Global norm before clipping; None with neither `clip_norm` nor guards."""
        return self._meta.norm

    @property
    def _meta(self) -> Meta:
        meta = self._training.engine.meta
        if meta is None or meta.step != self.number:
            raise StepMisuse(f"step {self.number} is not committed", remedy="read it after the inner loop")
        return meta


def _enough(replicas: int, microbatches: int) -> None:
    if replicas > microbatches:
        raise ConfigError(
            f"{replicas} replicas cannot share {microbatches} microbatches",
            remedy=f"microbatches={replicas} or more, or --replicas {microbatches} or fewer",
        )


def _warm_up() -> None:
    """The first optimizer step of a process imports for a second, and its first backward finds everything cold: take
    that before anybody waits. It draws no random number."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    torch.nn.functional.linear(torch.zeros(2, 8), parameter).relu().sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([parameter]).step()
