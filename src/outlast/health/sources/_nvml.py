"""NVIDIA's management library, through `nvidia-ml-py` where it is installed: errors, temperatures, throttling."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from outlast.health.sources._kernel import FATAL_XIDS, SOFTWARE_XIDS
from outlast.health.sources._readings import Reading

__all__ = ["Nvml"]

_MOST_EVENTS = 64  # of one look


class Nvml:
    """Readings of each device by its UUID. `library`: what `import pynvml` gives; tests give a twin of it."""

    name = "nvml"

    def __init__(self, library: Any = None) -> None:
        self._library, self._begun = library, False
        self._set: Any = None

    def read(self, now_s: float) -> list[Reading]:
        """Raises what the library raises where there is none, or no driver: a missing reading. A single value that a
        device does not have is missing by itself."""
        if self._library is None:
            self._library = importlib.import_module("pynvml")
        n = self._library
        if not self._begun:
            n.nvmlInit()
            self._begun = True
        found = self._events(n, now_s)
        for index in range(n.nvmlDeviceGetCount()):
            found += self._device(n, index, now_s)
        return found

    def _events(self, n: Any, now_s: float) -> list[Reading]:
        """XIDs since the last look, where the kernel's log may not be read (in most containers). A library or a device
        without events has none."""
        if self._set is None:
            self._set = ()
            with contextlib.suppress(n.NVMLError, AttributeError):
                self._set = n.nvmlEventSetCreate()
            for index in range(n.nvmlDeviceGetCount() if self._set else 0):
                with contextlib.suppress(n.NVMLError, AttributeError):  # of one that is lost others know no less
                    handle = n.nvmlDeviceGetHandleByIndex(index)
                    n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, self._set)
        found: list[Reading] = []
        for _ in range(_MOST_EVENTS if self._set else 0):
            try:
                event = n.nvmlEventSetWait(self._set, 0)
                device = n.nvmlDeviceGetUUID(event.device)
                code = int(event.eventData)
            except (n.NVMLError, AttributeError, TypeError, ValueError):  # a timeout: there is no more
                break
            name = "xid.fatal" if code in FATAL_XIDS else "xid" if code in SOFTWARE_XIDS else "xid.warning"
            shown = device.decode() if isinstance(device, bytes) else str(device)
            text = f"Xid {code}"
            found.append(Reading(at_s=now_s, source=self.name, device=shown, name=name, value=float(code), text=text))
        return found

    def _device(self, n: Any, index: int, now_s: float) -> list[Reading]:
        try:
            handle = n.nvmlDeviceGetHandleByIndex(index)
            uuid = n.nvmlDeviceGetUUID(handle)
        except n.NVMLError as error:  # fallen off the bus: the strongest signal there is
            text = f"device {index}: {error}"
            return [Reading(at_s=now_s, source=self.name, device=str(index), name="missing", text=text)]
        device = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
        rows = []
        for name, ask in self._questions(n, handle):
            try:
                rows.append(Reading(at_s=now_s, source=self.name, device=device, name=name, value=float(ask())))
            except (n.NVMLError, TypeError, ValueError, AttributeError) as error:
                if "not supported" not in str(error).lower():
                    text = f"{name}: {error}"[:200]
                    rows.append(Reading(at_s=now_s, source=self.name, device=device, name="missing", text=text))
        return rows

    def _questions(self, n: Any, handle: Any) -> list[tuple[str, Callable[[], Any]]]:
        def remapped(place: int) -> Callable[[], Any]:
            return lambda: n.nvmlDeviceGetRemappedRows(handle)[place]

        def errors(kind: Any) -> Callable[[], Any]:
            return lambda: n.nvmlDeviceGetTotalEccErrors(handle, kind, n.NVML_AGGREGATE_ECC)

        return [
            ("nvml.temperature.c", lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)),
            ("nvml.power.w", lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000),
            ("nvml.ecc.corrected", errors(getattr(n, "NVML_MEMORY_ERROR_TYPE_CORRECTED", 0))),
            ("nvml.ecc.uncorrected", errors(getattr(n, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1))),
            ("nvml.remapped.correctable", remapped(0)),
            ("nvml.remapped.uncorrectable", remapped(1)),
            ("nvml.remap.failed", remapped(3)),
            ("nvml.throttle.reasons", lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            ("nvml.pcie.replays", lambda: n.nvmlDeviceGetPcieReplayCounter(handle)),
            ("nvml.nvlink.errors", lambda: _link_errors(n, handle)),
        ]


def _link_errors(n: Any, handle: Any) -> int:
    """Replays, recoveries and checksum errors of all NVLinks of a device. Raises for a device that has none."""
    total, links = 0, 0
    for link in range(getattr(n, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            total += sum(n.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter) for counter in range(4))
            links += 1
        except n.NVMLError:
            continue
    if not links:
        raise ValueError("not supported")
    return total
