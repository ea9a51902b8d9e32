"""Controls: which passes make a step."""
