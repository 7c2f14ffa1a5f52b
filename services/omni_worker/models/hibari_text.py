"""Text to hibari's phoneme ids."""

import json
import re
import unicodedata
from typing import Final

from hibari.g2p import G2P

from omni_worker.models.hibari_graph import asset

#: Phonemes that the model sees at once; the package splits there too.
GROUP: Final = 400
#: The id that stands before and behind the phonemes.
_PAD: Final = 0
_HEADING = re.compile(r"^\s*#{1,6}\s+", re.MULTILINE)
#: Digits without end: the number reader knows names up to some power of ten only.
_LONG_NUMBER = re.compile(r"(?:\d[,.]?){16,}")
_SUPERSCRIPTS = "²³"
_BREAK = re.compile(r"(?<=[,;:—.!?…])\s+")


class Phonemizer:
    """American English, by the package's own rules, lexicon and network for unknown words."""

    def __init__(self) -> None:
        self._g2p = G2P()
        self._vocabulary: dict[str, int] = json.loads(asset("vocab.json"))

    def __call__(self, text: str) -> list[list[int]]:
        """Ids of one utterance in groups of at most `GROUP` phonemes, none when there is nothing to say.

        Markup is not interpreted, except that the marks of a heading are not read.
        """
        phonemes = self._g2p(_readable(text))
        if not any(c.isalpha() and c in self._vocabulary for c in phonemes):
            return []
        return [[_PAD, *(self._vocabulary[c] for c in g if c in self._vocabulary), _PAD] for g in _groups(phonemes)]


def _readable(text: str) -> str:
    """Without what the package's reader trips over: characters that only format, digits that are no numbers."""
    out = []
    for char in unicodedata.normalize("NFC", _HEADING.sub("", text)):
        kind = unicodedata.category(char)
        if kind == "Cc":
            out.append(" ")
        elif char.isdigit() and not char.isdecimal() and char not in _SUPERSCRIPTS:
            out.append(f" {unicodedata.digit(char)} ")
        elif char.isdecimal():
            out.append(str(unicodedata.decimal(char)))
        elif kind not in ("Cf", "Co", "Cn", "Cs", "Mn"):
            out.append(char)
    return _LONG_NUMBER.sub(lambda number: " ".join(c for c in number.group() if c.isdigit()) + " ", "".join(out))


def _groups(phonemes: str) -> list[str]:
    """Cut at clause marks where the whole is too long, at spaces where a clause is, anywhere where a word is."""
    groups: list[str] = []
    for clause in [phonemes] if len(phonemes) <= GROUP else _BREAK.split(phonemes):
        for word in [clause] if len(clause) <= GROUP else clause.split():
            for start in range(0, len(word), GROUP):
                piece = word[start : start + GROUP]
                if groups and len(groups[-1]) + 1 + len(piece) <= GROUP:
                    groups[-1] += " " + piece
                else:
                    groups.append(piece)
    return groups
