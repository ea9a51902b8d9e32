"""Controls: what is reported, and what a resume forgets."""
