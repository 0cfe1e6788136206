"""The run's record: written by the coordinator, read by everyone else. SQLite, one local writer. No torch."""
