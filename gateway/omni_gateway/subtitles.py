"""Recognised speech as SubRip and WebVTT."""

import html
from collections.abc import Iterable, Iterator

from omni_common.frames import Segment

Cue = tuple[str, str, str]


def srt(segments: Iterable[Segment]) -> str:
    """Numbered from 1, times as `00:00:01,500`."""
    cues = enumerate(_cues(segments, ","), 1)
    return "".join(f"{number}\n{start} --> {end}\n{text}\n\n" for number, (start, end, text) in cues)


def vtt(segments: Iterable[Segment]) -> str:
    """Times as `00:00:01.500`; `&`, `<` and `>`, which are markup there, are escaped."""
    cues = _cues(segments, ".")
    return "WEBVTT\n\n" + "".join(
        f"{start} --> {end}\n{html.escape(text, quote=False)}\n\n" for start, end, text in cues
    )


def _cues(segments: Iterable[Segment], point: str) -> Iterator[Cue]:
    for segment in segments:
        # A line break or a blank line would end the cue.
        if text := " ".join(segment.text.split()):
            yield _time(segment.start_s, point), _time(max(segment.start_s, segment.end_s), point), text


def _time(seconds: float, point: str) -> str:
    whole, ms = divmod(round(max(seconds, 0.0) * 1000), 1000)
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    return f"{hours:02}:{m:02}:{s:02}{point}{ms:03}"
