"""What is run: the engine under test, the references, and engines with one fault each."""
