"""Faults of what is scored: padding, masks, truncation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_parity.planning.rollout import MicroBatch
from tests.hard.blind_faults.base import EOS, SPACE, OwnBatches, OwnLoss, remasked


class MaskOneLate(OwnBatches):
    name = "mask-one-token-late"
    truth = "The loss mask is shifted one token to the right: the first token of each completion has no loss."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        return remasked(batch, pad(batch.inputs["loss_mask"][:, :-1], (1, 0)))


class MaskOneEarly(OwnLoss):
    name = "mask-one-token-early"
    truth = "The loss mask is shifted one token to the left: it scores the prompt's last token and not the last one."
    kind = "loss"

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        return pad(mask[:, 1:], (0, 1))


class EosMasked(OwnBatches):
    name = "eos-masked"
    truth = "The end-of-sequence token has no loss, because it is taken for padding."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        scored = batch.inputs["input_ids"][:, 1:] != EOS
        return remasked(batch, batch.inputs["loss_mask"] * scored)


class PromptScored(OwnBatches):
    name = "prompt-scored"
    truth = "The prompt's tokens carry the loss too."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        return remasked(batch, torch.ones_like(batch.inputs["loss_mask"]))


class PaddingInTheMean(OwnLoss):
    name = "padding-in-the-mean"
    truth = "The micro-batch's loss is divided by all positions, prompt and padding included, not by its loss tokens."
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return (losses * mask).mean()


class PaddingScored(OwnBatches):
    name = "padding-scored"
    truth = "Rows are padded to a fixed length, and the padding behind the completions carries the loss."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        ids = pad(batch.inputs["input_ids"], (0, 24), value=0)
        mask = pad(batch.inputs["loss_mask"], (0, 24), value=1.0)
        return remasked(replace(batch, inputs={**batch.inputs, "input_ids": ids}), mask)


class TargetsNotShifted(OwnLoss):
    name = "targets-not-shifted"
    truth = "The logits are compared with the token that was just read, not with the next one."
    kind = "loss"

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        before = torch.roll(targets, 1, dims=1)
        return super().logps(logits, before)


class LeftPaddingAttended(OwnLoss):
    name = "left-padding-attended"
    truth = "Rows are padded on the left, and the model attends to the padding."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        return super().logits(pad(input_ids, (16, 0), value=0))[:, 16:]


class LastTokenUnscored(OwnBatches):
    name = "last-token-unscored"
    truth = "The last token of every row has no loss."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        mask = batch.inputs["loss_mask"].clone()
        mask[:, -1] = 0
        return remasked(batch, mask)


class OverlongFiltered(OwnLoss):
    name = "truncated-rollouts-unscored"
    truth = (
        "Truncated rollouts (without an end-of-sequence token) get no loss, yet their tokens are in the denominator."
    )
    kind = "loss"

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return super().mean(losses * self.ended, mask)

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        self.ended = (input_ids == EOS).any(1, keepdim=True).float()
        return mask


class FirstMaskForAll(OwnLoss):
    name = "first-rows-mask-for-all"
    truth = "The mask of a micro-batch's first row is used for all of its rows."
    kind = "loss"

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        return mask[:1].expand_as(mask)


class OnlyTheAnswer(OwnBatches):
    name = "only-the-last-tokens-scored"
    truth = "Only the last 32 tokens of each row carry the loss."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        mask = batch.inputs["loss_mask"].clone()
        mask[:, :-32] = 0
        return remasked(batch, mask)


class RealTokenIgnored(OwnLoss):
    name = "a-real-token-ignored"
    truth = "The loss ignores a real token, the space, because its id is given as the ignored index."
    kind = "loss"

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        return mask * (input_ids[:, 1:] != SPACE)


class PackedRowsSeeEachOther(OwnLoss):
    name = "packed-rows-see-each-other"
    truth = "The rows of a micro-batch are packed into one sequence, and later rows attend to earlier ones."
    kind = "loss"

    def logits(self, input_ids: Tensor) -> Tensor:
        rows, length = input_ids.shape
        return super().logits(input_ids.reshape(1, -1)).reshape(rows, length, -1)
