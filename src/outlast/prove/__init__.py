"""Inject every fault and show, to the bit, that nothing was lost."""
