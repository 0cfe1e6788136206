"""The collective of a step: slices to everybody, reduced by the fixed tree or a robust rule, gathered. Floor 4.

Must never let a library add where the sum counts, nor know why a view began or ended. Read `plane.py` (shared memory,
mean), then `row_plane.py` (rules) and `c10d_plane.py` (torch.distributed).
"""
