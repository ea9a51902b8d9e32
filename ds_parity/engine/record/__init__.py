"""What a step is remembered by: its loss, its metrics and its counts."""
