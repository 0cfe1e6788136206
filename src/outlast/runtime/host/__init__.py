"""The processes of one host: launcher, agent, the children that they start, watch and kill. Floor 3.

Must never decide membership (what a suspect's evidence means is `core/policy`'s) and never import torch, but for
`_preloaded.py`, which loads it for the ranks that it is forked into. Read `launcher.py`, then `agent.py`; what a rank
is told by its agent is `environment.py`.
"""
