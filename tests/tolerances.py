"""How far a sharded run may be from its oracle, as a share of each tensor's largest value, and why.

Where no rounding differs a test says ``bitwise`` and takes nothing from here.
"""

ORDER_FP32 = 2e-6
"""The same fp32 sums in another order (ranks before micro-batches or after): a few roundings of 6e-8 each, seen through
gradients that cancel partly."""

ADAM_FP32 = 1e-3
"""Masters and Adam states after three fp32 steps whose gradients differ by ``ORDER_FP32``: Adam divides by the root of
the second moment, so an element whose gradient is near zero carries its relative error, which has no bound by the
tensor's largest gradient, into an update of full size. Key biases, which start at zero, show it most: 1.4e-4 was
seen."""

TRAJECTORY_BF16 = 1e-1
"""Three bf16 steps where one gradient or weight rounds to the neighbouring bf16 number (4e-3 of itself): it changes the
next forward and so every later gradient a little, and Adam turns near-zero gradients into updates of full size. Such
a rounding of its own is the sum of no_sync, which travels in bf16; 1.4e-2 was seen where bf16 is emulated, and 8.1e-2
(a bias of 16 elements, all stages alike) where the CPU multiplies bf16 itself."""

LOSS_FP32 = 2e-6
"""A loss from weights that differ by roundings of fp32."""

LOSS_BF16 = 2e-3
"""A loss around 5 computed from bf16 weights of which some are one bf16 number off, and the norm there; 5e-4 was
seen."""

NORM_FLOAT64 = 1e-6
"""The engine's promise: its norm against the same gradients' norm in float64."""

FUSED_TAIL = 1e-6
"""torch's fused CPU kernels round the last elements of a tensor, which do not fill a vector register, otherwise than
the rest (a contracted multiply-add); in a shard other elements are last. One rounding of 6e-8 a step in a state."""
