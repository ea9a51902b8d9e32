"""Controls: when the scheduler moves."""
