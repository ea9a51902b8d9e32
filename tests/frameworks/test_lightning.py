"""Lightning's Trainer under install(): its steps are those of the rollouts, its own division stands, its LR moves."""

import contextlib
import importlib.util
import os
import tempfile
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.all_weights import every_weight
from tests.distributed.cells import STAGES
from tests.frameworks.small import from_all, installed, on_two_ranks

pytestmark = [pytest.mark.hf, pytest.mark.ranks]

ROWS, EPOCHS, PASSES, RATE = 24, 2, 3, 0.1


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def halved(step):
    return 1 / (1 + step)


def lit(way, scheduled):
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.rates = net(), []
            self.automatic_optimization = way != "manual"

        def training_step(self, batch, index):
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            if self.automatic_optimization:
                return loss
            self.manual_backward(loss, rollouts=len(x))
            if index % PASSES == PASSES - 1:
                self.optimizers().step()
            return None

        def on_train_batch_end(self, *_):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
            if not scheduled:
                return optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halved)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Lit()


@contextlib.contextmanager
def without_gpu():
    """Lightning's strategy asks for CUDA, which the launched ranks may lack: what it needs of it is here, too."""
    from lightning.pytorch.accelerators.cpu import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed as strategy

    with pytest.MonkeyPatch.context() as patch:
        if get_accelerator().device_name() == "cpu":
            patch.setattr(strategy, "CUDAAccelerator", CPUAccelerator)
            patch.setattr(strategy, "_validate_device_index_selection", lambda _: None)
            device = property(lambda _: torch.device("cpu", 0))
            patch.setattr(strategy.DeepSpeedStrategy, "root_device", device)
        yield


def fit(wrapped, stage, way, *, scheduled=False, epochs=EPOCHS, saved=None, resumed=None, **section):
    """The weights, the count of steps, and the learning rate behind each micro-batch.

    `saved` is where the trainer saves its checkpoint behind it, and `resumed` one that it goes on from.
    """
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Launched(LightningEnvironment):
        def teardown(self):
            """Leave the variables of the launcher to who comes next."""

    made = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    if wrapped:
        made["ds_parity"] = section
        if way != "manual":
            made["gradient_accumulation_passes"] = 2 * PASSES
    rows = torch.utils.data.TensorDataset(*data())
    sampler = torch.utils.data.DistributedSampler(rows, 2, dist.get_rank(), shuffle=False)
    with installed(wrapped), without_gpu():
        trainer = Trainer(
            accelerator=get_accelerator().device_name().replace("cuda", "gpu"),
            devices=2,
            strategy=DeepSpeedStrategy(
                config=made, process_group_backend=get_accelerator().communication_backend_name()
            ),
            plugins=[Launched()],
            max_epochs=epochs,
            accumulate_grad_batches=1 if way == "manual" else PASSES,
            use_distributed_sampler=False,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        module = lit(way, scheduled)
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler), ckpt_path=resumed)
        if saved is not None:
            trainer.save_checkpoint(saved)
    engine = trainer.strategy.model
    weights = torch.cat([one.values.double().flatten().cpu() for one in every_weight(engine.module)])
    found = {"weights": weights.tolist(), "steps": engine.global_steps, "rates": module.rates}
    return {**found, "rollouts": engine.last_step.rollouts} if wrapped else found


def due():
    """What each step's mean over its rollouts gives, in float64."""
    model, (x, y) = net().double(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _, first in product(range(EPOCHS), range(0, ROWS, 4 * PASSES)):
        optimizer.zero_grad()
        (model(x[first : first + 4 * PASSES].double()) - y[first : first + 4 * PASSES]).square().mean().backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def fits():
    if importlib.util.find_spec("lightning") is None:
        return None
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")
    sections = {
        "automatic": {},
        "divided": {"loss_weight": "divided", "across_ranks": "mean"},
        "manual": {"boundary": "caller"},
    }
    found = {"due": due()}
    for stage in STAGES:
        found[f"{stage} bare"] = fit(False, stage, "automatic")
        for way, section in sections.items():
            found[f"{stage} {way}"] = fit(True, stage, way, **section)
    found["rates"] = [
        fit(wrapped, 2, "automatic", scheduled=True, **section)["rates"]
        for wrapped, section in ((False, {}), (True, {}), (True, {"lr_progress": "rollout"}))
    ]
    for progress in ("optimizer_step", "rollout"):
        given = {"wrapped": True, "stage": 2, "way": "automatic", "scheduled": True, "lr_progress": progress}
        path = from_all(tempfile.mkdtemp())[0] + "/saved"
        fit(epochs=EPOCHS // 2, saved=path, **given)
        found[f"resumed by {progress}"] = fit(resumed=path, **given)["rates"]
    deepspeed.utils.groups.mpu = None
    return from_all(found)


on_two_ranks.call(fits)


@pytest.fixture
def ran(framework_ranks):
    found = framework_ranks.of(fits)
    if found is None:
        pytest.skip("takes the extra lightning: make test-hf")
    return found


@pytest.mark.parametrize("stage", STAGES)
class TestStages:
    """Four windows of twelve rollouts, six micro-batches of two ranks in each."""

    @pytest.mark.parametrize("way", ["divided", "manual"])
    def test_steps_are_means_over_the_rollouts(self, ran, stage, way):
        for found in ran:
            assert found[f"{stage} {way}"]["steps"] == 4
            assert found[f"{stage} {way}"]["rollouts"] == 12
            assert found[f"{stage} {way}"]["weights"] == pytest.approx(found["due"], abs=1e-6)

    def test_a_loss_that_lightning_has_divided_is_divided_again_as_in_bare_deepspeed(self, ran, stage):
        for found in ran:
            ours, bare = found[f"{stage} automatic"], found[f"{stage} bare"]
            assert ours == {**bare, "rollouts": 12}
            assert ours["weights"] != pytest.approx(found["due"], abs=1e-3)


def test_the_learning_rate_moves_with_the_steps_and_with_the_rollouts(ran):
    for found in ran:
        bare, plain, by_rollouts = found["rates"]
        assert bare == plain == by_rollouts
        assert sorted(set(bare)) == pytest.approx([RATE / 5, RATE / 4, RATE / 3, RATE / 2, RATE])


@pytest.mark.parametrize("progress", ["optimizer_step", "rollout"])
def test_a_resumed_fit_goes_on_with_its_learning_rate(ran, progress):
    """Lightning loads the scheduler's state itself, behind the engine's checkpoint."""
    for found in ran:
        bare = found["rates"][0]
        assert found[f"resumed by {progress}"] == bare[len(bare) // 2 :]
