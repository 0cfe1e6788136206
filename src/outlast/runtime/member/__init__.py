"""One member of a run: carries out what `core/protocol.Member` decides, over real connections and tensors. Floor 7.

Must never decide membership. Read `step.py` (a step from its first microbatch to the commit), `driver.py` (what is
next), then `link.py` (its connection to the coordinator).
"""
