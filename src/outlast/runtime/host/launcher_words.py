"""What to say where a script asks for what other launchers set: ranks, a world size, a process group. No torch.

Replicas come and go, so there is none of these for a whole run, and a library that found one would wait for processes
which never answer. Used by the process that scripts are forked from and by the loop's own excepthook.
"""

from __future__ import annotations

import re

__all__ = ["add_hint"]

_NAMES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_GROUP = re.compile(
    rf"Default process group has not been initialized|environment variable (?:{'|'.join(_NAMES)}) expected"
)
_HINT = (
    "outlast: under `outlast run` there is no {what}: replicas come and go. Leave out init_process_group, DDP and the "
    "distributed sampler (the exchange between replicas is outlast's); run.device is this replica's device, run.name "
    "its name, run.is_writer whether it writes, and in the loop run.rank and run.size are its place and their number."
)


def add_hint(error: BaseException) -> None:
    """Add a note to an error that comes of a launcher's variable or process group that is not there."""
    if getattr(error, "__notes__", None):
        return
    if isinstance(error, KeyError) and error.args and error.args[0] in _NAMES:
        error.add_note(_HINT.format(what=error.args[0]))
    elif isinstance(error, ValueError | RuntimeError) and _GROUP.search(str(error)):
        error.add_note(_HINT.format(what="process group of torch.distributed"))
