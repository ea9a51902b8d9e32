"""What DeepSpeed itself gets wrong: a name, a sentence, and what ds_parity does; each has a script that shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFault:
    """One fault of DeepSpeed.

    Attributes:
        name: of the script in tools/deepspeed_faults, without its ending.
        what: what DeepSpeed does.
        remedy: what ds_parity does about it.
    """

    name: str
    what: str
    remedy: str

    @property
    def script(self) -> str:
        """Where the smallest program that shows it lies, from the project's root."""
        return f"tools/deepspeed_faults/{self.name}.py"


FAULTS = {
    fault.name: fault
    for fault in (
        KnownFault(
            "fp16_growing_scale",
            "a step at which the dynamic loss scale grows is unscaled by the new scale, and applied at half its size",
            "corrected: the scale is kept during the step",
        ),
        KnownFault(
            "fp16_zero0_unscaled_loss",
            "fp16 on ZeRO 0 does not scale the loss but divides by the loss scale: every gradient is too small by it",
            "corrected: the loss is scaled",
        ),
        KnownFault(
            "expert_norm_zero0",
            "experts on different ranks: clips by the mean of the ranks' norms, each of a rank's own experts",
            "corrected: clipped by the norm of all experts",
        ),
        KnownFault(
            "expert_norm_unfused",
            "experts are left out of the norm, which clips too little",
            "corrected: clipped by a norm with the experts",
        ),
        KnownFault(
            "autocast_fp16_clipping",
            "clipping acts on the gradient that is still scaled, so each step is cut to the limit / 65536",
            "corrected: unscaled before the clip",
        ),
        KnownFault(
            "reached_twice",
            "where one backward brings a parameter's gradient twice, the second replaces the first",
            "corrected: they are added up",
        ),
    )
}
