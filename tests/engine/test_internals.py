"""What ds_parity/engine/internals relies on inside DeepSpeed.

Each guard that fails says what changed, and which file relies on it.
"""

import inspect
from dataclasses import replace

import pytest
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from ds_parity.engine.internals import guards
from ds_parity.engine.internals.guard_list import GUARDS, changed
from ds_parity.engine.internals.guards import ZERO3, Guard, missing, touched_names, users

ENGINE_FILES = guards.Path(guards.__file__).parents[1]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.name} for {guard.used_in}")
def test_deepspeed_still_does_what_is_relied_on(guard):
    said = guard.changed()
    assert said is None, said


def test_deepspeed_still_has_every_name_that_is_used():
    gone = list(missing())
    assert not gone, "; ".join(gone)


def test_every_name_of_the_surface_is_used_somewhere_and_every_guard_names_a_file_that_exists():
    unused = [f"{protocol}.{name}" for protocol, name in touched_names() if not users(name)]
    assert not unused, f"these names of surface.py are used nowhere, remove them: {unused}"
    files = {guard.used_in.split(" and ")[0] for guard in GUARDS}
    absent = [file for file in files if not (ENGINE_FILES / file).is_file()]
    assert not absent, f"guards name files that are not there: {absent}"


def test_a_name_that_is_gone_is_said_with_the_files_that_use_it(monkeypatch):
    monkeypatch.setattr(guards, "_has", lambda owner, name: name != "_overflow_clean_up")
    said = changed()
    assert said[0] == (
        "DeepSpeedZeroOptimizer_Stage3._overflow_clean_up is gone. internals/zero3.py in ds_parity/engine uses it. "
        "Read it again there"
    )
    assert len(said) == 1


STEP = next(guard for guard in GUARDS if guard.owner == ZERO3 and guard.method == "step" and len(guard.lines) > 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "no_such_step"}, "no_such_step is gone"),
        ({"owner": "deepspeed.runtime.no_such_room:Class"}, "is gone (No module named"),
        ({"lines": ("self._no_such_call()",)}, "'self._no_such_call()' is gone"),
        ({"lines": STEP.lines[1::-1]}, "comes earlier now"),
        ({"absent": STEP.lines[:1]}, "is new"),
        ({"once": ("self",)}, "times"),
        ({"signature": ("self",)}, "it takes self, closure"),
    ],
)
def test_each_kind_of_change_is_seen_and_said_with_the_file_and_the_reason(change, says):
    """Seeded: the guard of ZeRO 3's step holds, and no longer once one of its parts is another."""
    assert STEP.changed() is None
    said = replace(STEP, **change).changed()
    assert says in said
    assert "ds_parity/engine/internals/zero3.py relies on it: discard()" in said


def test_a_text_that_is_there_twice_counts_in_its_order():
    text = Guard(
        guards.ENGINE, "step", "internals/counters.py", "nothing", ("self.tput_timer", "self.micro_steps += 1")
    )
    assert text.changed() is None


# What no text shows.


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_deepspeed_schedulers_take_a_position_and_stand_one_behind(name):
    schedule = getattr(lr_schedules, name)
    relies = f"{name}.step has changed; ds_parity/engine/internals/schedule.py places a schedule by it"
    assert len(inspect.signature(schedule.step).parameters) == 2, relies
    assert "self.last_batch_iteration = " in inspect.getsource(schedule.step), relies


def test_deepspeeds_sequence_parallel_state_stands_for_the_model_parallel_one():
    """Why BF16_Optimizer is refused with it (internals/groups.py); if this fails, it may be right now."""
    assert parallel_state_sp.get_model_parallel_rank is parallel_state_sp.get_sequence_parallel_rank, (
        "parallel_state_sp no longer says that its groups are model-parallel: groups.py refuses BF16_Optimizer for it"
    )
