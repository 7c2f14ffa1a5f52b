"""Inputs that a stage takes only when they are complete: kept here until then, in the order in which they came.

What is kept is copied out of the producer's shared memory, so neither its arena nor the edge's credit waits for the
end. Pure; the engine thread owns it.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace

import numpy as np

from omni_common.errors import OmniError
from omni_worker.engine import Piece

#: A piece without tensors takes memory too: some ids, a text, the objects around them.
PIECE_BYTES = 1024


@dataclass(slots=True)
class _Kept:
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


class WholeInputs:
    """Keeps the pieces of the sources `held`, of one request at most `limit` bytes."""

    def __init__(self, held: Set[str], limit: int) -> None:
        self._held = held
        self._limit = limit
        #: By request and source.
        self._kept: dict[str, dict[str, _Kept]] = {}

    def take(self, request_id: str, piece: Piece, nbytes: int) -> list[Piece]:
        """What the engine gets now that `piece`, of `nbytes` of payload, is here.

        Raises OmniError when the request's inputs do not fit; `drop` the request then.
        """
        if piece.source not in self._held:
            return [piece]
        request = self._kept.setdefault(request_id, {})
        kept = request.setdefault(piece.source, _Kept())
        if piece.last:
            del request[piece.source]
            return [*kept.pieces, piece]
        kept.nbytes += nbytes + PIECE_BYTES
        if sum(each.nbytes for each in request.values()) > self._limit:
            raise OmniError(
                f"the output of {piece.source} takes more than {self._limit >> 20} MiB, and this stage waits for its "
                "end: raise the stage's hold_mib, or let it stream",
                code="input_too_large",
            )
        arrays = {name: np.array(array) for name, array in piece.arrays.items()}
        kept.pieces.append(replace(piece, arrays=arrays))
        return []

    def drop(self, request_id: str) -> None:
        """Forget a request. Idempotent."""
        self._kept.pop(request_id, None)
