"""Metrics, terminal view, web page: from journal and core only. Never torch."""
