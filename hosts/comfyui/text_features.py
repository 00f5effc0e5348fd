"""Text features on the model's device, in its dtype, for the length of sampling.

core leaves conditioning where the text encoder put it, in fp32 on the CPU, and converts and copies it anew in every
step: 53,248 values a token. On an H200 the copy alone took 5.7 ms of a step with 256 tokens, and everything behind it
waits, since a copy from pageable memory lets Python go on only once the GPU has caught up. The same conversion, done
once before the first step, gives the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.conds import CONDRegular
from comfy.patcher_extension import WrappersMP

log = logging.getLogger("ideogram4_fusion")

CROSS_ATTENTION = "c_crossattn"


class _Uncopied(CONDRegular):  # type: ignore[misc]  # core is untyped
    """Alone in its batch it is handed on as it is, where core copies it in every step: as large again on the device.

    core's model only reads it, and whoever else is handed it turns all this off.
    """

    def concat(self, others: list[CONDRegular]) -> torch.Tensor:
        joined: torch.Tensor = super().concat(others) if others else self.cond
        return joined


# Values added up at once. PyTorch widens them to int64 first: 109 MB for 256 tokens all at once, where a whole step at
# 256 x 256 pixels takes 137 MB.
_AT_ONCE = 1 << 20


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Two numbers that change with any value, and with any exchange of rows or of columns."""
    bits = x.flatten(0, -2).view(torch.int16 if x.element_size() == 2 else torch.int32)
    columns = torch.zeros(bits.shape[1], dtype=torch.int64, device=x.device)
    rows = []
    for part in bits.split(max(1, _AT_ONCE // bits.shape[1])):
        columns += part.sum(0, dtype=torch.int64)
        rows.append(part.sum(1, dtype=torch.int64))
    sums = columns, torch.cat(rows)
    return torch.stack([(s * torch.arange(1, len(s) + 1, device=s.device)).sum() for s in sums])


# Whoever stands between the conditioning and the model may want it as core hands it on.
_BETWEEN = (
    *(WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL),
    WrappersMP.DIFFUSION_MODEL,
)
_BETWEEN_OPTIONS = (
    *("model_function_wrapper", "sampler_calc_cond_batch_function", "multigpu_clones"),
    *("sampler_pre_cfg_function", "sampler_cfg_function", "sampler_post_cfg_function"),
)


class TextFeaturesOnDevice:
    """core's SAMPLER_SAMPLE wrapper: `BaseModel._apply_model` then finds nothing left to convert.

    Args:
        key: of our own wrappers, which do not look at the conditioning.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._off = False

    def __call__(self, executor: Any, guider: Any, sigmas: Any, extra_args: dict[str, Any], *args: Any) -> Any:
        stock = guider.conds
        if self._off or self._watched(extra_args.get("model_options", {})) or _is_spread(stock):
            return executor(guider, sigmas, extra_args, *args)
        device, dtype = guider.model_patcher.load_device, guider.inner_model.get_dtype_inference()
        guider.conds = {
            name: None if conds is None else [_converted(cond, device, dtype) for cond in conds]
            for name, conds in stock.items()
        }
        sums = [(each.cond, _sum_of_bits(each.cond)) for each in _text(guider.conds) if isinstance(each, _Uncopied)]
        try:
            samples = executor(guider, sigmas, extra_args, *args)
        finally:
            guider.conds = stock  # core keeps them when sampling is cut short
        if all(torch.equal(_sum_of_bits(features), before) for features, before in sums):
            return samples
        log.warning(
            "Ideogram 4 fusion: the model writes into its text features: sampling again with copies in each step"
        )
        self._off = True
        return executor(guider, sigmas, extra_args, *args)

    def _watched(self, model_options: Mapping[str, Any]) -> bool:
        wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
        others = (wrappers.get(kind, {}).keys() - {self._key} for kind in _BETWEEN)
        return any(others) or any(model_options.get(name) for name in _BETWEEN_OPTIONS)


def _text(conds: Mapping[str, list[dict[str, Any]] | None]) -> Iterator[Any]:
    """The text features of all conditionings, or None where one has none."""
    return (c.get("model_conds", {}).get(CROSS_ATTENTION) for several in conds.values() for c in several or ())


def _is_spread(conds: Mapping[str, list[dict[str, Any]] | None]) -> bool:
    """Whether text features lie on several devices: core then runs apart what it would batch on one."""
    return len({features.cond.device for features in _text(conds) if isinstance(features, CONDRegular)}) > 1


def _converted(cond: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of one conditioning with its text features as the model converts them.

    As it is where a ControlNet sees them, or a hook of the conditioning's own may bring a wrapper in later.
    """
    model_conds = cond.get("model_conds", {})
    features = model_conds.get(CROSS_ATTENTION)
    if type(features) is not CONDRegular:
        return cond
    if cond.get("control") is not None or cond.get("hooks") is not None:
        return cond
    converted = comfy.model_management.cast_to_device(features.cond, device, dtype)
    if converted is features.cond:
        return cond  # nothing to spare, and it is the caller's own
    return {**cond, "model_conds": {**model_conds, CROSS_ATTENTION: _Uncopied(converted)}}
