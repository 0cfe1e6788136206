"""What a step is looked at for, beside its sum: audits, guards, equal states, repeatable loops, bad samples. Floor 6.

Must never change what training uses, nor reach a verdict that another member could not reach from the same headers.
Read `guards.py`, then `audits.py`; each other module is one check.
"""
