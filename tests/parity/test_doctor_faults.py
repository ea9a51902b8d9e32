"""Which of DeepSpeed's known faults a configuration meets, and on which versions that is known."""

from pathlib import Path

import pytest

from ds_parity.parity.doctor import deepspeed_faults
from ds_parity.parity.doctor.deepspeed_faults import FAULTS
from ds_parity.parity.doctor.examination import Examination, operators, refused
from ds_parity.parity.doctor.examination import met as findings
from ds_parity.parity.doctor.findings import State
from ds_parity.parity.doctor.measured import measured

ROOT = Path(__file__).parents[2]
PASSES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 8}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ZERO2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def states(config, version="0.19.8"):
    return {finding.name: finding.state for finding in findings(config, version)}


def bites(config, version="0.19.8"):
    return [name for name, state in states(config, version).items() if state is State.BITES]


def test_every_script_has_its_fault_and_every_fault_its_script():
    scripts = {path.stem for path in (ROOT / "tools" / "deepspeed_faults").glob("[!_]*.py")}
    named = [fault.name for fault in FAULTS]
    assert {fault.script or fault.name for fault in FAULTS} == scripts
    assert len(named) == len(set(named))


def test_what_ds_parity_does_about_each_is_what_the_table_of_the_scripts_says():
    """`kept_from` is False exactly where the table says that ds_parity changes nothing."""
    rows = (ROOT / "tools" / "deepspeed_faults" / "README.md").read_text().splitlines()
    untouched = {row.split("`")[1] for row in rows if row.startswith("| `") and "changes nothing" in row}
    assert {fault.name for fault in FAULTS if not fault.kept_from} == untouched


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ZERO2, []),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, []),
        ({"fp16": {"enabled": True}}, ["fp16_zero0_unscaled_loss", "fp16_growing_scale"]),
        ({"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": 2}}, []),
        ({"zero_optimization": {"stage": 0}}, ["clip_norm_lost"]),
        ({"gradient_clipping": 0.0}, []),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}, "zero_optimization": {"stage": 2}},
            ["autocast_fp16_clipping", "autocast_fp16_overflow"],
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 2}}, []),
        (
            {
                **ZERO2,
                "optimizer": {"type": "Lion"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            ["lion_moves_unused_weights"],
        ),
    ],
)
def test_what_bites_whatever_the_loop_does(config, names):
    assert bites(config) == names


def test_what_needs_more_than_the_configuration_says_what():
    found = {finding.name: finding for finding in findings(ZERO2, "0.19.8")}
    assert found["boundary_never_marked"].state is State.PERHAPS
    assert found["boundary_never_marked"].said.startswith(
        "if the loop calls backward() several times before one step()"
    )
    assert found["boundary_never_marked"].way_out


@pytest.mark.parametrize(("switch", "stage"), [(True, 1), (False, 0)])
def test_the_old_switch_of_zero_is_a_stage(switch, stage):
    """DeepSpeed reads `true` as stage 1, and `false` as stage 0."""
    fp16 = {"fp16": {"enabled": True}}
    assert states({**fp16, "zero_optimization": switch}) == states({**fp16, "zero_optimization": {"stage": stage}})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"fp16": {"enabled": "true"}}, {"fp16": {"enabled": True}}),
        ({"fp16": {"enabled": 1, "loss_scale": "0"}}, {"fp16": {"enabled": True}}),
        ({"fp16": {"enabled": "maybe"}}, {}),  # DeepSpeed refuses it
        ({"bf16": {"enabled": "off"}, "bfloat16": {"enabled": True}}, {}),
        ({"zero_optimization": {"stage": "3"}}, {"zero_optimization": {"stage": 3}}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": "true"}}, {"zero_optimization": {"stage": 2, **OFFLOAD}}),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": "true"}},
            {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        ),
        (
            {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3, "reduce_scatter": "false"}},
            {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3, "reduce_scatter": False}},
        ),
        # Taken as it is: each text is on.
        (
            {"torch_autocast": {"enabled": "no", "dtype": "half"}},
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
        ),
    ],
)
def test_switches_and_numbers_are_read_as_deepspeed_reads_them(written, meant):
    base = {**ZERO2, "bf16": {"enabled": False}}
    assert states({**base, **written}) == states({**base, **meant})


def test_auto_is_neither_on_nor_off():
    found = {finding.name: finding for finding in findings({"fp16": {"enabled": "auto"}}, "0.19.8")}
    assert found["fp16_zero0_unscaled_loss"].state is State.PERHAPS
    assert 'what fills in "auto" switches it on' in found["fp16_zero0_unscaled_loss"].said


def test_with_the_keys_of_ds_parity_its_corrections_are_named():
    keys = {"fp16": {"enabled": True}, "gradient_accumulation_passes": 4}
    assert bites(keys) == []
    assert states(keys)["fp16_growing_scale"] is State.FINE
    assert bites(keys, "0.19.0") == []  # ds_parity corrects it on every DeepSpeed that it takes


FP16_ZERO0 = {"fp16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# What scripts have in their configurations beside what their places say.
BESIDE = {
    "autotp_loses_adapters": {"tensor_parallel": {"autotp_size": 2}},
    "lion_moves_unused_weights": {"optimizer": {"type": "Lion"}},
    "l2_adam_on_cpu": {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
    "several_passes": {"gradient_accumulation_steps": 4},
    "fp16_growing_scale": FP16_ZERO0,
    "fp16_zero0_unscaled_loss": FP16_ZERO0,
    "clip_norm_lost": {"gradient_clipping": 1.0},
    "clipped_in_default_dtype": {"gradient_clipping": 1.0},
    "expert_norm_zero0": {"gradient_clipping": 1.0},
    "expert_norm_unfused": {"gradient_clipping": 1.0},
    "sparse_gradient_not_clipped": {"gradient_clipping": 1.0},
    "sparse_gradients_zero0": {"sparse_gradients": True},
    "fused_adam_count": {"optimizer": {"type": "AdamW"}},
    "settings_of_stages": {"checkpoint": {"load_universal": True}},
    "skips_for_ever": {"data_types": {"grad_accum_dtype": "fp32"}},
    "universal_of_others": {"checkpoint": {"load_universal": True}},
    "universal_empty_partition": {"checkpoint": {"load_universal": True}},
    "universal_of_stages": {"checkpoint": {"load_universal": True}},
    "universal_off_the_cpu": {"checkpoint": {"load_universal": True}},
    "universal_without_a_file": {"checkpoint": {"load_universal": True}},
    "universal_without_buffers": {"checkpoint": {"load_universal": True}},
    "universal_without_layers": {"checkpoint": {"load_universal": True}},
}


def config_of(script, place):
    """A configuration that is where a script has a place."""
    zero = {"stage": int(place.split()[1].rstrip(",")), **(OFFLOAD if "CPU offload" in place else {})}
    switches = ("overlap_comm", "round_robin_gradients", "stage3_use_all_reduce_for_fetch_params")
    zero |= {key: True for key in switches if key in place}
    config = {"zero_optimization": zero, **BESIDE.get(script, {})}
    config |= {half: {"enabled": True} for half in ("fp16", "bf16") if f"in {half}" in place}
    if "fp32 accumulation" in place:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if script.startswith("autocast"):
        config |= {"torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 1.0}
    if "nvme" in place:
        zero["offload_optimizer"] = {"device": "nvme"}
    if "without contiguous_gradients" in place:
        zero["contiguous_gradients"] = False
    if script == "masters_of_before":
        zero["load_from_fp32_weights"] = False
    if script == "universal_in_turns":
        zero["round_robin_gradients"] = True
    if script == "hpz_keeps_frozen":
        zero["zero_hpz_partition_size"] = 2
    if script == "predivide_zero3":
        config["gradient_predivide_factor"], zero["reduce_scatter"] = 2.0, False
    return config


def told(config, version, script):
    """Whether a configuration is told that a version has the fault of a script."""
    path = f"tools/deepspeed_faults/{script}.py"
    return any(
        finding.script == path and finding.state in (State.BITES, State.PERHAPS) and "not tried" not in finding.said
        for finding in findings(config, version)
    )


class TestVersions:
    def test_every_place_that_shows_a_fault_is_told_of_a_configuration_there(self):
        silent = [
            (version, script, place)
            for version, scripts in measured().items()
            for script, places in scripts.items()
            for place, outcome in places.items()
            if outcome == "fault" and not told(config_of(script, place), version, script)
        ]
        assert sum("fault" in scripts.values() for places in measured().values() for scripts in places.values())
        assert silent == []

    def test_a_script_that_was_not_run_is_no_verdict_on_a_version_that_others_were_run_with(self, monkeypatch):
        kept = {"0.19.8": {name: places for name, places in measured()["0.19.8"].items() if name != "clip_norm_lost"}}
        monkeypatch.setattr(deepspeed_faults, "measured", lambda: kept)
        found = {finding.name: finding for finding in findings({"gradient_clipping": 1.0}, "0.19.8")}
        assert found["clip_norm_lost"].state is State.UNKNOWN
        assert "not tried on DeepSpeed 0.19.8" in found["clip_norm_lost"].said

    @pytest.mark.parametrize(
        ("version", "state"),
        [("0.16.9", None), ("0.17.6", None), ("0.18.4", State.BITES), ("0.19.5", State.BITES), ("0.19.8", State.BITES)],
    )
    def test_go_by_what_was_measured(self, version, state):
        """fp16 on ZeRO 0 was right until 0.18 wrote backward() anew."""
        assert states(FP16_ZERO0, version).get("fp16_zero0_unscaled_loss") is state

    @pytest.mark.parametrize("version", ["0.19.8+abc", "0.19.8rc1"])
    def test_a_build_of_ones_own_is_the_release_it_belongs_to(self, version):
        assert states(FP16_ZERO0, version)["fp16_zero0_unscaled_loss"] is State.BITES

    @pytest.mark.parametrize("version", ["0.18.7", "0.20.0"])
    def test_that_were_not_tried_are_no_verdict_and_say_so(self, version):
        found = {finding.name: finding for finding in findings(FP16_ZERO0, version)}
        assert found["fp16_zero0_unscaled_loss"].state is State.UNKNOWN
        assert f"not tried on DeepSpeed {version}; seen on 0.18.4, 0.18.9, 0.19.0" in (
            found["fp16_zero0_unscaled_loss"].said
        )

    def test_zero_2_of_0_17_6_is_wrong_and_says_so_with_script_effect_and_way_out(self):
        found = {finding.name: finding for finding in findings({**ZERO2, "gradient_accumulation_steps": 4}, "0.17.6")}
        issue = found["DeepSpeed #7718"]
        assert issue.state is State.BITES
        assert issue.script == "tools/deepspeed_faults/several_passes.py"
        assert issue.said == "the gradient that ZeRO 2 accumulates is wrong"
        assert issue.way_out.startswith("use DeepSpeed 0.18.4")

    @pytest.mark.parametrize("version", ["0.18.6", "0.18.7", "0.18.9", "0.18.10"])
    def test_zero_1_and_2_raise_on_some_releases_with_every_torch(self, version):
        for stage in (1, 2):
            config = {**ZERO2, "zero_optimization": {"stage": stage}}
            found = {finding.name: finding for finding in findings(config, version)}["several_passes"]
            assert found.state is State.BITES
            assert "Output 0 of" in found.said
            assert "torch" not in found.said + found.way_out
        assert "several_passes" not in states({**ZERO2, "zero_optimization": {"stage": 3}}, version)

    def test_on_another_accelerator_they_raise_where_weights_are_flattened_on_it(self):
        found = {finding.name: finding for finding in findings(ZERO2, "0.18.7", "cuda")}["several_passes"]
        assert found.state is State.PERHAPS
        assert found.said.startswith("if weights are flattened on the accelerator: ")

    @pytest.mark.parametrize("version", ["0.18.5", "0.19.0", "0.20.0"])
    def test_no_other_release_raises(self, version):
        assert "several_passes" not in states(ZERO2, version)

    def test_ds_parity_corrects_what_raises(self):
        keys = {**ZERO2, "gradient_accumulation_passes": 4}
        assert states(keys, "0.18.7")["several_passes"] is State.FINE
        assert bites(keys, "0.18.9") == []

    @pytest.mark.parametrize(
        ("config", "version", "name"),
        [
            # Each of the two was tried, and both together were not.
            ({"zero_optimization": {"stage": 1, "overlap_comm": True, **OFFLOAD}}, "0.19.8", "used_in_some_passes"),
            # Lion was tried on ZeRO 2.
            ({"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 3, **OFFLOAD}}, "0.19.8",
             "lion_moves_unused_weights"),
            # Some of its places are in bf16, and none in fp16.
            ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "0.19.8", "frozen_still_moves"),
        ],
    )  # fmt: skip
    def test_a_place_that_was_not_tried_gets_no_verdict(self, config, version, name):
        found = {finding.name: finding for finding in findings(config, version)}[name]
        assert found.state in (State.PERHAPS, State.UNKNOWN)
        assert f"not tried there on DeepSpeed {version}" in found.said

    def test_what_ds_parity_corrects_it_corrects_in_places_that_were_not_tried(self):
        """Only ZeRO 1 was tried."""
        bare = {"zero_optimization": {"stage": 2}}
        assert states(bare)["latest_before_all_files"] is State.PERHAPS
        assert states({**bare, "gradient_accumulation_passes": 4})["latest_before_all_files"] is State.FINE

    @pytest.mark.parametrize(("version", "clipped"), [("0.18.4", False), ("0.19.0", False), ("0.19.8", True)])
    def test_a_missing_gradient_clipping_clips_since_0_19_1(self, version, clipped):
        config = {"zero_optimization": {"stage": 0}}
        assert ("clip_norm_lost" in bites(config, version)) is clipped
        assert "clip_norm_lost" in bites({**config, "gradient_clipping": 1.0}, version)

    @pytest.mark.parametrize(
        ("name", "version", "way_out"),
        [
            ("nan_gradient_zero0", "0.19.5", "use DeepSpeed 0.19.8 or newer with ZeRO 1"),
            ("nan_gradient_zero0", "0.19.8", "use ZeRO 1"),
            ("forward_past_the_engine", "0.18.4", "use DeepSpeed 0.19.0 or newer, and call engine(...)"),
            ("forward_past_the_engine", "0.19.5", "call engine(...)"),
            ("clip_norm_lost", "0.18.9", "use DeepSpeed 0.19.0 or newer with ZeRO 1"),
            ("clip_norm_lost", "0.19.8", "use ZeRO 1"),
        ],
    )
    def test_the_way_out_is_one_on_this_version(self, name, version, way_out):
        found = {finding.name: finding for finding in findings({"gradient_clipping": 1.0}, version)}
        assert found[name].way_out.startswith(way_out)

    @pytest.mark.parametrize(
        ("version", "state"), [("0.18.4", State.PERHAPS), ("0.19.5", State.PERHAPS), ("0.19.8", None)]
    )
    def test_a_stage_may_have_a_fault_in_older_versions_alone(self, version, state):
        """ZeRO 2 skips a step of NaN since 0.19.8."""
        assert states({"zero_optimization": {"stage": 2}}, version).get("nan_gradient_zero0") is state

    def test_only_the_place_counts_where_a_configuration_is(self):
        """ZeRO 1 in bf16 is right on 0.18.4, and with fp32 accumulation it gets fp16's optimizer."""
        stage1 = {**ZERO2, "zero_optimization": {"stage": 1}}
        assert "DeepSpeed #7839" not in states(stage1, "0.18.4")
        for name in ("fp32", "float32", "float", "torch.float32"):
            assert "DeepSpeed #7839" in bites({**stage1, "data_types": {"grad_accum_dtype": name}}, "0.18.4")

    @pytest.mark.parametrize(
        ("config", "version", "issue"),
        [
            ({**ZERO2, "gradient_accumulation_steps": 4}, "0.17.6", "DeepSpeed #7718"),
            ({"bf16": {"enabled": True}}, "0.18.4", "DeepSpeed #7839"),
            (
                {
                    "gradient_accumulation_steps": 4,
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                },
                "0.18.9",
                "DeepSpeed #7967",
            ),
            (
                {
                    "bf16": {"enabled": True},
                    "data_types": {"grad_accum_dtype": "fp32"},
                    "zero_optimization": {"stage": 1},
                },
                "0.18.9",
                "DeepSpeed #7985",
            ),
        ],
    )
    def test_that_deepspeeds_issues_name(self, config, version, issue):
        assert issue in bites(config, version)
        assert issue not in states(config, "0.19.8")

    def test_plain_zero_2_in_bf16_is_clean_on_what_trainers_pin(self):
        for version in ("0.18.4", "0.19.5", "0.19.8"):
            assert {State.BITES, State.UNKNOWN}.isdisjoint(states(ZERO2, version).values())


@pytest.mark.parametrize("config", [{"zero_optimization": 3}, {"fp16": []}, {"zero_optimization": {"stage": "x"}}, {}])
def test_a_strange_configuration_does_not_raise(config):
    assert list(findings(config, "0.19.8"))


def test_the_operators_that_a_configuration_compiles():
    offloaded = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    assert operators(offloaded, "cpu") == ["ShareMemCommBuilder", "CPUAdamBuilder"]
    assert operators({"optimizer": {"type": "AdamW"}}, "cuda") == ["FusedAdamBuilder"]
    assert operators({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "cuda") == []
    assert operators({"optimizer": {"type": "Lion"}}, "cpu") == ["ShareMemCommBuilder", "FusedLionBuilder"]
    on_a_disk = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    assert operators(on_a_disk, "cuda") == ["AsyncIOBuilder"]


class TestWhatIsRefused:
    """Configurations that `ds_parity.initialize` refuses."""

    def test_each_key_with_its_rule_and_way_out(self):
        halves = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
        found = {it.name: it for it in refused({**PASSES, **halves, "zero_optimization": {"stage": 4}})}
        assert set(found) == {"fp16.enabled", "zero_optimization.stage"}
        assert all(finding.state is State.BITES for finding in found.values())
        stage = found["zero_optimization.stage"]
        assert stage.said == "zero_optimization.stage = 4: must be 0, 1, 2 or 3"
        assert stage.way_out == "write the number of the ZeRO stage"

    def test_extra_keys_that_can_not_be_read(self):
        (found,) = refused({**PASSES, "gradient_accumulation_passes": "x"})
        assert found.state is State.BITES
        assert "gradient_accumulation_passes" in found.said

    @pytest.mark.parametrize("config", [PASSES, {"zero_optimization": {"stage": 4}}, {**PASSES, **ZERO2}])
    def test_nothing_else(self, config):
        assert not list(refused(config))

    def test_they_bite(self):
        refusals = tuple(refused({**PASSES, "zero_optimization": {"stage": 4}}))
        assert Examination((), (), refusals).code == 1
