"""Windows that need a correction, and the configuration under which their losses are weighed by tokens."""

# Loss tokens by window, pass and rank. All windows but the second need a correction, up or down; at the second the fp16
# scale grows.
WINDOWS = (((5, 2), (1, 3)), ((3, 3), (3, 3)), ((2, 6), (1, 4)), ((3, 3), (1, 8)), ((4, 1), (2, 2)))

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def scaled_config(stage, clip, lr):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 4,
        "ds_parity": {"loss_weight": "token"},
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
