"""The user's loop: `join`, `protect`, `steps`, how a script ends, and the plain loop of `OUTLAST=off`. Floor 8.

Must never own a part of the step: it asks the member's driver what is next. Read `session.py`; `_assembly.py` is where
all rooms come together.
"""
