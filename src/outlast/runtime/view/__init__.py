"""What a feature of a member is given of it: the view that it is in, and rounds with its members. Floor 3.

Must never know a feature, nor a tensor. Read `port.py` (who am I, tell, ask everyone), then `rounds.py` (what is said
beside the gradients, each on a channel of its own) and `courses.py` (the protocol's courses over them).
"""
