"""The tensors of one replica: samples in, partial sums, one outcome a step, applied to the state. Floor 5.

Must never know views or open a connection: who calls decides when. Read `engine.py`, then `_partial_sums.py` and
`state.py`.
"""
