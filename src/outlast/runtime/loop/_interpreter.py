"""The options that this interpreter was started with, as the variables that stand for them.

Replicas are started by others, with no options: what they inherit is the environment. No torch.
"""

from __future__ import annotations

import sys

__all__ = ["interpreter_options"]

_FLAGS = {
    "optimize": "PYTHONOPTIMIZE", "dont_write_bytecode": "PYTHONDONTWRITEBYTECODE", "verbose": "PYTHONVERBOSE",
    "no_user_site": "PYTHONNOUSERSITE", "safe_path": "PYTHONSAFEPATH", "dev_mode": "PYTHONDEVMODE",
    "debug": "PYTHONDEBUG",
}  # fmt: skip
_X = {
    "cpu_count": "PYTHON_CPU_COUNT", "faulthandler": "PYTHONFAULTHANDLER", "gil": "PYTHON_GIL",
    "importtime": "PYTHONPROFILEIMPORTTIME", "int_max_str_digits": "PYTHONINTMAXSTRDIGITS",
    "no_debug_ranges": "PYTHONNODEBUGRANGES", "perf": "PYTHONPERFSUPPORT", "pycache_prefix": "PYTHONPYCACHEPREFIX",
    "tracemalloc": "PYTHONTRACEMALLOC", "utf8": "PYTHONUTF8", "warn_default_encoding": "PYTHONWARNDEFAULTENCODING",
}  # fmt: skip
_WITHOUT = {"bytes_warning": "-b", "isolated": "-I", "ignore_environment": "-E", "inspect": "-i", "no_site": "-S",
            "quiet": "-q"}  # fmt: skip


def interpreter_options() -> tuple[dict[str, str], list[str]]:
    """Name -> value of the variables that have the same effect; and the options for which there is none."""
    found = {name: str(int(getattr(sys.flags, flag))) for flag, name in _FLAGS.items() if getattr(sys.flags, flag)}
    lost = [option for flag, option in _WITHOUT.items() if getattr(sys.flags, flag)]
    for key, value in sys._xoptions.items():
        if key in _X:
            found[_X[key]] = "1" if value is True else str(value)
        elif key != "dev":
            lost.append(f"-X {key}")
    told = [option for option in sys.warnoptions if "," not in option]  # the variable is cut at each
    lost += [f"-W {option!r}" for option in sys.warnoptions if option not in told]
    if told:
        found["PYTHONWARNINGS"] = ",".join(told)
    if getattr(sys.__stdout__, "write_through", False):
        found["PYTHONUNBUFFERED"] = "1"
    return found, lost
