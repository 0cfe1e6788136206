"""Numbers that the kernel keeps in files: memory errors, temperatures, throttling, network cards, disks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outlast.health.sources._readings import Reading

__all__ = ["Counters", "default_counters"]


class Counters:
    """One number a file, by pattern under a folder. `device_at`: which part of the path names the device, counted from
    the end; `scale`: of the number. No file at all is one missing reading, unless hosts without are usual
    (`optional`)."""

    def __init__(
        self, name: str, root: Path, patterns: Sequence[tuple[str, str]], *, device_at: int = 2, scale: float = 1.0,
        leave_out: Sequence[str] = (), optional: bool = False,
    ) -> None:  # fmt: skip
        self.name, self._root, self._patterns, self._optional = name, root, patterns, optional
        self._device_at, self._scale, self._leave_out = device_at, scale, leave_out

    def read(self, now_s: float) -> list[Reading]:
        """A file that cannot be read, or holds no number, is a missing reading of its device."""
        found = []
        for pattern, name in self._patterns:
            for path in sorted(self._root.glob(pattern)):
                device = path.parts[-self._device_at]
                if device not in self._leave_out:
                    found.append(self._one(path, device, name, now_s))
        if not found and not self._optional:
            text = f"nothing under {self._root}"
            return [Reading(at_s=now_s, source=self.name, device="", name="missing", text=text)]
        return found

    def _one(self, path: Path, device: str, name: str, now_s: float) -> Reading:
        try:
            word = path.read_text().split()[0]
            value = (int(word, 16) if word.startswith("0x") else float(word)) * self._scale
        except (OSError, ValueError, IndexError) as error:
            text = f"{path.name}: {error}"[:200]
            return Reading(at_s=now_s, source=self.name, device=device, name="missing", text=text)
        return Reading(at_s=now_s, source=self.name, device=device, name=name, value=value)


def default_counters(root: Path = Path("/sys")) -> list[Counters]:
    """Memory controllers, temperatures, throttling, network cards, InfiniBand ports, file systems, disk arrays."""
    return [
        Counters("edac", root / "devices/system/edac/mc", [("mc*/ce_count", "edac.ce"), ("mc*/ue_count", "edac.ue")]),
        Counters("thermal", root / "class/thermal", [("thermal_zone*/temp", "thermal.c")], scale=1e-3),
        Counters(
            "throttle", root / "devices/system/cpu",
            [("cpu*/thermal_throttle/package_throttle_count", "throttle.count")], device_at=3,
        ),
        Counters(
            "net", root / "class/net",
            [("*/statistics/rx_errors", "net.errors"), ("*/statistics/tx_errors", "net.errors.tx"),
             ("*/statistics/rx_dropped", "net.dropped"), ("*/statistics/rx_bytes", "net.rx.bytes"),
             ("*/statistics/tx_bytes", "net.tx.bytes")],
            device_at=3, leave_out=("lo",),
        ),
        Counters(
            "link", root / "class/net", [("*/carrier_changes", "net.carrier_changes")], leave_out=("lo",),
        ),
        Counters(
            "infiniband", root / "class/infiniband",
            [(f"*/ports/*/counters/{name}", f"ib.{name}")
             for name in ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")],
            device_at=5, optional=True,
        ),
        Counters("ext4", root / "fs/ext4", [("*/errors_count", "fs.errors")], optional=True),
        Counters("disk", root / "block", [("*/device/ioerr_cnt", "disk.errors")], device_at=3, optional=True),
        Counters("md", root / "block", [("md*/md/degraded", "md.degraded")], device_at=3, optional=True),
    ]  # fmt: skip
