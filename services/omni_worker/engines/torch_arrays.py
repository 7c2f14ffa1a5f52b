"""Between torch and numpy, bfloat16 included, which numpy has by ml_dtypes."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def to_numpy(tensor: Tensor) -> Array:
    """A C-contiguous array of the tensor's dtype and shape that nobody else writes."""
    held = tensor.detach().to("cpu", copy=True).contiguous()
    if held.dtype == torch.bfloat16:
        return held.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return held.numpy()


def to_torch(array: Array, device: torch.device) -> Tensor:
    """A tensor with memory of its own: what is read from shared memory can be let go."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)
