"""A loop written for torchrun and DDP, as one of outlast's: what to change line by line, and the mechanical part done.

Reads the script's text only: nothing is imported or run, and torch is not needed. Invariant: what is not understood is
said, by line, and the result then counts as incomplete; nothing is changed whose meaning is not known. Read
`_facts.py` (what a script says), `_loops.py` (where it trains), then `_rewrite.py`.
"""

from outlast.convert._rewrite import Conversion, Remark, convert

__all__ = ["Conversion", "Remark", "convert"]
