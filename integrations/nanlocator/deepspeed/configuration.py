"""Which engines ``install`` can watch, and what a configuration hides from it, reported once."""

from typing import Any

from nanlocator import _C


def check(engine: Any) -> None:
    """Raises UsageError if ``install`` cannot work with these arguments."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if not isinstance(engine, DeepSpeedEngine):
        raise _C.UsageError(
            f"nanlocator.deepspeed.install expects the engine, the first value that "
            f"deepspeed.initialize returns, not a {type(engine).__name__}"
        )
    reason = _why_not(engine, is_pipeline=isinstance(engine, PipelineEngine))
    if reason:
        raise _C.UsageError(f"nanlocator.deepspeed.install cannot watch this engine: {reason}")


def _why_not(engine: Any, *, is_pipeline: bool) -> str:
    if is_pipeline:
        return "it uses pipeline parallelism, which runs its own schedule"
    if engine.optimizer is None or not engine.optimizer.param_groups:
        return "it has no optimizer, so nothing is trained"
    if engine.has_moe_layers:
        return "its experts (deepspeed.moe) exchange tokens and gradients over their own process groups"
    mpu = engine.mpu
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        return "its model is split across ranks (tensor parallelism through an mpu)"
    if _call(engine, "autotp_size", 0) > 1:
        return "its model is split across ranks (tensor_parallel.autotp_size)"
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        return "its sequences are split across ranks (sequence parallelism)"
    if not getattr(engine, "enable_backward_allreduce", True):
        return "its optimizer does its own communication (1-bit optimizers)"
    if _call(engine, "is_deepcompile_enabled", False):
        return "DeepCompile reduces gradients inside compiled graphs"
    for name, feature in (("zenflow", "ZenFlow"), ("_coalesce_grad_reduction", "coalesce_grad_reduction")):
        if getattr(engine, name, False):
            return f"{feature} is not supported"
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "its optimizer state is on NVMe"
    if not _call(engine, "managed_gradient_accumulation", True):
        return (
            "managed_gradient_accumulation is false, so gradients are reduced where nanlocator does not look"
        )
    return ""


def not_covered(engine: Any) -> list[str]:
    """Phrases for run.json and the log about this configuration."""
    phrases = []
    if getattr(engine, "sparse_tensor_module_names", None):
        phrases.append("sparse gradients after their reduction")
    return phrases


def _call(engine: Any, name: str, default: Any) -> Any:
    """For methods that some versions lack."""
    method = getattr(engine, name, None)
    return method() if callable(method) else default
