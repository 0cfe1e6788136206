"""The coordinator's process: sockets, timers and the durable record around `core/protocol.Coordinator`. Floor 3.

Must never decide membership, be on a step's path, or import torch. Read `server.py`, then `_saves.py` (its part in
checkpoints) and `_authority.py` (who may say what).
"""
