"""Every upload that a client may send becomes the right samples, and everything else a 400 that gives nothing away."""

import asyncio
import io
import random
import socket
import struct

import av
import numpy as np
import pytest
import soundfile

from omni_common.errors import OmniError
from omni_gateway.media.decode import decode_at_own_rate, decode_audio
from omni_gateway.media.encode import Encoder, encode, wav_header

RATE = 16_000
LSB = 1 / 32768


def tone(rate, hz=440.0, seconds=1.5, level=0.5):
    return level * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)


def wav(samples, rate, subtype="PCM_16", kind="WAV"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def container(kind, codec, rate=48_000, layout="stereo", seconds=1.5):
    """A file made by libav, its tone at 440 Hz on every channel."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.codec_context.layout = layout
        channels = stream.codec_context.layout.nb_channels
        block = np.ascontiguousarray(np.repeat(tone(rate, seconds=seconds)[:, None], channels, 1).reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(block.astype(np.float32), format="flt", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))
    return file.getvalue()


async def decode(data, **limits):
    return await decode_audio(data, **{"max_seconds": 30.0, "max_bytes": 1 << 25, "param": "file", **limits})


async def refusal(data, code="invalid_audio", status=400, **limits):
    with pytest.raises(OmniError) as caught:
        await decode(data, **limits)
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "file")
    return caught.value.message


def peak_hz(samples):
    return np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * RATE / len(samples)


def inner(samples):
    """Without the edges, where a resampler's filter rings."""
    return samples[RATE // 10 : -RATE // 10]


@pytest.mark.parametrize(
    ("subtype", "tolerance"),
    [("PCM_U8", 1 / 128), ("PCM_16", LSB), ("PCM_24", LSB), ("PCM_32", LSB), ("FLOAT", LSB), ("DOUBLE", LSB)],
)
async def test_wav_of_every_depth(subtype, tolerance):
    samples = tone(RATE)
    heard = await decode(wav(samples, RATE, subtype))
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, samples, atol=tolerance)


async def test_full_scale_does_not_wrap():
    square = np.where(tone(RATE, 100.0) > 0, 1.0, -1.0)
    for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT"):
        np.testing.assert_allclose(await decode(wav(square, RATE, subtype)), square, atol=2 * LSB)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (22_050, 1), (44_100, 2), (48_000, 2), (48_000, 6)])
async def test_rates_and_channels_become_16_khz_mono(rate, channels):
    data = wav(np.repeat(tone(rate)[:, None], channels, axis=1), rate)
    heard = await decode(data)
    assert len(heard) == pytest.approx(1.5 * RATE, abs=1)
    np.testing.assert_allclose(inner(heard), inner(tone(RATE)[: len(heard)]), atol=2e-3)


async def test_mixdown_weights_channels_and_never_clips():
    left = np.zeros((RATE, 2))
    left[:, 0] = tone(RATE, seconds=1.0)
    assert np.abs(inner(await decode(wav(left, RATE)))).max() == pytest.approx(0.25, abs=1e-3)
    loud = np.ones((RATE, 6)) * tone(RATE, seconds=1.0, level=1.0)[:, None]
    assert np.abs(await decode(wav(loud, RATE))).max() <= 1.001
    effects = np.zeros((RATE, 6))
    effects[:, 3] = tone(RATE, seconds=1.0)
    assert np.abs(await decode(wav(effects, RATE))).max() < 1e-4


@pytest.mark.parametrize("hz", [8_100.0, 9_000.0, 12_000.0, 20_000.0])
async def test_nothing_above_8_khz_comes_back_as_an_alias(hz):
    heard = inner(await decode(wav(tone(44_100, hz), 44_100, "FLOAT")))
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard)))) / (len(heard) / 4)
    assert 20 * np.log10(spectrum.max() / 0.5) < -60.0


@pytest.mark.parametrize("fmt", ["wav", "mp3", "flac", "opus", "aac"])
@pytest.mark.parametrize("whole", [True, False])
async def test_what_this_server_sends_it_also_reads(fmt, whole):
    samples = tone(24_000).astype(np.float32)
    encoder = Encoder(fmt, 24_000, whole=whole)
    data = await encoder.feed(samples) + await encoder.finish()
    await encoder.close()
    heard = await decode(data)
    assert len(heard) / RATE == pytest.approx(1.5, abs=0.1)
    assert peak_hz(heard) == pytest.approx(440.0, abs=1.0)


@pytest.mark.parametrize(
    ("kind", "codec", "layout"),
    [
        ("webm", "libopus", "stereo"),
        ("mp4", "aac", "stereo"),
        ("ipod", "aac", "mono"),
        ("mov", "alac", "stereo"),
        ("aiff", "pcm_s16be", "stereo"),
        ("flac", "flac", "5.1"),
        ("mp4", "aac", "5.1"),
        ("wav", "pcm_mulaw", "mono"),
    ],
)
async def test_containers_of_browsers_and_phones(kind, codec, layout):
    heard = await decode(container(kind, codec, layout=layout))
    assert len(heard) / RATE == pytest.approx(1.5, abs=0.1)
    assert peak_hz(heard) == pytest.approx(440.0, abs=1.0)
    assert np.sqrt(np.mean(inner(heard) ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.06)


async def test_recorders_that_did_not_know_the_size():
    body = (tone(RATE) * 32767).astype("<i2").tobytes()
    for size in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        header = bytearray(wav_header(RATE, None))
        header[4:8] = header[40:44] = struct.pack("<I", size)
        assert len(await decode(bytes(header) + body)) == len(body) // 2


async def test_tags_in_any_encoding_are_no_reason_to_refuse():
    data = await encode(tone(24_000).astype(np.float32), "mp3", 24_000)
    title = b"TIT2" + struct.pack(">I", 6) + b"\0\0" + b"\0caf\xe9\x80"
    size = len(title)
    tagged = b"ID3\x03\0\0" + bytes([0, 0, size >> 7, size & 127]) + title + data
    assert len(await decode(tagged)) > RATE
    latin = wav(tone(RATE), RATE)
    info = b"INFOINAM" + struct.pack("<I", 4) + b"caf\xe9"
    listed = latin + b"LIST" + struct.pack("<I", len(info)) + info
    assert len(await decode(listed)) == len(tone(RATE))


# ------------------------------------------------------------------------------------------------------- refusals


async def test_limits_come_before_the_work_and_hold_during_it():
    data = wav(tone(RATE, seconds=3.0), RATE)
    await refusal(data, "audio_too_large", 413, max_bytes=len(data) - 1)
    for bytes_ in (data, await encode(tone(24_000, seconds=3.0).astype(np.float32), "mp3", 24_000)):
        message = await refusal(bytes_, "audio_too_long", max_seconds=2.0)
        assert "2 s" in message
    # The header says nothing of its length here; the decoder has to notice on the way.
    encoder = Encoder("flac", 24_000)
    endless = b"".join([await encoder.feed(np.zeros(24_000, np.float32)) for _ in range(120)])
    await encoder.close()
    await refusal(endless, "audio_too_long", max_seconds=2.0)


async def test_a_sample_rate_that_would_explode_is_refused():
    header = bytearray(wav_header(1, 20_000))
    await refusal(bytes(header) + bytes(40_000), max_seconds=1e9)


@pytest.mark.parametrize("fmt", ["wav", "flac", "m4a"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.01, 0.5, -128])
async def test_a_file_that_states_more_than_it_holds_is_refused(fmt, keep):
    if fmt == "m4a":
        data = container("mov", "alac")
    else:
        data = await encode(tone(24_000).astype(np.float32), fmt, 24_000)
    cut = data[:keep] if keep < 0 else data[: int(len(data) * keep)]
    await refusal(cut)


@pytest.mark.parametrize("fmt", ["mp3", "opus", "aac"])
async def test_streams_may_be_cut_anywhere_but_not_to_nothing(fmt):
    data = await encode(tone(24_000).astype(np.float32), fmt, 24_000)
    assert len(await decode(data[: len(data) // 2])) / RATE == pytest.approx(0.75, abs=0.1)
    await refusal(data[: len(data) // 100])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"hello, this is a text and no audio\n" * 100,
        b"<html><body>no</body></html>",
        b"RIFF\xff\xff\xff\xffWAVEfmt ",
        b"RIFF$\0\0\0WAVE",
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        wav_header(16_000, 0),
        b"ID3\x04\0\0\0\0\0\0",
        b"OggS" + bytes(200),
    ],
)
async def test_what_is_no_audio_is_refused(data):
    await refusal(data)


async def test_a_picture_or_a_video_without_sound_is_refused():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    assert "no audio track" in await refusal(file.getvalue())


async def test_samples_that_are_not_numbers_are_refused():
    samples = tone(RATE).astype(np.float32)
    samples[99] = np.nan
    await refusal(wav(samples, RATE, "FLOAT"))


async def test_playlists_open_neither_files_nor_addresses(tmp_path):
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav(tone(RATE), RATE))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.ts"
        port = server.getsockname()[1]
        mpd = f"<MPD><Period><AdaptationSet><BaseURL>{address}</BaseURL></AdaptationSet></Period></MPD>"
        traps = [
            *(
                f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:5\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:5,\n{target}\n"
                f"#EXT-X-ENDLIST\n"
                for target in (address, secret, f"file://{secret}", f"concat:{secret}|{secret}", f"subfile:{secret}")
            ),
            f"ffconcat version 1.0\nfile '{secret}'\n",
            f"ffconcat version 1.0\nfile {address}\n",
            f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio {port} RTP/AVP 0\n",
            f'<?xml version="1.0"?>{mpd}',
            f"[playlist]\nFile1={address}\n",
            f"RTSPtextRTSP://127.0.0.1:{port}/x",
            str(secret),
            address,
        ]
        for trap in traps:
            message = await refusal(trap.encode())
            assert str(tmp_path) not in message
            assert "127.0.0.1" not in message
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_the_whitelist_is_what_stops_playlists(tmp_path, monkeypatch):
    """The same bytes do reach the file when nothing forbids it: the test above can fail."""
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav(tone(RATE), RATE))
    monkeypatch.setattr("omni_gateway.media.decode._OPTIONS", {"safe": "0"})
    playlist = f"ffconcat version 1.0\nfile '{secret}'\n".encode()
    assert len(await decode(playlist)) == len(tone(RATE))


async def test_random_and_flipped_bytes_never_do_more_than_refuse():
    dice = random.Random(3)
    good = [await encode(tone(24_000).astype(np.float32), fmt, 24_000) for fmt in ("wav", "mp3", "flac", "opus", "aac")]
    good.append(container("webm", "libopus"))
    good.append(container("mp4", "aac"))
    outcomes = {"ok": 0, "invalid_audio": 0, "audio_too_long": 0}
    for round_ in range(30):
        for whole in [*good, dice.randbytes(4_000)]:
            data = bytearray(whole)
            for _ in range(dice.choice((1, 10, 200))):
                data[dice.randrange(len(data))] = dice.randrange(256)
            try:
                heard = await decode(bytes(data))
            except OmniError as error:
                assert error.status == 400, round_
                outcomes[error.code] += 1
            else:
                assert np.isfinite(heard).all()
                outcomes["ok"] += 1
    assert min(outcomes["ok"], outcomes["invalid_audio"]) > 20
    assert len(await decode(good[0])) == len(tone(RATE))


async def test_cancelling_ends_the_work_and_leaves_the_pool_usable():
    long = await encode(np.zeros(24_000 * 600, np.float32), "flac", 24_000)
    tasks = [asyncio.create_task(decode(long, max_seconds=1e6)) for _ in range(8)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(d, asyncio.CancelledError) for d in done)
    assert len(await decode(wav(tone(RATE), RATE))) == len(tone(RATE))


async def test_the_loop_turns_while_audio_is_decoded():
    long = await encode(np.tile(tone(24_000), 40).astype(np.float32), "mp3", 24_000)
    task = asyncio.create_task(decode(long, max_seconds=1e6))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    await task
    assert turns > 3


# ------------------------------------------------------------------------------------------------------- the own rate


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 16_000, 24_000, 44_100, 48_000])
async def test_a_sound_keeps_its_own_rate(rate):
    sound = tone(rate)
    samples, own = await decode_at_own_rate(wav(sound, rate), max_seconds=2.0, max_bytes=1 << 25)
    assert own == rate and samples.dtype == np.float32
    assert len(samples) == len(sound) and np.abs(samples - sound).max() <= LSB


@pytest.mark.parametrize("rate", [88_200, 96_000, 192_000])
async def test_a_rate_beyond_what_is_heard_is_lowered(rate):
    samples, own = await decode_at_own_rate(wav(tone(rate), rate), max_seconds=2.0, max_bytes=1 << 25)
    assert own == 48_000 and len(samples) == pytest.approx(1.5 * own, abs=2)


async def test_the_limits_hold_at_the_own_rate():
    for data, limits, code in (
        (wav(tone(8_000), 8_000), {"max_seconds": 1.4}, "audio_too_long"),
        (container("mp3", "libmp3lame"), {"max_seconds": 1.4}, "audio_too_long"),
        (wav(tone(8_000), 8_000), {"max_bytes": 1000}, "audio_too_large"),
        (b"", {}, "invalid_audio"),
        (wav(tone(8_000)[:0], 8_000), {}, "invalid_audio"),
        (wav(tone(1_000), 1_000), {}, "invalid_audio"),
    ):
        with pytest.raises(OmniError) as caught:
            await decode_at_own_rate(data, **{"max_seconds": 2.0, "max_bytes": 1 << 25, "param": "file", **limits})
        assert (caught.value.code, caught.value.param) == (code, "file")
