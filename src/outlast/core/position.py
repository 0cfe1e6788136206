"""One function that every draw starts from: a position (seed, step, microbatch, …) to 63 bits. Integers only."""

from __future__ import annotations

__all__ = ["position_seed"]

_MASK = (1 << 64) - 1


def position_seed(*position: int) -> int:
    """63 bits from integers, by SplitMix64 (Steele et al. 2014) over each in turn."""
    state = 0x9E3779B97F4A7C15
    for value in position:
        state = (state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
