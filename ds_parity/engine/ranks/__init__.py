"""What talks to other ranks: sums and gathers on the host, over torch.distributed alone."""
