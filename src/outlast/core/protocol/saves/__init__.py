"""Checkpoints as the protocol sees them: when the parts of a save may be published as one generation.

Must never write a file or choose when to save (`core/policy`). Read `commit.py`.
"""
