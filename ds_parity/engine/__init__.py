"""The wrapper, thin: DeepSpeed, a window, an exchange of counts."""
