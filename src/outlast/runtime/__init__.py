"""Processes, sockets, process groups: launcher, supervision, coordinator, agent, exchange, training session."""
