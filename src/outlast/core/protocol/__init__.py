"""Membership, steps and recovery as (state, event) -> (state, actions).

Read `_types.py`, `_coordinator.py`, `_member.py`, in this order.
"""
