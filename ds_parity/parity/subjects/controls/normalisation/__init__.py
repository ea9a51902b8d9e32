"""Controls: what a loss is divided by."""
