"""What older releases are supplied with, on plain objects; tests/hard/test_older_release.py runs one."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.releases import release
from ds_parity.engine.internals import older, older_checkpoints, older_leftovers, older_zero3, older_zero12
from ds_parity.engine.internals.installed import installed
from tests.older_refusals import is_older


class Wrapper(SimpleNamespace):
    """Has what is given to it, and nothing else."""


NEWER = SimpleNamespace(release_backward_leftovers=None)


def offload(coordinator):
    """What hooks a model's modules on ZeRO 3."""
    return SimpleNamespace(get_param_coordinator=lambda: coordinator)


@pytest.fixture
def release_is(monkeypatch):
    """Make another release the installed one, with other text of DeepSpeed's methods."""

    def install(version, text=""):
        for module in (older, older_zero12):
            monkeypatch.setattr(module, "source", lambda *_: text)
        monkeypatch.setattr(older, "before", lambda first: release(version) < first)

    return install


def offloaded(**others):
    """A wrapper of ZeRO 1 or 2 with CPU offload that keeps one parameter of three elements, all its own."""
    kept = {7: torch.zeros(3)}
    calls = []
    wrapper = Wrapper(
        cpu_offload=True,
        micro_step_id=-1,
        is_gradient_accumulation_boundary=False,
        use_grad_accum_attribute=False,
        low_precision_master_weights_and_grads=False,
        accumulated_grads_in_cpu=kept,
        grad_position={7: (0, 0, 0, 3)},
        get_param_id=lambda param: 7,
        get_param_gradient_attribute=lambda param: param.grad,
        set_norm_for_param_grad_in_gpu=lambda param: calls.append("norm"),
        update_offload_overflow_tracker_for_param_grad=lambda param: calls.append("overflow"),
        async_inplace_copy_grad_to_fp32_buffer_from_gpu=lambda param: calls.append(param.grad.clone()),
        reset_cpu_buffers=lambda: calls.append("reset"),
        _clear_param_grad_only=None,
        calls=calls,
        **others,
    )

    def accumulate(param):  # as 0.18.4 does it: only the first gradient of a window is taken to the host
        if wrapper.micro_step_id > 0:
            param.grad.add_(kept[7])
        else:
            kept[7].copy_(param.grad)

    wrapper.async_accumulate_grad_in_cpu_via_gpu = accumulate
    return wrapper


def test_an_offloaded_window_of_four_passes_gives_the_optimizer_their_sum(release_is):
    release_is("0.18.4", "else:\n            copy_gradients_to_cpu()")
    wrapper = offloaded()
    older_zero12.supply_zero12(wrapper)
    param = torch.nn.Parameter(torch.zeros(3))
    for number, gradient in enumerate((1.0, 2.0, 4.0, 8.0)):
        wrapper.micro_step_id, wrapper.is_gradient_accumulation_boundary = number, number == 3
        param.grad = torch.full((3,), gradient)
        wrapper.copy_grads_in_partition(param)
    assert wrapper.calls[:2] == ["norm", "overflow"]
    assert wrapper.calls[2].tolist() == [15.0] * 3
    assert wrapper._offload_accumulated_param_ids == {7}
    wrapper.reset_cpu_buffers()
    assert wrapper._offload_accumulated_param_ids == set()


def test_a_window_of_one_pass_keeps_nothing_on_the_host(release_is):
    release_is("0.19.0")
    wrapper = offloaded()
    older_zero12.supply_zero12(wrapper)
    wrapper.micro_step_id, wrapper.is_gradient_accumulation_boundary = 0, True
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    wrapper.copy_grads_in_partition(param)
    assert wrapper._offload_accumulated_param_ids == set()
    assert wrapper.accumulated_grads_in_cpu[7].tolist() == [0.0] * 3


def test_what_lies_on_the_host_is_brought_back_for_the_end_of_a_window(release_is):
    release_is("0.19.0")
    param = torch.nn.Parameter(torch.zeros(3))
    wrapper = offloaded(params_in_partition=[[param]])
    older_zero12.supply_zero12(wrapper)
    wrapper.accumulated_grads_in_cpu[7].fill_(5.0)
    wrapper.finalize_gradient_accumulation_boundary()
    assert wrapper.calls == []  # no pass of the window used it
    wrapper._offload_accumulated_param_ids.add(7)
    wrapper.finalize_gradient_accumulation_boundary()
    assert wrapper.calls[2].tolist() == [5.0] * 3


def test_the_end_of_a_backward_clears_by_the_bare_method():
    cleared = []
    wrapper = Wrapper(cpu_offload=False, zero_grad=lambda: cleared.append("bare"))

    def epilogue():  # looks the method up when it runs, as DeepSpeed does
        wrapper.zero_grad()

    wrapper.independent_gradient_partition_epilogue = epilogue
    older_zero12.supply_zero12(wrapper)
    wrapper.zero_grad = guarded = lambda: cleared.append("guarded")
    wrapper.independent_gradient_partition_epilogue()
    assert cleared == ["bare"]
    assert wrapper.zero_grad is guarded


def test_a_newer_wrapper_is_left_alone():
    names = ("_clear_param_grad_only", "_use_compact_grad_partition_buffer", "finalize_gradient_accumulation_boundary")
    wrapper = Wrapper(**dict.fromkeys(names))
    before = dict(vars(wrapper))
    older_zero12.supply_zero12(wrapper)
    assert vars(wrapper) == before
    wrapper = Wrapper(**dict.fromkeys(("_get_param_partition_rank", "_offload_boundary_param_ids")))
    wrapper.parameter_offload = offload(NEWER)
    before = dict(vars(wrapper))
    older_zero3.supply_zero3(wrapper)
    assert vars(wrapper) == before


def test_zero_3_notes_what_a_window_used_where_this_rank_has_a_part_of_it():
    partitioned = []
    wrapper = Wrapper(
        partition_grads=lambda params, grads: partitioned.append(len(params)),
        _pre_step=lambda: partitioned.append("step"),
        _get_param_partition_rank=lambda param: 1,
        parameter_offload=offload(NEWER),
    )
    older_zero3.supply_zero3(wrapper)
    whole = SimpleNamespace(ds_id=3, ds_numel=4, partition_numel=lambda: 2)
    tiny = SimpleNamespace(ds_id=4, ds_numel=1, partition_numel=lambda: 1)
    wrapper.partition_grads([whole, tiny], [None, None])
    assert wrapper._offload_boundary_param_ids == {3}
    wrapper._pre_step()
    assert wrapper._offload_boundary_param_ids == set()
    assert partitioned == [2, "step"]


def test_zero_3_releases_at_a_backwards_end_what_no_modules_end_has_released():
    said = []
    coordinator = SimpleNamespace(
        fetch_sub_module=lambda current_submodule, forward: said.append(("fetch", current_submodule.ds_id, forward)),
        release_sub_module=lambda submodule, forward: said.append(("release", submodule.ds_id, forward)),
    )
    wrapper = Wrapper(parameter_offload=offload(coordinator), backward_epilogue=lambda: said.append("end"))
    older_leftovers.release_leftovers(wrapper)
    first, second = SimpleNamespace(ds_id=1), SimpleNamespace(ds_id=2)
    coordinator.fetch_sub_module(first, forward=True)  # a second forward is ahead, and keeps its weights
    coordinator.fetch_sub_module(second, forward=False)
    coordinator.fetch_sub_module(first, forward=False)
    coordinator.release_sub_module(second)
    wrapper.backward_epilogue()
    assert said[3:] == [("release", 2, False), "end", ("release", 1, False)]
    wrapper.backward_epilogue()
    assert said[6:] == ["end"]


@pytest.mark.parametrize("writes_none", [True, False])
def test_bf16_on_zero_0_is_no_zero_while_its_checkpoint_is_written_or_read(writes_none, monkeypatch):
    text = f"    {older_checkpoints._TAKEN_FOR_ZERO}\n" if writes_none else ""
    monkeypatch.setattr(older_checkpoints, "source", lambda *_: text)
    seen = []
    engine = SimpleNamespace(bfloat16_enabled=lambda: True)
    engine._save_checkpoint = lambda *_, **__: seen.extend([engine.bfloat16_enabled()] * 2)
    # It asks whether ZeRO has the optimizer's state, and then whether that is one of low precision.
    engine._load_checkpoint = lambda *_: seen.extend([engine.bfloat16_enabled(), engine.bfloat16_enabled()])
    older_checkpoints.keep_state(engine)
    engine._save_checkpoint("folder", tag="saved")
    engine._load_checkpoint("folder", "saved")
    assert seen == [not writes_none, not writes_none, not writes_none, True]
    assert engine.bfloat16_enabled()


def test_gradients_are_not_reduced_by_rows_because_a_checkpoints_were():
    engine = SimpleNamespace(sparse_tensor_module_names={"words.weight"})
    older_checkpoints.forget_sparse_names(engine)
    assert engine.sparse_tensor_module_names == set()


def test_the_last_micro_batch_is_accumulated_before_it_is_reduced(release_is):
    release_is("0.18.9", "self.allreduce_gradients()")
    order = []
    engine = SimpleNamespace(allreduce_gradients=lambda: order.append("reduce"))
    wrapper = Wrapper(
        custom_loss_scaler=False,
        backward_epilogue=lambda: order.append("accumulate"),
        clear_lp_grads=lambda: order.append("clear"),
    )
    older._supply_bf16(engine, wrapper)
    engine.allreduce_gradients()
    assert order == ["accumulate", "clear", "reduce"]


def test_bf16_on_zero_0_is_not_unscaled_and_is_cleared_after_each_step():
    cleared = []
    wrapper = Wrapper(cur_scale=65536.0, dynamic_loss_scale=True, step=lambda: "stepped")
    wrapper.zero_grad, wrapper.load_state_dict = lambda: cleared.append(True), lambda _: None
    older._supply_half(
        SimpleNamespace(fp16_enabled=lambda: False, _save_checkpoint=None, _load_checkpoint=None), wrapper
    )
    assert wrapper.loss_scale_config.cur_scale == 1.0
    assert not wrapper.loss_scale_config.use_grad_scaling
    assert wrapper.step() == "stepped"
    assert cleared == [True]


def test_a_wrapper_that_scales_nothing_in_bf16_counts_no_iteration_by_itself():
    wrapper = Wrapper(cur_scale=1.0, step=lambda: None, zero_grad=lambda: None, load_state_dict=lambda _: None)
    older._supply_half(
        SimpleNamespace(fp16_enabled=lambda: False, _save_checkpoint=None, _load_checkpoint=None), wrapper
    )
    assert wrapper.loss_scale_config.cur_iter == 0


def test_a_loaded_checkpoint_does_not_bring_the_scale_of_bf16_back():
    wrapper = Wrapper(cur_scale=65536.0, dynamic_loss_scale=True, cur_iter=0, step=lambda: None)

    def load_state_dict(state, load_optimizer_states=True):  # as FP16_UnfusedOptimizer of 0.18.4 does it
        wrapper.cur_scale, wrapper.dynamic_loss_scale, wrapper.cur_iter = state["cur_scale"], True, state["cur_iter"]
        return load_optimizer_states

    wrapper.zero_grad, wrapper.load_state_dict = lambda: None, load_state_dict
    older._supply_half(
        SimpleNamespace(fp16_enabled=lambda: False, _save_checkpoint=None, _load_checkpoint=None), wrapper
    )
    assert wrapper.load_state_dict({"cur_scale": 65536.0, "cur_iter": 3}, load_optimizer_states=False) is False
    assert (wrapper.cur_scale, wrapper.dynamic_loss_scale, wrapper.cur_iter) == (1.0, False, 3)


def test_an_engine_is_supplied_once(release_is, monkeypatch):
    release_is("0.18.9", "self.allreduce_gradients()")
    monkeypatch.setattr(older, "BF16_Optimizer", Wrapper)
    monkeypatch.setattr(older, "_WRAPPERS", Wrapper)
    monkeypatch.setattr(older, "supply_overflow", lambda *_: None)  # the release that is really there may need it
    order = []
    engine = SimpleNamespace(allreduce_gradients=lambda: order.append("reduce"))
    engine.optimizer = Wrapper(
        custom_loss_scaler=False,
        backward_epilogue=lambda: order.append("accumulate"),
        clear_lp_grads=lambda: order.append("clear"),
    )
    older.supply(engine)
    older.supply(engine)
    engine.allreduce_gradients()
    assert order == ["accumulate", "clear", "reduce"]


def test_the_end_of_a_window_takes_norms_of_zero_3_where_the_others_are(monkeypatch):
    """Where gradients lie on the host, 0.19.5 brings each one to the accelerator before it takes its norm."""
    moved = []

    class OnHost:
        def to(self, device, non_blocking):
            moved.append((device, non_blocking))
            return "on the accelerator"

    accelerator = SimpleNamespace(
        on_accelerator=lambda one: not isinstance(one, OnHost), current_device_name=lambda: "a"
    )
    monkeypatch.setattr(older_zero3, "get_accelerator", lambda: accelerator)
    given = []
    wrapper = Wrapper(
        offload_optimizer=True,
        swap_optimizer=False,
        fp16_groups=[[SimpleNamespace(ds_id=number) for number in range(3)]],
        partition_grads=None,
        _pre_step=None,
        _get_param_partition_rank=None,
        parameter_offload=offload(NEWER),
        _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition={0: OnHost(), 2: "there"},
    )
    older_zero3.supply_zero3(wrapper)
    wrapper._offload_boundary_param_ids.update((0, 1))  # of 1 no partition is there
    wrapper._offload_grad_partition_at_boundary = lambda param, buffer, *_: given.append((param.ds_id, buffer))
    wrapper.finalize_gradient_accumulation_boundary()
    assert given == [(0, "on the accelerator")]
    assert moved == [("a", True)]


def test_fp16_on_zero_0_keeps_its_scale():
    wrapper = Wrapper(cur_scale=128.0, dynamic_loss_scale=False, cur_iter=0)
    older._supply_half(SimpleNamespace(fp16_enabled=lambda: True), wrapper)
    wrapper.loss_scale_config.cur_scale = 64.0
    assert wrapper.cur_scale == 64.0
    assert wrapper.loss_scale_config.use_grad_scaling


def test_weights_are_flattened_without_a_graph_while_an_engine_is_built(release_is):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    flatten = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned
    stand_in = SimpleNamespace(flatten=torch._C._nn.flatten_dense_tensors)
    release_is("0.18.9", "use_cpu_data=False)")
    assert flatten(stand_in, weights, 2).grad_fn is not None
    with older.building():
        inside = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned(stand_in, weights, 2)
    assert inside.grad_fn is None
    assert inside.tolist() == [1.0] * 4
    assert DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned is flatten


def test_weights_are_gathered_one_after_the_other_where_the_last_alone_is_waited_for(release_is, monkeypatch):
    gathered = []
    monkeypatch.setattr(Init, older._GATHER, lambda init, params, *args: gathered.append((list(params), args)))
    release_is("0.19.5", "launch_handles[-1].wait()")
    older._wait_for_every_gather()
    older._wait_for_every_gather()  # once is enough
    getattr(Init, older._GATHER)(None, ["a", "b"], 0)
    assert gathered == [(["a"], (0,)), (["b"], (0,))]


def test_the_wrappers_of_bf16_have_two_names_while_an_engine_is_built(monkeypatch):
    monkeypatch.setattr(deepspeed_engine, "DDP_BFLOAT16", "bf16")
    with older.building():
        assert deepspeed_engine.DDP_BFLOAT16 == "ddp_bf16"
        assert deepspeed_engine.BFLOAT16 == "bf16"
    # Bare engines beside it are built as they are.
    assert deepspeed_engine.DDP_BFLOAT16 == "bf16"


@pytest.mark.skipif(is_older(installed()), reason="an older release is installed, and is mended")
def test_the_newest_release_is_left_alone():
    flatten, gather = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned, getattr(Init, older._GATHER)
    with older.building():
        assert DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned is flatten
    assert getattr(Init, older._GATHER) is gather
