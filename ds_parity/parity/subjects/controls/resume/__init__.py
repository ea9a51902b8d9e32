"""Faults of a run that was stopped and goes on: windows, schedule, optimizer, data."""
