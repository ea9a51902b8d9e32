"""The matrix: every DeepSpeed configuration that people run, each held against its references, in one launch of ranks."""
