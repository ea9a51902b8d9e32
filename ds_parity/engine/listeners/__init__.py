"""What is called with every finished step: the trace's writer and DeepSpeed's monitors."""
