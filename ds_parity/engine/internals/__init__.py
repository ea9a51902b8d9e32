"""What DeepSpeed keeps to itself, and nothing else: the only room of the package that reads or writes it."""
