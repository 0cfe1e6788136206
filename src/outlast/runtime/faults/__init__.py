"""What tests and `prove` put into real processes: flipped bits and replicas that lie. Floor 8; a normal run has none.

Must never do anything that was not ordered. Only the assembly of a replica and `prove` use it.
"""
