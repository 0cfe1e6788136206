"""One member's side of the protocol: what to do next in a step, what audits of it come to, and the plan of a roll call.

Must never compute, send or wait: the caller does what `Member.next` says and reports what came of it. Read `member.py`
first, then `roll.py`.
"""
