"""Thin adapters to other frameworks, each an extra."""
