"""Checks that need seconds, torch or a network: the object store's conditional put, devices, this model's determinism.

Role: what only trying can tell. A store is tried under a prefix of its own, which is removed; a model is run a few
steps forward and backward on each device that torch has, from one seed each time.
"""

from __future__ import annotations

import functools
import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outlast.doctor._finding import Finding
from outlast.errors import ConfigError, OutlastError

__all__ = ["burn_in", "look_at_devices", "look_at_store", "model_of", "repeats"]

_ROUNDS = 3


def look_at_store(url: str) -> Iterator[Finding]:
    """Whether an object store takes, refuses a second time, gives back and removes what is put there."""
    from outlast.checkpoint import ObjectStore

    prefix = f"{url.rstrip('/')}/outlast-doctor-{secrets.token_hex(4)}"
    try:
        store = ObjectStore(prefix, timeout_s=10.0, max_retries=1, retry_timeout_s=20.0)
        first, second = store.publish(1, b"one"), store.publish(1, b"two")
        kept = store.read_head(1)
        store.withdraw([1])
    except (OSError, OutlastError) as error:
        yield Finding(
            check="object store",
            level="error",
            what=f"{url}: {str(error).splitlines()[0]}",
            remedy="check credentials, region and endpoint in the environment, and the bucket's rights",
        )
        return
    if not first or second or kept != b"one":
        yield Finding(
            check="object store",
            level="error",
            what=f"{url} takes a conditional put twice: two coordinators could publish one generation",
            remedy="a store that honours If-None-Match: *",
        )
    else:
        yield Finding(check="object store", level="ok", what=f"{url} honours conditional puts")


def look_at_devices() -> Iterator[Finding]:
    """Each device's known answers, once."""
    import torch

    from outlast.health import ask_device

    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    for name in names:
        test = ask_device(torch.device(name))
        if test.wrong:
            yield Finding(
                check="device",
                level="error",
                what=f"{name} computed {len(test.wrong)} wrong answers",
                remedy="take it out of service; outlast health test names the operations",
            )
        else:
            yield Finding(check="device", level="ok", what=f"{name} gave the right answers")


def burn_in(minutes: float, told: Callable[[str, float], None] | None = None) -> Iterator[Finding]:
    """Stress each device with known answers, for so many minutes in all, and say what that can have found.

    `told(device, seconds)`: after each round. Rates are of faults an operation and an answer; what a device's youth
    adds to them is the bathtub's (`outlast plan burn-in` finds the length that pays)."""
    import torch

    from outlast.core.reliability import bathtub
    from outlast.health import ask_device

    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    days = minutes / 1440
    life = bathtub(infant_shape=0.5, infant_scale=40_000, rate=1 / 2000, wear_shape=3.0, wear_scale=2500)
    young = (1 - float(life.sf(days))) / days
    later = (float(life.sf(days)) - float(life.sf(days + 1.0))) / float(life.sf(days))
    for name in names:
        test = ask_device(
            torch.device(name),
            seconds=60 * minutes / len(names),
            told=functools.partial(_say, told, name) if told is not None else None,
        )
        figures: dict[str, float | int | str] = {
            "answers": test.num_asked, "wrong": test.num_wrong, "operations": test.operations, "seconds": test.seconds,
            "least_rate_an_answer": 3 / test.num_asked, "least_rate_an_operation": 3 / test.operations,
            "deaths_a_day_now": young, "deaths_a_day_after": later,
        }  # fmt: skip
        if test.num_wrong:
            worst = test.wrong[0]
            yield Finding(
                check="burn-in",
                level="error",
                figures=figures,
                what=f"{name} gave {test.num_wrong} wrong answers of {test.num_asked:,}: {worst.case} {worst.kind}",
                remedy="take it out of service; outlast health test names the operations",
            )
        else:
            yield Finding(
                check="burn-in",
                level="ok",
                figures=figures,
                what=f"{name} gave {test.num_asked:,} right answers in {test.seconds / 60:.1f} min: with 95 % "
                f"confidence fewer than {3 / test.num_asked:.1e} of its answers, and {3 / test.operations:.1e} of its "
                f"operations, are wrong; of new devices that live through it {later:.2%} die on the next day (by a "
                f"typical bathtub; {young * days:.2%} die during it)",
            )


def _say(told: Callable[[str, float], None], name: str, rounds: int, seconds: float) -> None:
    told(name, seconds)


def repeats(make: Callable[[], Any], place: str) -> Iterator[Finding]:
    """Whether a model gives the same bits each time. `make` returns (model, loss), where `loss()` is one step's loss;
    `place`: where it is from. Raises ConfigError for what is none."""
    import torch

    names = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in names:
        rounds = [_one(make, name, place) for _ in range(_ROUNDS)]
        differ = sorted({key for other in rounds[1:] for key in rounds[0] if not _same(rounds[0][key], other.get(key))})
        if differ:
            told = ", ".join(differ[:3]) + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")
            yield Finding(
                check="determinism",
                level="error",
                what=f"from one seed, {place} differs on {name} in {told}",
                remedy="outlast needs equal bits: seed what draws, set CUBLAS_WORKSPACE_CONFIG=:4096:8, and see "
                "torch.use_deterministic_algorithms(True), which names the operation",
            )
        else:
            yield Finding(check="determinism", level="ok", what=f"{place} on {name}: {_ROUNDS} times the same bits")


def _same(a: Any, b: Any) -> bool:
    import torch

    return b is not None and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _one(make: Callable[[], Any], device: str, place: str) -> dict[str, Any]:
    """The loss and all gradients of one step, by name."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        made = make()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
            raise ConfigError(f"{place} did not return (model, loss)", remedy="return model, lambda: loss_of_a_batch")
        model, loss_of = made
        loss = loss_of()
        loss.backward()
    tensors = {"the loss": loss, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    return {name: tensor.detach().contiguous().reshape(-1) for name, tensor in tensors.items()}


def model_of(place: str) -> Callable[[], Any]:
    """The function at `FILE.py:FUNCTION` or `MODULE:FUNCTION`. Raises ConfigError where there is none."""
    name, _, function = place.rpartition(":")
    if not name or not function.isidentifier():
        raise ConfigError(f"--model {place!r} names no function", remedy="FILE.py:FUNCTION, or MODULE:FUNCTION")
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location("outlast_doctor_model", name)
            if spec is None or spec.loader is None or not Path(name).is_file():
                raise ConfigError(f"there is no {name}", remedy="give the file that has the model")
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(Path(name).resolve().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--model {place}: {error}", remedy="check the name, and PYTHONPATH") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{name} has no function {function}", remedy="define it to return (model, loss)")
    return found  # type: ignore[no-any-return]
