"""The mathematics of failure: distributions, structures, availability, intervals, placement survival, inference."""
