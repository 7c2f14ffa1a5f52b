"""Lets torchvision be imported beside a build of torch without CUDA.

transformers' processors of video import torchvision, whose Python code declares gradients and fake kernels of its C++
operators when it is imported. Its C++ part does not load beside such a torch, so the declarations fail for want of
operators. Nothing that the processors call uses these operators: it is enough that their names exist.
"""

import torch

_OPERATORS = ("nms", "qnms")
#: Kept: a library's declarations end with it.
_libraries: list[torch.library.Library] = []


def declare_ops() -> None:
    """Call before transformers or torchvision is imported. Does nothing where torch has CUDA, or when called again."""
    if _libraries or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
