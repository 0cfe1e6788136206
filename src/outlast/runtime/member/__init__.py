"""One member of a run: carries out what `core/protocol.Member` decides, over real connections and tensors. Floor 7.

Must never decide membership. Read `driver.py` (what is next, a step from exchange to commit), then `link.py` (its
connection to the coordinator).
"""
