"""Where readings of a host's devices come from: kernel log, sysfs, NVML, network cards, the cloud's notices. No torch.

Each source reads what is there, says once what is not, and never waits: whoever samples does that in a thread of the
source's own. A value that cannot be is no value. Read first: `_readings.py`.
"""

from pathlib import Path

from outlast.health.sources._cloud import CLOUDS, CloudNotices
from outlast.health.sources._kernel import KernelLog, read_kernel_lines
from outlast.health.sources._nvml import Nvml
from outlast.health.sources._readings import Alarm, Reading, ReadingSource, Recorded, Sampler, alarms_of
from outlast.health.sources._sysfs import Counters, default_counters

__all__ = [
    "CLOUDS", "Alarm", "CloudNotices", "Counters", "KernelLog", "Nvml", "Reading", "Recorded", "Sampler",
    "ReadingSource", "alarms_of", "default_counters", "default_sources", "read_kernel_lines", "recorded_sources",
]  # fmt: skip


def recorded_sources(place: Path, agent: str) -> list[ReadingSource]:
    """The recorded twin of an agent's sources: the readings of a file, or of `AGENT.jsonl` in a folder."""
    return [Recorded(place / f"{agent}.jsonl" if place.is_dir() else place)]


def default_sources() -> list[ReadingSource]:
    """What may be found on this host; what is not there says so itself."""
    return [KernelLog(), *default_counters(), Nvml(), CloudNotices()]
