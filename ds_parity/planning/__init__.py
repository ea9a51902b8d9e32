"""Rollouts and micro-batches. Light: no torch."""
