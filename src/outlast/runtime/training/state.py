"""The training state as a tree: live tensors by name, and everything else as plain data without pickle.

One walk serves fingerprints, joining and checkpoints: parameters, buffers, optimizers, schedulers and
whatever was registered. State that is not registered cannot be joined or rewound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from outlast.errors import ConfigError
from outlast.runtime.training._scaling import Scaling
from outlast.runtime.training.began_with import BEGAN, BeganWith
from outlast.runtime.training.stages import Key, Stages
from outlast.tensors import (
    combine,
    fingerprint,
    fingerprint_named,
    is_shard,
    like,
    local,
    on_mesh,
    part_of,
    reshard,
    whole,
)

__all__ = ["State", "decoded_tree", "digest_of", "empty_like_encoded", "encoded_tree"]


class State:
    """The parts of a training run that must survive."""

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any], extra: Mapping[str, Any]
    ) -> None:
        self.model, self.optimizers, self.schedulers, self.extra = model, optimizers, schedulers, dict(extra)
        self.extra[BEGAN] = BeganWith(optimizers, schedulers)
        self.scaling = Scaling()
        reshard(model)  # a forward that came before would hide the shards
        self._shards = {name: p for name, p in model.named_parameters() if is_shard(p)}
        names = {id(p): name for name, p in model.named_parameters()}
        self.params: list[Tensor] = []
        self.names: list[str] = []
        for number, optimizer in enumerate(optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    if param.requires_grad and not any(param is known for known in self.params):
                        self.params.append(param)
                        self.names.append(names.get(id(param), f"optimizer{number}.group{g}.{i}"))
        if not self.params:
            raise ConfigError("the optimizer has no parameter that requires a gradient", remedy="pass the model's")
        self._name_of = {id(p): n for p, n in zip(self.params, self.names, strict=True)} | names
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        self.stages: Stages | None = None  # of the replica, where it is a pipeline and this process has one of them

    def scaled_with(self, scaler: Any) -> State:
        """Have losses scaled as `scaler` says. Raises ConfigError for what is no gradient scaler."""
        self.scaling = Scaling(scaler)
        self.extra |= self.scaling.parts()
        return self

    def name_of(self, param: Tensor) -> str:
        """The name of a parameter that an optimizer holds."""
        return self._name_of[id(param)]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters and buffers that other ranks of a pipeline have, and this one has not."""
        return self.stages.elsewhere if self.stages is not None else frozenset()

    def named(self) -> dict[str, Tensor]:
        """The model's parameters by name: of what is sharded the shard, also while FSDP holds the whole beside it."""
        return {name: self._shards.get(name, param) for name, param in self.model.named_parameters()}

    def size_bytes(self) -> int:
        """Bytes of the state's tensors, but those that were registered. Before an optimizer's first step its state is
        not there."""
        held = [*map(local, self.params), *self.buffers.values()]
        for optimizer in self.optimizers:
            held += [local(t) for row in optimizer.state.values() for t in row.values() if isinstance(t, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    # --- reading -------------------------------------------------------------------------------------------------
    def tree(self, *, spread: bool = False, without: str = "") -> dict[str, Any]:
        """The live state: nested plain data with tensors at its leaves; of what is sharded, what lies here, or (with
        `spread`) the tensor that knows which part of the whole that is. `without`: a registered part."""
        if spread and self.stages is not None:
            return self.stages.spread(self.tree(without=without))
        held = self._on_mesh if spread else local
        lies = self._on_mesh if spread else lambda tensor: tensor
        model = {name: held(p).detach() for name, p in self.named().items()}
        model |= dict(self.model.named_buffers())
        loose = {n: held(p).detach() for p, n in zip(self.params, self.names, strict=True) if n not in model}
        return {
            "model": model | loose,
            "optimizers": [self._optimizer(o, spread) for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "extra": {key: _each(value.state_dict(), lies) for key, value in self.extra.items() if key != without},
        }

    def _on_mesh(self, tensor: Tensor) -> Tensor:
        """Spread over all dimensions of the replica's mesh: no rank takes what others hold, too, for its own."""
        meshes = [p.device_mesh for p in self._shards.values()]  # type: ignore[attr-defined]
        return on_mesh(tensor, max(meshes, key=lambda mesh: mesh.ndim)) if meshes else tensor

    def _optimizer(self, optimizer: Any, spread: bool) -> dict[str, Any]:
        held = [(p, self._name_of[id(p)], v) for p, v in optimizer.state.items() if isinstance(p, Tensor)]
        lies = self._on_mesh if spread else local
        rows = [(name, {k: lies(_held(name, k, t, p)) for k, t in values.items()}) for p, name, values in held]
        state = dict(sorted(rows, key=lambda row: row[0]))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {"state": state, "groups": groups}

    def encoded(self, without: str = "") -> tuple[bytes, dict[str, Tensor]]:
        """(plain data with tensors replaced by their names, the tensors by name). `without`: a registered part."""
        return encoded_tree(self.tree(without=without))

    def spread(self, without: str = "") -> dict[str, Tensor]:
        """The tensors that are spread over ranks, by the names of `encoded`, as tensors that know of what they are a
        part."""
        if not self._shards:
            return {}
        tensors: dict[str, Tensor] = {}
        _encode(self.tree(spread=True, without=without), "", tensors, as_parts=True)
        return {name: tensor for name, tensor in tensors.items() if is_shard(tensor)}

    def fingerprint(self) -> int:
        """64 bits over everything, positions and names included."""
        plain, tensors = self.encoded()
        return combine([fingerprint_named(tensors.items()), xxhash.xxh3_64_intdigest(plain)])

    def parts(self) -> list[tuple[str, int]]:
        """Fingerprint of each tensor and of each value that is none, by its place, to name the first that differs."""
        plain, tensors = self.encoded()
        rows = [(name, xxhash.xxh3_64_intdigest(value)) for name, value in _leaves(msgspec.msgpack.decode(plain), "")]
        return [*rows, *((name, fingerprint(tensor)) for name, tensor in tensors.items())]

    # --- writing -------------------------------------------------------------------------------------------------
    def load(self, plain: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `encoded` gave."""
        self.take_over(_decode(msgspec.msgpack.decode(plain), tensors))

    def take_over(self, tree: Mapping[str, Any]) -> None:
        """Become what a tree of `tree` says, wherever its tensors lie. Parameters and buffers are written in place, and
        what optimizers keep goes to where they keep it. Of the whole of something that is sharded here, what lies here
        is taken."""
        mine = self.tensors()
        with torch.no_grad():
            for name, value in tree["model"].items():
                if name in self.elsewhere:
                    continue
                local(mine[name]).copy_(part_of(value, mine[name]))
        for optimizer, saved in zip(self.optimizers, tree["optimizers"], strict=True):
            optimizer.state.clear()
            for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
                group.update(values)  # before the state: it says where a step count lies
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            for name, values in saved["state"].items():
                if name in self.elsewhere:
                    continue
                group = groups.get(id(mine[name]), {})
                optimizer.state[mine[name]] = {k: _placed(k, v, mine[name], group) for k, v in values.items()}
        for scheduler, values in zip(self.schedulers, tree["schedulers"], strict=True):
            scheduler.load_state_dict(values)
        for key, values in tree["extra"].items():
            if key in self.extra or not key.startswith("outlast."):  # of guards or audits that this run is without
                self.put(key, values)

    def put(self, key: str, values: Any) -> None:
        """Give a registered part what it had: of what is sharded here, shards."""
        part = self.extra[key]
        part.load_state_dict(_spread_as(values, part.state_dict()))

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers that a tree names, by its names."""
        named = self.named() | dict(self.model.named_buffers())
        return named | dict(zip(self.names, self.params, strict=True))


def _placed(key: str, value: Any, param: Tensor, group: Mapping[str, Any]) -> Any:
    """On the device where torch's optimizers keep it: with the parameter, but a step count on the host; and spread as
    the parameter is, if it has its shape."""
    if isinstance(value, Tensor) and is_shard(param) and value.ndim:
        part = part_of(value, param)
        if part.shape == local(param).shape:
            return like((part if part is value else part.clone()).to(param.device), param)
    if not isinstance(value, Tensor) or value.device == param.device:
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(param.device)


def _spread_as(values: Any, now: Any) -> Any:
    """`values` with each tensor spread as the one at its place in `now` is, if that is spread and of its shape."""
    if isinstance(values, Mapping) and isinstance(now, Mapping):
        return {key: _spread_as(value, now.get(key)) for key, value in values.items()}
    if isinstance(values, list | tuple) and isinstance(now, list | tuple) and len(values) == len(now):
        return type(values)([_spread_as(value, other) for value, other in zip(values, now, strict=True)])
    if isinstance(values, Tensor) and isinstance(now, Tensor) and is_shard(now):
        part = part_of(values, now)
        if part.shape == local(now).shape:
            return like(part if part is values else part.clone(), now)
    return values


def _each(values: Any, do: Callable[[Tensor], Tensor]) -> Any:
    """`values` with something done to each tensor that is spread."""
    if isinstance(values, Mapping):
        return {key: _each(value, do) for key, value in values.items()}
    if isinstance(values, list | tuple):
        made = [_each(value, do) for value in values]
        return tuple(made) if isinstance(values, tuple) else made  # of one with names, too
    return do(values) if isinstance(values, Tensor) and is_shard(values) else values


def _held(name: str, key: str, value: Any, param: Tensor) -> Any:
    """A value of an optimizer's state. ConfigError if it is spread in a way that cannot be put back."""
    if not (isinstance(value, Tensor) and is_shard(value)):
        return value
    if local(value).shape != local(param).shape:
        raise ConfigError(
            f"the optimizer keeps {key} of {name} spread over the ranks in another shape than the parameter",
            remedy="an optimizer that keeps tensors of the parameter's shape, such as AdamW or SGD",
        )
    return value.detach()


def encoded_tree(tree: Any) -> tuple[bytes, dict[str, Tensor]]:
    """(plain data with tensors replaced by their names, the live tensors by name)."""
    tensors: dict[str, Tensor] = {}
    plain = _encode(tree, "", tensors)
    return msgspec.msgpack.encode(plain), tensors


def decoded_tree(plain: bytes, data: Tensor) -> Any:
    """Inverse, with the tensors' bytes end to end in `data`. Nothing of `data` is kept."""
    tensors, at = empty_like_encoded(plain), 0
    for tensor in tensors.values():
        size = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).copy_(data[at : at + size])
        at += size
    return _decode(msgspec.msgpack.decode(plain), tensors)


def digest_of(state: State, held: Callable[[Tensor], Tensor] = whole) -> str:
    """SHA-256 over parameters by name, also those that only an optimizer holds, then optimizer tensors by (parameter,
    key): name, dtype, shape, bytes. With shards, or stages of a pipeline, every rank must ask for it, unless `held` is
    `local`."""
    sha = hashlib.sha256()
    rows: Iterable[tuple[Key, Tensor]] = sorted(_rows_of(state), key=lambda row: row[0])
    if state.stages is not None and held is whole:
        rows = state.stages.all_of(list(rows))
    for (_, name, key), tensor in rows:
        tensor = held(tensor)
        label = f"{name}.{key}" if key else name
        sha.update(f"{label}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _rows_of(state: State) -> Iterator[tuple[Key, Tensor]]:
    """What this process has of what a fingerprint is taken of."""
    named = state.named()
    loose = {n: p for p, n in zip(state.params, state.names, strict=True) if n not in named}  # of the optimizers alone
    for name, param in (named | loose).items():
        yield (0, name, ""), param
    for number, optimizer in enumerate(state.optimizers, 1):
        for param, values in optimizer.state.items():
            if isinstance(param, Tensor):
                yield from (((number, state.name_of(param), k), v) for k, v in values.items() if isinstance(v, Tensor))


def _encode(value: Any, path: str, tensors: dict[str, Tensor], *, as_parts: bool = False) -> Any:
    def inner(item: Any, at: Any) -> Any:
        return _encode(item, f"{path}/{at}", tensors, as_parts=as_parts)

    if isinstance(value, Tensor):
        value = value if as_parts else local(value)
        tensors[path] = value.detach()
        return ["T", path, str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, Mapping):
        return ["D", [[key, inner(item, key)] for key, item in value.items()]]
    if isinstance(value, tuple):
        return ["U", [inner(item, i) for i, item in enumerate(value)]]
    if isinstance(value, list):
        return ["L", [inner(item, i) for i, item in enumerate(value)]]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ["S", value]
    raise ConfigError(
        f"state at {path or '/'} is a {type(value).__name__}, which cannot be stored without pickle",
        remedy="keep it as tensors, numbers, strings, lists and dicts",
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, bytes]]:
    """What an encoded tree holds besides tensors, by place."""
    kind, body = value[0], value[1]
    if kind == "D":
        for key, item in body:
            yield from _leaves(item, f"{path}/{key}")
    elif kind in "UL":
        for i, item in enumerate(body):
            yield from _leaves(item, f"{path}/{i}")
    else:
        yield path, msgspec.msgpack.encode(value)


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind, body = value[0], value[1]
    if kind == "T":
        return tensors[body]
    if kind == "D":
        return {key: _decode(item, tensors) for key, item in body}
    if kind == "U":
        return tuple(_decode(item, tensors) for item in body)
    if kind == "L":
        return [_decode(item, tensors) for item in body]
    return body


def empty_like_encoded(plain: bytes) -> dict[str, Tensor]:
    """Tensors of the dtypes and shapes that an encoded state names, uninitialised: where a joiner receives into."""
    found: dict[str, Tensor] = {}

    def walk(value: Any) -> None:
        if value[0] == "T":
            found[value[1]] = torch.empty(value[3], dtype=getattr(torch, value[2]))
        elif value[0] == "D":
            for _, item in value[1]:
                walk(item)
        elif value[0] in "UL":
            for item in value[1]:
                walk(item)

    walk(msgspec.msgpack.decode(plain))
    return found
