"""Shapes and dtypes that recur in signatures; tests execute them."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

PerResponse = Float[Tensor, " responses"]
PerToken = Float[Tensor, " tokens"]
PerGroup = Float[Tensor, " groups"]
Scalar = Float[Tensor, ""]
ResponseFlags = Bool[Tensor, " responses"]
TokenMask = Bool[Tensor, " tokens"]
ResponseCounts = Int[Tensor, " responses"]
TokenIndex = Int[Tensor, " tokens"]
