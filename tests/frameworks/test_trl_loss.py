"""GRPO's loss beside that of TRL's own GRPOTrainer: the same tensors, the same value and the same gradient."""

import pytest
import torch

from ds_parity.losses import GroupRelativePolicy
from tests.frameworks.small import VOCAB, model
from tests.frameworks.test_trainers import tokenizer

pytestmark = pytest.mark.hf

PROMPT, LONGEST, ROWS = 4, 6, 5
BETA = 0.04
# TRL's name of the loss: the loss weight here, and whether sums are divided by the longest completion.
KINDS = {"grpo": ("rollout", None), "bnpo": ("token", None), "dr_grpo": ("rollout", LONGEST)}


@pytest.fixture(scope="module")
def trainer_of(tmp_path_factory):
    """A GRPOTrainer on the CPU, by the options of its loss."""
    pytest.importorskip("trl", reason="takes the extra hf: make test-hf")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def made(**options):
        given = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            num_generations=ROWS,
            per_device_train_batch_size=ROWS,
            max_completion_length=LONGEST,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **options,
        )
        trainer = GRPOTrainer(
            model=model().double(),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=given,
            train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * ROWS}),
            processing_class=tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1  # as its training loop sets it
        return trainer

    return made


def tensors():
    """Completions of 1 to 6 tokens, as TRL's loss and ours take them; logps are up to a nat off the policy's."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + LONGEST), generator=generator)
    lengths = torch.tensor([6, 1, 3, 5, 2])
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    off = torch.rand(2, ROWS, LONGEST, generator=generator, dtype=torch.float64) - 0.5
    return ids, mask, advantages, off


@pytest.mark.parametrize(("beta", "corrected"), [(0.0, True), (BETA, False), (BETA, True)])
@pytest.mark.parametrize("cap", [None, 1.4])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_trl(trainer_of, kind, cap, beta, corrected):
    weight, length = KINDS[kind]
    trainer = trainer_of(loss_type=kind, epsilon=0.1, epsilon_high=0.2, delta=cap, use_bias_correction_kl=corrected)
    trainer.beta = beta  # given to its configuration, it would load a reference model by a name
    ids, mask, advantages, off = tensors()
    policy = trainer.model
    options = {"clip_low": 0.1, "clip_high": 0.2, "ratio_cap": cap, "length": length, "kl_corrected": corrected}
    loss = GroupRelativePolicy(policy, weight, **options)
    with torch.no_grad():
        logp = loss.logps(ids)[:, PROMPT - 1 :]
    old, reference = logp + 2 * off[0], logp + off[1]
    theirs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    ours = {
        "input_ids": ids,
        "loss_mask": torch.nn.functional.pad(mask.double(), (PROMPT - 1, 0)),
        "advantages": advantages,
        "sampled_logps": torch.nn.functional.pad(old, (PROMPT - 1, 0)),
        "reference_logps": torch.nn.functional.pad(reference, (PROMPT - 1, 0)) if beta else None,
    }
    value, kl, cut = loss(**ours)
    found = []
    for one in (trainer._compute_loss(policy, theirs), value if kl is None else value + beta * kl):
        policy.zero_grad()
        one.backward()
        found.append(torch.cat([one.detach()[None], *[p.grad.flatten() for p in policy.parameters()]]).double())
    print(
        f"{kind}, delta {cap}, beta {beta}, corrected {corrected}: TRL {found[0][0]:.12f}, ds_parity {found[1][0]:.12f}"
    )
    assert 0 < cut.mean() < 1
    assert (found[0] - found[1]).norm() < 1e-6 * found[0].norm()
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
