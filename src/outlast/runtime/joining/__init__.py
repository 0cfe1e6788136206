"""How a replica comes in: donors send a frozen snapshot and the outcomes since, a joiner replays them. Floor 6.

Must never touch an exchange: a joiner's slowness or death costs no step (protocol, 18). Read `donor.py`, then
`joiner.py`; the connections between them are `_feeds.py`.
"""
