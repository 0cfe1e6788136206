"""The coordinator's side of the protocol: who is in which view, and what is done about who is not.

Must never look at a clock or know whether a message arrives: actions go out, events come in. Read `coordinator.py`
first (which rule an event is for), then `state.py` (what rules work on), `change.py` (a view is over) and `roster.py`
(who there is); each other module is one reason to act.
"""
