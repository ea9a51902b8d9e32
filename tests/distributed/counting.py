"""Reads of tensors and collectives, counted while the code under test runs."""

import torch
import torch.distributed as dist


class Counting:
    """Counts reads of tensors and collectives in this process; each call goes through as it was."""

    READS = ("item", "__bool__", "__float__", "__int__")
    COLLECTIVES = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "barrier",
        "isend",
        "irecv",
    )

    def __enter__(self):
        self._kept = [(torch.Tensor, name, getattr(torch.Tensor, name)) for name in self.READS]
        self._kept += [(dist, name, getattr(dist, name)) for name in self.COLLECTIVES]
        self.counts = {name: 0 for _, name, _ in self._kept}
        for owner, name, kept in self._kept:
            setattr(owner, name, self._counted(name, kept))
        return self

    def _counted(self, name, kept):
        def counted(*args, **kwargs):
            self.counts[name] += 1
            return kept(*args, **kwargs)

        return counted

    def __exit__(self, *error):
        for owner, name, kept in self._kept:
            setattr(owner, name, kept)
