"""What the user's loop changes between steps, as far as it can be carried to who replays outcomes (rules 41, 42).

Three kinds, all as they are when a step's inner loop begins, which is when every member has run the same lines:
*settings* (the numbers in `param_groups`, which parameters require a gradient, which modules are in training mode)
belong to each step's outcome; *registered* state (`state=`, and schedulers found beside the optimizer) and parameters
that the loop wrote in place, frozen ones of the model too, are copied for joiners and spares with each outcome. What
the lines before the inner loop had found goes with it (`_as_given.py`). Nothing else can be carried.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from outlast.errors import ConfigError, LoopUnrepeatable
from outlast.runtime.training._as_given import AsGiven, Given
from outlast.runtime.training.state import State, decoded_tree, encoded_tree
from outlast.tensors import combine, fingerprint_named, local

__all__ = ["FOUND", "Lived", "LoopState"]

FOUND = "outlast.scheduler."
"""Registered state under such a name is a scheduler that the script did not give to `protect`."""
_SMALL = 64  # elements of a tensor that counts as a setting


class Lived(msgspec.Struct, frozen=True):
    """A copy: plain data, and its tensors' bytes end to end."""

    step: int
    plain: bytes
    data: Tensor


class LoopState:
    """Finds what the loop changes beside the optimizer's step, so that joiners get it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.step, self.settings = -1, b""  # of the step whose inner loop has begun
        self.remembered: dict[str, int] = {}  # a fingerprint of each registered part, at some of these steps
        self._given = AsGiven()
        self.kept: Lived | None = None  # of the newest step, where it is fed to anybody or somebody may lack it
        self._read = b"", b""  # what was found last, as it stood there, and as settings: the same twice a step
        self._modules = list(state.model.modules())
        self._known = {id(param) for param in state.params}
        self._held = dict(zip(state.names, state.params, strict=True))  # that the loop may write in place
        mine = {id(param) for param in state.params}
        self._held |= {name: param for name, param in state.named().items() if id(param) not in mine}  # frozen ones too
        self._versions: list[int] = []
        self._shelf: dict[str, tuple[Tensor, int]] = {}  # a parameter's copy, and its version
        self.committed()

    def given(self, step: int) -> None:
        """The loop is about to be given this step: what it finds belongs to the copy of that step."""
        self._given.note(step, self.read(), tuple(self.written()), self.registered())

    def given_of(self, step: int) -> bytes:
        """What `keep` adds of what the loop found as it was given the step; empty if that is not known."""
        return self._given.told(step, self.settings)

    # --- settings ------------------------------------------------------------------------------------------------
    def begin(self, step: int) -> None:
        """The inner loop of this step begins (or goes on)."""
        if self.step != step:
            self.step, self.settings = step, self.read()
            self.remembered = self._remembered() if step.bit_count() == 1 else {}

    def read(self) -> bytes:
        """The settings as they are now."""
        groups = [
            [[item for item in group.items() if item[0] != "params"] for group in o.param_groups]
            for o in self.state.optimizers
        ]
        wanted = self._flags([param.requires_grad for param in self.state.params], "require a gradient")
        modes = self._flags([module.training for module in self._modules], "are in training mode")
        try:
            raw = msgspec.msgpack.encode((groups, wanted, modes))
        except (TypeError, OverflowError):  # a rate in a tensor, or what is no setting
            return _encoded(groups, wanted, modes)
        if raw != self._read[0]:
            self._read = raw, _encoded(groups, wanted, modes)
        return self._read[1]

    def _flags(self, values: list[bool], what: str) -> bytes:
        """One byte each. Stages of a pipeline have other parameters and modules, so what is told there is one byte for
        all of them; raises LoopUnrepeatable where that says too little."""
        if self.state.stages is None:
            return bytes(values)
        if len({*values}) > 1:
            raise LoopUnrepeatable(
                f"some parts of the model {what} and others do not, which ranks of a pipeline cannot tell each other",
                did="the step was not committed",
                remedy="freeze nothing that trained when protect() was called, and set the mode of the model as a "
                "whole: model.train(), model.eval()",
            )
        return bytes(values[:1])

    def _each(self, flags: bytes, num: int) -> bytes:
        return flags * num if self.state.stages is not None else flags

    def write(self, settings: bytes, *, but_groups: bool = False) -> None:
        """Make the settings these. `but_groups`: those that are in no snapshot of the state."""
        if not settings or settings == self.read():
            return
        optimizers, wanted, modes = msgspec.msgpack.decode(settings)
        for optimizer, groups in zip(self.state.optimizers, [] if but_groups else optimizers, strict=not but_groups):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values:
                    group[key] = _placed(value, group.get(key))
        for param, wants in zip(self.state.params, self._each(wanted, len(self.state.params)), strict=True):
            param.requires_grad_(bool(wants))
        for module, mode in zip(self._modules, self._each(modes, len(self._modules)), strict=True):
            module.training = bool(mode)

    @staticmethod
    def digest(settings: bytes) -> int:
        """For headers."""
        return xxhash.xxh3_64_intdigest(settings)

    def digest_of_all(self, *, compared: bool) -> int:
        """For headers: the settings, and in steps 1, 2, 4, 8 … what is registered. `compared`: whole states are."""
        whole = self.digest(self.settings)
        return whole if compared else combine([whole, *self.remembered.values()])

    def named(self, settings: bytes) -> dict[str, str]:
        """Each setting by name, to say what differs."""
        optimizers, wanted, modes = msgspec.msgpack.decode(settings)
        rows: dict[str, str] = {}
        for o, groups in enumerate(optimizers):
            for g, values in enumerate(groups):
                place = f" of group {g}" * (len(groups) > 1) + f" of optimizer {o}" * (len(optimizers) > 1)
                rows |= {f"{key}{place}": _shown(value) for key, value in values}
        for name, wants in zip(self.state.names, self._each(wanted, len(self.state.names)), strict=True):
            rows[f"requires_grad of {name}"] = str(bool(wants))
        modes = self._each(modes, len(self._modules))
        for (name, _), mode in zip(self.state.model.named_modules(), modes, strict=True):
            rows[f"training mode of {name or 'the model'}"] = "train" if mode else "eval"
        return rows

    def check(self) -> None:
        """Before a step's exchange: what no replay could repeat is refused by name (42)."""
        self.check_trained(self.step)  # first: a group that was added is no rate that was changed
        now = self.read() if self.settings else b""
        if now != self.settings and _groups(now) != _groups(self.settings):
            old, new = self.named(self.settings), self.named(now)
            key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
            raise LoopUnrepeatable(
                f"the loop changed {key} from {old.get(key)} to {new.get(key)} while step {self.step} was computed",
                did="the step was not committed",
                remedy="change it between two steps: before or after `for batch in step`, never inside",
            )

    def check_trained(self, step: int) -> None:
        """Raises LoopUnrepeatable for a parameter that trains and did not when this was made."""
        for optimizer in self.state.optimizers:
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    if param.requires_grad and id(param) not in self._known:
                        raise self._untrained(param, f"parameter {i} of group {g}", step)

    def _untrained(self, param: Tensor, place: str, step: int) -> LoopUnrepeatable:
        names = {id(p): name for name, p in self.state.named().items()}
        return LoopUnrepeatable(
            f"{names.get(id(param), place)} began to train in step {step}, and was not trained when protect() was "
            "called: its gradients would be exchanged by nobody",
            did="the step was not committed",
            remedy="give the optimizer all that will ever train, requiring gradients, before protect() is called; then "
            "freeze it with requires_grad_(False), and thaw it in the loop when its time comes",
        )

    # --- registered state, and parameters that the loop wrote ----------------------------------------------------
    def registered(self) -> dict[str, Any]:
        """The user's parts of the state, found schedulers among them."""
        extra = self.state.extra.items()
        return {key: part for key, part in extra if not key.startswith("outlast.") or key.startswith(FOUND)}

    def _remembered(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for key, part in self.registered().items():
            plain, tensors = encoded_tree({key: part.state_dict()})
            rows = [(name, local(tensor)) for name, tensor in tensors.items()]
            found[key] = combine([xxhash.xxh3_64_intdigest(plain), fingerprint_named(rows)])
        return found

    def committed(self) -> None:
        """A step was applied: what is written to parameters from here on the loop wrote."""
        self._versions = [param._version for param in self._held.values()]

    def taken_up(self) -> None:
        """Another state was loaded, over what is on the shelf, too."""
        self._shelf = {}
        self.committed()

    def written(self) -> dict[str, Tensor]:
        """Parameters that were written in place since the last step was applied."""
        now = zip(self._held.items(), self._versions, strict=True)
        return {name: param.detach() for (name, param), version in now if param._version != version}

    def keep(self, step: int | None, given: bytes | None = None) -> Lived | None:
        """A copy of what the loop has made of its state by the inner loop of `step`; None: forget the one before.
        `given`: as another told it, where the loop was not given the step here."""
        told = b"" if step is None else self.given_of(step) if given is None else given
        self.kept = Lived(step, *self._copied(self.written(), told)) if step is not None else None
        return self.kept

    def _copied(self, written: dict[str, Tensor], given: bytes = b"") -> tuple[bytes, Tensor]:
        parts = {key: part.state_dict() for key, part in self.registered().items()}
        plain, tensors = encoded_tree({"registered": parts, "written": written, "given": given})
        flat = [_bytes_of(tensor) for tensor in tensors.values()]
        return plain, torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)

    def registered_now(self) -> Lived:
        """A copy of the registered state alone, of no step."""
        return Lived(-1, *self._copied({}))

    def put_registered(self, was: Lived) -> None:
        """Make the registered state what `registered_now` gave, where it is another one."""
        now = self.registered_now()
        if now.plain != was.plain or not torch.equal(now.data, was.data):
            self.load(was, whole=True)

    def load(self, lived: Lived | None, *, whole: bool) -> None:
        """Take over a copy; not `whole`: only what the next outcome is applied to."""
        if lived is None:
            return
        tree = decoded_tree(lived.plain, lived.data)
        self._write(tree["written"])
        if whole:
            self._put(tree["registered"])

    def load_given(self, lived: Lived, settings: bytes) -> None:
        """Become, of a copy, what the loops found as they were given its step, as far as is known: settings, registered
        state, and parameters that they had written. `settings`: of the step's inner loop."""
        tree = decoded_tree(lived.plain, lived.data)
        if not tree["given"]:
            return
        given = msgspec.msgpack.decode(tree["given"], type=Given)
        self._write({name: value for name, value in tree["written"].items() if name in given.written})
        self._put(tree["registered"] | given.values())
        self.write(given.settings or settings)

    def shelve(self) -> None:
        """The loop is about to go through lines that have done their work on these parameters already."""
        self._shelf = {name: (local(p.detach()).to("cpu", copy=True), p._version) for name, p in self._held.items()}

    def unshelve(self) -> None:
        """Parameters are what they were at `shelve`, if it was called since the last time."""
        shelf, self._shelf = self._shelf, {}
        self._write({name: was for name, (was, version) in shelf.items() if self._held[name]._version != version})
        if shelf:
            self.committed()

    def _write(self, written: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in written.items():
                local(self._held[name]).copy_(value)

    def _put(self, registered: dict[str, Any]) -> None:
        parts = self.registered()
        for key, values in registered.items():
            if key in parts:
                self.state.put(key, values)

    def find_schedulers(self) -> None:
        """Register the schedulers that hang on the optimizers and were not given to `protect`: the loop steps them."""
        given = {id(part) for part in (*self.state.schedulers, *self.state.extra.values())}
        number = 0
        for optimizer in self.state.optimizers:
            for found in _holders(optimizer):
                if id(found) not in given and _is_scheduler(found):
                    given.add(id(found))
                    self.state.extra[f"{FOUND}{number}.{type(found).__name__}"] = found
                    number += 1


def _encoded(groups: list[list[list[tuple[str, Any]]]], wanted: bytes, modes: bytes) -> bytes:
    told = [[[[k, _plain(v)] for k, v in group if _is_setting(v)] for group in each] for each in groups]
    return msgspec.msgpack.encode((told, wanted, modes))


def _is_setting(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= _SMALL
    if isinstance(value, tuple | list):
        return all(_is_setting(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str) or (hasattr(value, "item") and value.ndim == 0)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"T": [str(value.dtype).removeprefix("torch."), list(value.shape), _bytes_of(value).numpy().tobytes()]}
    if isinstance(value, tuple):
        return {"U": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def _placed(value: Any, present: Any) -> Any:
    """What `_plain` made of a setting, in the place of the one that is there."""
    if isinstance(value, list):
        return [_placed(item, None) for item in value]
    if not isinstance(value, dict):
        return value
    if "U" in value:
        return tuple(_placed(item, None) for item in value["U"])
    tensor = _tensor(value["T"])
    if isinstance(present, Tensor) and (present.dtype, present.shape) == (tensor.dtype, tensor.shape):
        with torch.no_grad():
            return present.copy_(tensor)
    return tensor


def _tensor(row: list[Any]) -> Tensor:
    dtype, shape, data = row
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = tuple(value["U"]) if "U" in value else _tensor(value["T"]).tolist()
    return repr(value)


def _groups(settings: bytes) -> Any:
    return msgspec.msgpack.decode(settings)[0]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _holders(target: Any) -> Iterator[Any]:
    """Objects with an attribute that is `target`, in the order in which the collector knows them."""
    for holder in gc.get_referrers(target):
        if isinstance(holder, dict):
            yield from (owner for owner in gc.get_referrers(holder) if getattr(owner, "__dict__", None) is holder)
        else:
            yield holder


def _is_scheduler(found: Any) -> bool:
    kind = type(found)
    if not (isinstance(found, torch.optim.lr_scheduler.LRScheduler) or kind.__name__.endswith(("Scheduler", "LR"))):
        return False
    if not all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        return False
    try:
        encoded_tree(found.state_dict())
    except ConfigError:  # it holds what cannot be stored: it stays the loop's own
        return False
    return True
