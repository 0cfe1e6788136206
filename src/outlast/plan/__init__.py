"""Fleets in virtual time: traces, simulator, planner, reports. numpy and scipy; never torch."""
