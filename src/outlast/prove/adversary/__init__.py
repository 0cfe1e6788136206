"""core/protocol alone under a seeded adversarial network in virtual time. Never torch."""
