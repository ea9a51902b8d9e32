"""A configuration or a set of faults, run by several engines and judged."""
