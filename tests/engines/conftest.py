"""Fleets as in `tests/runtime`."""

from tests.runtime.conftest import fleet as fleet
