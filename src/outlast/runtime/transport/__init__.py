"""Bytes between processes: one handshake, one door, frames, a view's connections, regions of shared memory. Floor 2.

Must never decode what an unproved sender said, decide what a message means, or import torch. Read `handshake.py`,
`door.py`, `connections.py`, then `mesh.py` (between members) and `frames.py` (to the coordinator).
"""
