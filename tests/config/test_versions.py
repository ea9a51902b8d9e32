"""The table of releases: what it refuses, what it says is corrected, and that no entry stands alone."""

import pytest

from ds_parity.config import rewrite, versions
from ds_parity.config.features import FEATURES, named
from ds_parity.config.releases import release
from ds_parity.config.versions import ENTRIES, MEASURED, OLDEST, Entry, Verdict, verdict

ZERO2 = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 8, "zero_optimization": {"stage": 2}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def asked(config):
    return {feature.name for feature in FEATURES if feature.asked_for(config)}


@pytest.mark.parametrize("version", MEASURED, ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_plain_zero_2_and_3_in_bf16_are_refused_on_no_release(stage, version):
    config = {**ZERO2, **BF16, "zero_optimization": {"stage": stage}}
    assert asked(config) == {f"ZeRO {stage} in bf16"}
    assert not list(versions.refused(config, version))


def test_releases_stand_in_their_order_and_begin_with_the_oldest():
    assert list(MEASURED) == sorted(MEASURED)
    assert MEASURED[0] == OLDEST
    assert all(one.final and not one.build for one in MEASURED)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.what[:40])
def test_every_entry_is_of_features_that_exist_and_has_its_evidence(entry):
    assert entry.features
    assert all(named(name) in FEATURES for name in entry.features)
    assert entry.evidence
    assert not entry.what.endswith(".")
    assert any(entry.on(version) for version in MEASURED)
    if entry.first is not None and entry.right_from is not None:
        assert entry.first < entry.right_from


@pytest.mark.parametrize(
    ("feature", "version", "expected"),
    [
        ("ZeRO 0 in bf16", "0.18.4", Verdict.CORRECTED),
        ("ZeRO 0 in bf16", "0.18.6", Verdict.RIGHT),
        ("ZeRO 0 in fp16", "0.19.8", Verdict.CORRECTED),
        ("ZeRO 2 in bf16", "0.18.4", Verdict.RIGHT),
        ("ZeRO 2 in bf16", "0.18.9", Verdict.CORRECTED),
        ("ZeRO 2 in bf16", "0.19.0", Verdict.RIGHT),
        ("ZeRO 3 in bf16", "0.18.9", Verdict.CORRECTED),
        ("ZeRO 3 in bf16", "0.19.8", Verdict.RIGHT),
        ("ZeRO 1 under torch_autocast in bf16", "0.18.9", Verdict.CORRECTED),
        ("ZeRO 1 under torch_autocast in bf16", "0.18.4", Verdict.RIGHT),
        ("ZeRO 1 in bf16 with fp32 accumulation", "0.18.4", Verdict.CORRECTED),
        ("ZeRO 1 in bf16 with fp32 accumulation", "0.18.9", Verdict.CORRECTED),
        ("ZeRO 1 in bf16 with fp32 accumulation", "0.19.0", Verdict.RIGHT),
        ("ZeRO 2 in bf16 with fp32 accumulation", "0.18.9", Verdict.CORRECTED),
        ("ZeRO 1 in fp16", "0.19.8", Verdict.CORRECTED),
        ("ZeRO 3 in fp16", "0.18.4", Verdict.CORRECTED),
        ("ZeRO 0 under torch_autocast in fp16", "0.19.8", Verdict.CORRECTED),
        ("ZeRO 2 under torch_autocast in fp16", "0.19.8", Verdict.CORRECTED),
        ("ZeRO 2 under torch_autocast in bf16", "0.19.8", Verdict.RIGHT),
        ("ZeRO 2 with CPU offload", "0.19.0rc1", Verdict.CORRECTED),
        ("ZeRO 2 with CPU offload", "0.19.0+cu12", Verdict.RIGHT),
        ("ZeRO 1 with CPU offload", "0.18.4", Verdict.RIGHT),
        ("coalesce_grad_reduction()", "0.19.0", Verdict.REFUSED),
        ("coalesce_grad_reduction()", "0.19.2", Verdict.RIGHT),
        ("offload_states() with offloaded optimizer states", "0.18.9", Verdict.REFUSED),
        ("offload_states() with offloaded optimizer states", "0.19.0", Verdict.RIGHT),
        ("sparse_gradients on ZeRO 0", "0.19.5", Verdict.REFUSED),
        ("sparse_gradients on ZeRO 0", "0.19.8", Verdict.RIGHT),
        ("pipeline parallelism", "0.19.5", Verdict.REFUSED),
        ("pipeline parallelism", "0.19.8", Verdict.RIGHT),
    ],
)
def test_a_verdict_follows_from_the_release(feature, version, expected):
    assert verdict(named(feature), release(version)) is expected


def test_a_refused_feature_says_the_thing_the_rule_and_the_first_release_that_is_right(monkeypatch):
    entry = Entry(
        ("ZeRO 2 in bf16",),
        Verdict.REFUSED,
        "it adds a gradient twice",
        "DeepSpeed #1",
        right_from=release("0.19.0"),
        way_out="leave it out",
    )
    monkeypatch.setattr(versions, "ENTRIES", (entry,))
    (fault,) = versions.refused({**ZERO2, **BF16}, release("0.18.9"))
    assert str(fault) == (
        "zero_optimization.stage = 2: DeepSpeed 0.18.9 is wrong on ZeRO 2 in bf16: it adds a gradient twice "
        "(DeepSpeed #1); use DeepSpeed 0.19.0 or newer; or leave it out"
    )
    assert not list(versions.refused({**ZERO2, **BF16}, release("0.19.0")))
    assert not list(versions.refused(ZERO2, release("0.18.9")))


REFUSED_BY_CALL = [
    (name, version)
    for entry in ENTRIES
    if entry.verdict is Verdict.REFUSED
    for name in entry.features
    for version in MEASURED
    if entry.on(version) and not named(name).key
]


@pytest.mark.parametrize(("name", "version"), REFUSED_BY_CALL, ids=str)
def test_every_refused_cell_has_its_reason_and_its_way_out(name, version):
    why = versions.refused_by_call(name, version, "cpu")
    assert f"DeepSpeed {version} is wrong on {name}: " in why
    assert "or newer" in why or "no release is right yet" in why


@pytest.mark.parametrize("off", [False, "false", 0])
@pytest.mark.parametrize(("version", "count"), [("0.18.4", 1), ("0.19.5", 1), ("0.19.8", 0)])
def test_gradients_that_are_not_contiguous_are_refused_where_ranks_are_not_summed(version, count, off):
    config = {"zero_optimization": {"stage": 2, "contiguous_gradients": off}}
    assert len(list(versions.refused(config, release(version)))) == count


FETCHED = ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params")


@pytest.mark.parametrize("key", FETCHED)
@pytest.mark.parametrize(
    ("value", "version", "count"),
    [(True, "0.19.3", 1), ("true", "0.18.4", 1), (False, "0.19.3", 0), (True, "0.19.5", 0)],
)
def test_weights_gathered_by_all_reduce_are_refused_in_either_spelling(key, value, version, count):
    faults = list(versions.refused({"zero_optimization": {"stage": 3, key: value}}, release(version)))
    assert len(faults) == count
    assert all(str(fault).startswith(f"zero_optimization.{key} = ") for fault in faults)
    assert not list(versions.refused({"zero_optimization": {"stage": 2, key: value}}, release(version)))


def test_a_release_without_numbers_refuses_nothing():
    assert versions.refused_by_call("coalesce_grad_reduction()", None, "cpu") is None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, {"ZeRO 0 in fp32"}),
        ({"zero_optimization": True, **FP16}, {"ZeRO 1 in fp16"}),
        ({"zero_optimization": {"stage": "auto"}}, set()),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}, set()),
        (
            {"zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
            {"ZeRO 1 in bf16 with fp32 accumulation"},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}},
            {"ZeRO 2 with CPU offload", "communication that overlaps"},
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"ZeRO 0 under torch_autocast in bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"ZeRO 0 under torch_autocast in fp16"}),
        ({"ds_parity": {"boundary": "caller"}}, {"ZeRO 0 in fp32", "windows that the caller ends"}),
        ({"zero_optimization": {"stage": "3"}, "fp16": {"enabled": "true"}}, {"ZeRO 3 in fp16"}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": "true"}}, {"ZeRO 2 with CPU offload"}),
        ({"torch_autocast": {"enabled": True, "dtype": "half"}}, {"ZeRO 0 under torch_autocast in fp16"}),
    ],
)
def test_what_a_configuration_asks_for(config, names):
    assert asked(config) == names


@pytest.mark.parametrize("name", ["fp32", "float32", "float", "torch.float32"])
def test_each_name_that_deepspeed_takes_for_fp32_is_understood(name):
    config = {"zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": name}}
    assert asked(config) == {"ZeRO 1 in bf16 with fp32 accumulation"}


def test_the_rewritten_configuration_asks_for_the_same():
    config = {**ZERO2, **BF16}
    assert asked(rewrite(config, 2).config) == asked(config)


def test_an_unknown_feature_is_an_error():
    with pytest.raises(KeyError):
        named("ZeRO 4")
