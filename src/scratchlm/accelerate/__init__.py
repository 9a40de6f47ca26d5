"""Everything that makes the same model faster: fusions, kernels, shadow weights, decoders.

    accelerate(model)     in place: the model computes the same, faster where a fusion applies
    plain(model)          takes it back
    explain(model)        layer by layer, what runs, and why the rest does not

Nothing else needs this room: without it everything works, slower.
"""

# The accelerated layers enter themselves in the table as they are imported.
from scratchlm.accelerate import attention, layers, models, quantized  # noqa: F401
from scratchlm.accelerate.apply import Row, accelerate, explain, plain
from scratchlm.accelerate.table import FUSIONS, Fusion, why_not_plain

__all__ = ["FUSIONS", "Fusion", "Row", "accelerate", "explain", "plain", "why_not_plain"]
