"""The matrix: every DeepSpeed configuration that people run, checked against its references, in one launch of ranks."""
