"""Lets torchvision be imported where its compiled operators do not load: beside a build of torch without CUDA.

transformers' processors of video import torchvision, whose Python code declares gradients and fake kernels of its C++
operators when it is imported. Its C++ part does not load beside such a torch, so the declarations fail for want of
operators. Nothing that the processors call uses these operators: it is enough that their names exist.
"""

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
#: Kept: a library's declarations end with it.
_libraries: list[torch.library.Library] = []


def declare_ops() -> None:
    """Call before transformers or torchvision is imported. Does nothing where torchvision's own operators load, where
    there is no torchvision, or when called again.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _libraries or _loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _loads(package: Path) -> bool:
    """Load torchvision's compiled part, as its import would; an operator declared before that would end the process."""
    try:
        for extension in package.glob("_C.*"):
            torch.ops.load_library(str(extension))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
