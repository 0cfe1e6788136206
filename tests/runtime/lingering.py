"""The scenario, in processes that take long to end: each waits for the lock of the file that it is given first."""

import atexit
import fcntl
import sys

import scenario


def wait(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


if __name__ == "__main__":
    atexit.register(wait, sys.argv.pop(1))
    scenario.main()
