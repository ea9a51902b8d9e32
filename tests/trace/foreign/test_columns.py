"""Which column is which field: by `--map`, or by a name that only one column has; never by a guess among several."""

import re
from pathlib import Path

import pytest

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace.foreign.column_kinds import ColumnKinds
from ds_parity.trace.foreign.field_names import NAMES, choose, parse_maps
from ds_parity.trace.foreign.source import Source

SOURCE = Source(Path("run.csv"), "csv", lambda: iter(()))


def chosen(columns, *maps, source=SOURCE):
    kinds = columns if isinstance(columns, ColumnKinds) else ColumnKinds(dict.fromkeys(columns))
    return choose(source, kinds, parse_maps(maps))


def refused(columns, *maps):
    with pytest.raises(TraceError, match=re.escape("run.csv")) as error:
        chosen(columns, *maps)
    return str(error.value)


@pytest.mark.parametrize("step", ["step", "global_step", "train/global_step", "iteration", "trainer/global_step"])
@pytest.mark.parametrize("loss", ["loss", "train/loss", "train_loss", "training.loss", "lm loss", "run 7 - train/loss"])
@pytest.mark.parametrize("lr", ["lr", "learning_rate", "train/learning_rate", "learning-rate", "Learning Rate"])
def test_names_that_trainers_are_known_to_use_are_taken(step, loss, lr):
    found = chosen([loss, "epoch", step, lr, "train/grad_norm", "eval/loss"])
    assert found.of == {"step": (step,), "loss": (loss,), "lr": (lr,), "grad_norm": ("train/grad_norm",)}


def test_a_name_that_was_translated_is_noted_and_one_that_was_not_is_not():
    assert chosen(["step", "loss"]).notes == ()
    assert chosen(["step", "train/loss"]).notes == ("by their names, loss is 'train/loss'",)


def test_several_candidates_are_refused_with_the_option_for_each():
    message = refused(["step", "loss", "train/loss"])
    assert "2 columns could be loss" in message
    assert "--map 'loss=loss' or --map 'loss=train/loss'" in message
    assert chosen(["step", "loss", "train/loss"], "loss=train/loss").of["loss"] == ("train/loss",)


def test_the_summary_of_transformers_is_no_candidate():
    assert chosen(["step", "train/loss", "train/train_loss"]).of["loss"] == ("train/loss",)


def test_evaluations_and_counts_are_never_guessed():
    assert chosen(["step", "loss", "eval/loss", "eval_loss", "tokens", "rollouts", "total"]).of.keys() == {
        "step",
        "loss",
    }
    assert chosen(["step", "loss", "tok"], "tokens=tok").of["tokens"] == ("tok",)


@pytest.mark.parametrize("own", ["_step", "Step"])
def test_the_step_of_wandb_is_taken_only_without_a_trainers_own_and_then_explained(own):
    assert chosen([own, "train/global_step", "loss"]).of["step"] == ("train/global_step",)
    for other in ("_runtime", "_timestamp", "run - grad_norm"):
        alone = chosen([own, "loss", other])
        assert alone.of["step"] == (own,)
        assert any("counts the calls of wandb.log" in note for note in alone.notes)


def test_nothing_is_said_of_wandb_where_it_has_written_none_of_the_columns():
    capitals = chosen(["Step", "Loss", "LR"])
    assert capitals.of["step"] == ("Step",)
    assert not any("wandb" in note for note in capitals.notes)


def test_a_step_can_be_shifted_and_that_is_noted():
    found = chosen(["_step", "loss"], "step=_step+1")
    assert (found.of["step"], found.shift) == (("_step",), 1)
    assert found.notes == ("+1 is added to each of its steps, as asked for",)
    assert chosen(["n", "loss"], "step=n-10").shift == -10


def test_a_column_whose_name_ends_like_a_shift_is_itself():
    found = chosen(["n+1", "loss"], "step=n+1")
    assert (found.of["step"], found.shift) == (("n+1",), 0)


def test_each_parameter_group_has_an_lr_in_the_order_given():
    assert chosen(["step", "b", "a"], "lr=a", "lr=b").of["lr"] == ("a", "b")


def test_an_empty_mapping_leaves_a_field_out():
    assert "lr" not in chosen(["step", "loss", "lr"], "lr=").of


def test_a_metric_of_an_export_is_mapped_without_the_name_of_its_run():
    assert chosen(["Step", "run - a/b", "x"], "loss=a/b").of["loss"] == ("run - a/b",)
    assert "2 columns could be loss" in refused(["Step", "one - a", "two - a"], "loss=a")


def test_a_mapped_column_that_is_absent_is_refused_with_those_that_are_there():
    message = refused(["step", "loss"], "lr=rate")
    assert "lr was mapped to 'rate', but the columns that hold values are 'step', 'loss'" in message


def test_a_file_without_steps_or_without_anything_known_is_refused_with_the_option():
    assert "write --map step=COLUMN" in refused(["loss", "x"])
    assert "write --map loss=COLUMN" in refused(["step", "x"])
    assert "write --map step=COLUMN" in refused(["step", "loss"], "step=")


def test_a_column_cannot_be_two_fields():
    assert "'x' is both loss and total" in refused(["step", "x"], "loss=x", "total=x")


def test_long_lists_of_columns_are_cut():
    message = refused(["step", *(f"column {n}" for n in range(100))])
    assert "and 71 more" in message
    assert len(message) < 800


@pytest.mark.parametrize("option", ["loss", "los=x", "=x", "weights=x", ""])
def test_an_option_that_is_no_mapping_is_refused_with_the_names(option):
    with pytest.raises(ConfigError, match=re.escape(f"--map is {option!r}") + f".*{', '.join(NAMES)}"):
        parse_maps([option])


def test_only_lr_may_be_mapped_twice():
    with pytest.raises(ConfigError, match=r"loss= is given twice, 'a' and 'b'"):
        parse_maps(["loss=a", "loss=b"])
    assert parse_maps(["lr=a", "lr=b", "loss=x=y"]) == {"lr": ("a", "b"), "loss": ("x=y",)}
