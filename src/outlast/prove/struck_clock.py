"""The wall clock of one run, which jumps when it is told to: nobody else's does.

A namespace has no wall clock of its own (Linux has them for the time since the start of the machine alone). So the
processes of the run are given a small library in front of libc's, which adds to every reading of the wall clock what a
file says; a deadline on that clock, which libc hands to the kernel, is put back by as much, as the kernel's own clock
would have jumped too. It is compiled when it is needed, so it needs a C compiler.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from outlast.errors import EnvironmentFault

__all__ = ["StruckClock", "unavailable"]

_FARTHEST_S = 86400.0
_ENVIRONMENT = "OUTLAST_PROVE_CLOCK"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("OUTLAST_PROVE_CLOCK");
  real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd >= 0) {
    void *at = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) shift = at;
    close(fd);
  }
}

static struct timespec moved(struct timespec at, int sign) {
  int64_t ns = shift ? sign * *shift : 0;
  int64_t all = at.tv_nsec + ns % 1000000000;
  at.tv_sec += ns / 1000000000;
  if (all < 0) { all += 1000000000; at.tv_sec--; }
  if (all >= 1000000000) { all -= 1000000000; at.tv_sec++; }
  at.tv_nsec = all;
  return at;
}

int clock_gettime(clockid_t which, struct timespec *to) {
  if (!real_clock) real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real_clock(which, to);
  if (!code && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) *to = moved(*to, 1);
  return code;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  to->tv_sec = now.tv_sec;
  to->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *to) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (to) *to = now.tv_sec;
  return now.tv_sec;
}

/* A deadline later than the year 2001 is one of the wall clock: no machine runs for so long. */
static struct timespec deadline(const struct timespec *at) {
  return at->tv_sec > 1000000000 ? moved(*at, -1) : *at;
}
/* Condition variables had another layout once: without its version glibc before 2.36 gives the old function. */
static void *next(const char *name) {
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
  return found ? found : dlsym(RTLD_NEXT, name);
}
#define PUT_BACK(name, args, call) \
  int name args { \
    static int (*real) args; \
    if (!real) real = (int (*) args)next(#name); \
    struct timespec at = deadline(until); \
    return real call; \
  }
PUT_BACK(sem_timedwait, (sem_t *restrict s, const struct timespec *restrict until), (s, &at))
PUT_BACK(pthread_mutex_timedlock, (pthread_mutex_t *restrict m, const struct timespec *restrict until), (m, &at))
PUT_BACK(pthread_cond_timedwait,
         (pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict until), (c, m, &at))
"""


def unavailable() -> str:
    """Why no clock can be made to jump here; "" if one can."""
    return "" if shutil.which("cc") else "no C compiler (cc) to build the library that moves it"


class StruckClock:
    """Kept in a new `folder`. `environ`: what a process is given to live by this clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True)
        source, library, self._shift = (self._folder / name for name in ("clock.c", "clock.so", "shift"))
        source.write_text(_SOURCE)
        self._shift.write_bytes(bytes(8))
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl", "-lpthread"]
        made = subprocess.run(command, capture_output=True)
        if made.returncode:
            raise EnvironmentFault(
                f"the library that moves the clock could not be built: {made.stderr.decode().strip()[-300:]}",
                remedy="--faults without clock",
            )
        before = os.environ.get("LD_PRELOAD", "")
        self.environ = {"LD_PRELOAD": f"{library} {before}".strip(), _ENVIRONMENT: str(self._shift)}

    def strike(self, kind: str, pick: float) -> str:
        """Jump; `pick`: 0 for a day back from the true time, just below 1 for a day ahead of it."""
        with self._shift.open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:
            page[:] = struct.pack("@q", round((2.0 * pick - 1.0) * _FARTHEST_S * 1e9))
        return "clock"

    def mend(self, kind: str, name: str = "clock") -> bool:
        """Back to the true time, which is a jump as well."""
        return bool(self.strike(kind, 0.5))
