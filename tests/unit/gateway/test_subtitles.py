"""SubRip and WebVTT from segments."""

from omni_common.frames import Segment
from omni_gateway.subtitles import srt, vtt

SEGMENTS = [
    Segment(0.0, 1.5, " Hello there."),
    Segment(1.5, 2.0, "  "),
    Segment(3661.9996, 3662.25, " A --> B <i>&</i>\n\nC"),
    Segment(5.0, 4.0, "late"),
]


def test_srt():
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n"
        "2\n01:01:02,000 --> 01:01:02,250\nA --> B <i>&</i> C\n\n"
        "3\n00:00:05,000 --> 00:00:05,000\nlate\n\n"
    )


def test_vtt():
    assert vtt(SEGMENTS) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.500\nHello there.\n\n"
        "01:01:02.000 --> 01:01:02.250\nA --&gt; B &lt;i&gt;&amp;&lt;/i&gt; C\n\n"
        "00:00:05.000 --> 00:00:05.000\nlate\n\n"
    )


def test_silence_makes_empty_files():
    assert srt([]) == ""
    assert vtt([]) == "WEBVTT\n\n"
