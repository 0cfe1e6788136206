"""The run's configuration and the origin of each value: command line > environment > file > default."""
