"""Pure decisions: no torch, no I/O, no clock, no randomness of its own. Read `protocol/` first."""
