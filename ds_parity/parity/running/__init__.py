"""Starting ranks, and having them run a scenario."""
