"""Controls: idle passes, padding, and rollouts that get lost."""
