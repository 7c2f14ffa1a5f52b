"""Weights of one stage, from a checkpoint that `omni prepare` has split. Never a weight that was not read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.initialization import no_init_weights

from omni_common.errors import OmniError


def load_stage(
    folder: Path,
    stage: str,
    build: Callable[[], Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    random: bool = False,
) -> Any:
    """The module that `build` makes, with the weights of `folder`/`stage`, of `dtype` on `device`.

    Every parameter and persistent buffer must be in the files, with its shape, and nothing else. `random` takes random
    weights instead: for measuring speed only. Raises OmniError `bad_checkpoint` that names what does not fit.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Built where it will run, not on the meta device: what a module computes itself and no file has (frequencies,
        # filters, offsets) is right from the start. Weights are memory that nothing has written until a file does.
        with torch.device(device), no_init_weights():
            module = build()
    finally:
        torch.set_default_dtype(before)
    if random:
        _randomise(module)
    else:
        _fill(module, folder / stage, stage)
    module.eval().requires_grad_(False)
    return module


def _fill(module: Any, folder: Path, stage: str) -> None:
    wanted: dict[str, torch.Tensor] = module.state_dict()
    left = dict.fromkeys(wanted)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _bad(stage, f"no safetensors in {folder}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name not in left:
                        raise _bad(stage, f"{file.name} has {name}, which the model has not (or has got already)")
                    _copy(opened.get_tensor(name), wanted[name], name, stage)
                    del left[name]
        except (SafetensorError, OSError) as error:
            raise _bad(stage, f"{file} cannot be read: {error}") from None
    if left:
        raise _bad(stage, f"{len(left)} weights are missing, first {next(iter(left))}")


def _copy(tensor: torch.Tensor, into: torch.Tensor, name: str, stage: str) -> None:
    if tensor.shape != into.shape:
        raise _bad(stage, f"{name} is {[*tensor.shape]}, not {[*into.shape]}")
    # Whole numbers in place of floats are quantised weights, which mean something else.
    if tensor.is_floating_point() != into.is_floating_point():
        raise _bad(stage, f"{name} is of {tensor.dtype}, not of {into.dtype}")
    into.copy_(tensor)


def _randomise(module: Any) -> None:
    """Small enough that nothing overflows in depth."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _bad(stage: str, text: str) -> OmniError:
    return OmniError(f"the checkpoint of {stage} does not fit: {text}", code="bad_checkpoint")
