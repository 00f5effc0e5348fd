"""What `high` does beyond `lossless`, in pieces that can each be left out."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, CUDNN, STOCK = "auto", "cudnn", "stock"
ATTENTIONS = (AUTO, CUDNN, STOCK)


@dataclass(frozen=True)
class Pieces:
    """Each is close to stock, none is byte-equal to it; with none of them `high` is `lossless`.

    Attributes:
        attention: `auto` takes the backend that was measured to be faster on the GPU at hand (`kernels/attention.py`),
            `cudnn` takes cuDNN's wherever it runs, `stock` keeps the host's own.
        fast_accumulation: fp8 products that add up with fewer bits, as cuBLAS calls it.
        row_wise_fp8: weights in fp8 with a scale for each row are multiplied as they are, by inputs in fp8 with a scale
            for each token, where stock dequantises them and multiplies in bf16.
        unproven_chains: kernels run also where a forward showed values that differ from stock's.

    Raises:
        ValueError: no such attention.
    """

    attention: str = AUTO
    fast_accumulation: bool = True
    row_wise_fp8: bool = True
    unproven_chains: bool = True

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention {self.attention!r} is none of {', '.join(ATTENTIONS)}")


ALL = Pieces()
NONE = Pieces(STOCK, False, False, False)
