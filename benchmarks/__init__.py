"""What outlast costs and how fast it recovers, measured beside what others do. `python -m benchmarks` lists them.

Read first: `_common.py` (what every result carries), `_fleet.py` (how processes are started, watched and hurt), then
one benchmark. Bounds are asserted only with `--assert`; results are kept in `RESULTS.md` only with `--record`.
"""
