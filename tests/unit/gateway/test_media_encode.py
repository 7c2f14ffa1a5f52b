"""Every output format: one container, the right bytes, rate, length, level and pitch; and encoders that are dropped."""

import asyncio
import contextlib
import io
import random
import struct
import wave

import av
import numpy as np
import pytest
import soundfile

from omni_common.errors import OmniError
from omni_gateway.media.encode import CONTENT_TYPES, FORMATS, PCM_RATE, Encoder, encode, to_int16, wav_header
from omni_gateway.media.tempo import Tempo

RATE = 24_000
SECONDS = 2.37
MAGIC = {
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
    "wav": (b"RIFF",),
    "flac": (b"fLaC",),
    "opus": (b"OggS",),
    "aac": (b"\xff\xf1", b"\xff\xf9"),
}
PCM = ("pcm", "pcm16")
EXACT = ("wav", "flac", "opus", *PCM)


def tone(seconds=SECONDS, rate=RATE, hz=440.0, level=0.5):
    return (level * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


async def streamed(samples, fmt, rate=RATE, block=2_000):
    encoder = Encoder(fmt, rate)
    try:
        pieces = [await encoder.feed(samples[i : i + block]) for i in range(0, len(samples), block)]
        return [*pieces, await encoder.finish()]
    finally:
        await encoder.close()


def decoded(data, fmt):
    """Samples as float [n], and their rate, by libav."""
    if fmt in PCM:
        return np.frombuffer(data, "<i2") / 32768.0, PCM_RATE
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        assert stream.codec_context.channels == 1
        resampler = av.AudioResampler(format="s16", layout="mono", rate=stream.rate)
        frames = [out for frame in container.decode(stream) for out in resampler.resample(frame)]
        return np.concatenate([f.to_ndarray()[0] for f in frames]) / 32768.0, stream.rate


def pitch(samples, rate):
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return np.argmax(spectrum) * rate / len(samples)


@pytest.mark.parametrize("way", ["streamed", "whole"])
@pytest.mark.parametrize("fmt", FORMATS)
async def test_format_decodes_to_the_tone(fmt, way):
    samples = tone()
    data = await encode(samples, fmt, RATE) if way == "whole" else b"".join(await streamed(samples, fmt))
    if fmt not in PCM:
        assert data.startswith(MAGIC[fmt])
    heard, rate = decoded(data, fmt)
    assert rate == (48_000 if fmt == "opus" else RATE)
    extra = len(heard) / rate - SECONDS
    if fmt in EXACT or (fmt, way) == ("mp3", "whole"):
        assert extra == pytest.approx(0.0, abs=1e-9)
    else:
        assert 0.0 < extra < 0.1
    assert pitch(heard, rate) == pytest.approx(440.0, abs=0.5)
    middle = heard[len(heard) // 4 : 3 * len(heard) // 4]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.06)
    if fmt in ("wav", "flac", *PCM):
        np.testing.assert_array_equal(heard * 32768.0, to_int16(samples))


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "pcm16"])
async def test_other_model_rates_keep_pitch_and_duration(fmt, rate):
    heard, heard_rate = decoded(b"".join(await streamed(tone(rate=rate), fmt, rate)), fmt)
    assert len(heard) / heard_rate == pytest.approx(SECONDS, abs=1e-4 if fmt in EXACT else 0.1)
    assert pitch(heard, heard_rate) == pytest.approx(440.0, abs=0.5)
    if fmt == "wav":
        assert heard_rate == rate


@pytest.mark.parametrize(("fmt", "mark"), [("wav", b"RIFF"), ("flac", b"fLaC"), ("mp3", b"ID3"), ("aac", None)])
async def test_one_container_however_many_pieces(fmt, mark):
    data = b"".join(await streamed(tone(), fmt, block=311))
    if mark:
        assert data.count(mark) == 1
    assert data == b"".join(await streamed(tone(), fmt, block=5_000))


async def test_ogg_is_one_logical_stream():
    data = b"".join(await streamed(tone(), "opus"))
    serials, at, ends = set(), 0, 0
    while at < len(data):
        assert data[at : at + 4] == b"OggS"
        serials.add(data[at + 14 : at + 18])
        ends += bool(data[at + 5] & 4)
        segments = data[at + 26]
        at += 27 + segments + sum(data[at + 27 : at + 27 + segments])
    assert len(serials) == 1
    assert ends == 1
    assert data.count(b"OpusHead") == 1


@pytest.mark.parametrize("fmt", FORMATS)
async def test_bytes_leave_while_sound_is_fed(fmt):
    pieces = await streamed(tone(), fmt)
    half = sum(map(len, pieces[: len(pieces) // 2]))
    assert half > 0.3 * sum(map(len, pieces))


async def test_streamed_wav_opens_in_wave_and_soundfile():
    pieces = await streamed(tone(), "wav")
    assert len(pieces[0]) == 44 + 2 * 2_000
    data = b"".join(pieces)
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    with wave.open(io.BytesIO(pieces[0])) as first:
        assert (first.getframerate(), first.getnchannels(), first.getsampwidth()) == (RATE, 1, 2)
    with wave.open(io.BytesIO(data)) as reader:
        frames = reader.readframes(10**7)
    np.testing.assert_array_equal(np.frombuffer(frames, "<i2"), to_int16(tone()))
    heard, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(heard, to_int16(tone()))


async def test_whole_files_state_their_length():
    samples = tone()
    with wave.open(io.BytesIO(await encode(samples, "wav", RATE))) as reader:
        assert reader.getnframes() == len(samples)
    for fmt in ("flac", "mp3"):
        assert soundfile.info(io.BytesIO(await encode(samples, fmt, RATE))).frames == len(samples)


def test_wav_header_has_44_bytes_and_true_sizes():
    header = wav_header(16_000, 10)
    assert len(header) == len(wav_header(16_000, None)) == 44
    assert struct.unpack("<I", header[4:8]) == (56,)
    assert struct.unpack("<I", header[40:44]) == (20,)
    assert struct.unpack("<II", header[24:32]) == (16_000, 32_000)


def test_full_scale_is_clipped_and_symmetric():
    given = np.array([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5], np.float32)
    assert to_int16(given).tolist() == [-32767, -32767, -16384, 0, 16384, 32767, 32767]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["wav", "mp3", "pcm"])
async def test_not_a_number_is_an_error_that_names_the_stage(fmt, bad):
    encoder = Encoder(fmt, RATE, stage="code2wav")
    samples = tone(0.1)
    samples[7] = bad
    with pytest.raises(OmniError) as caught:
        await encoder.feed(samples)
    assert (caught.value.status, caught.value.code, caught.value.stage) == (500, "numerical_error", "code2wav")
    await encoder.close()


def test_unknown_format_is_refused_with_the_list():
    with pytest.raises(OmniError, match="mp3, wav, flac") as caught:
        Encoder("m4a", RATE)
    assert caught.value.status == 400
    assert set(CONTENT_TYPES) == set(FORMATS)


@pytest.mark.parametrize("fmt", FORMATS)
async def test_close_at_any_point_and_twice(fmt):
    for fed in (0, 1, 3):
        encoder = Encoder(fmt, RATE)
        for _ in range(fed):
            await encoder.feed(tone(0.1))
        await encoder.close()
        await encoder.close()
        with pytest.raises(RuntimeError, match="closed"):
            await encoder.feed(tone(0.1))


async def test_fifty_encoders_at_once_half_of_them_dropped():
    dice = random.Random(7)
    kinds = ["mp3", "opus", "flac", "aac", "wav"]
    alone = {fmt: b"".join(await streamed(tone(1.0), fmt)) for fmt in kinds}

    def same(fmt, data):
        # libav draws the serial of an Ogg stream: pages differ in it and in their checksum, never in length.
        return len(data) == len(alone[fmt]) if fmt == "opus" else data == alone[fmt]

    for _ in range(4):
        tasks = {asyncio.create_task(streamed(tone(1.0), fmt)): fmt for fmt in kinds * 10}
        victims = dice.sample(list(tasks), 25)
        for victim in victims:
            await asyncio.sleep(dice.random() / 500)
            victim.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for (task, fmt), pieces in zip(tasks.items(), done, strict=True):
            if isinstance(pieces, asyncio.CancelledError):
                assert task in victims
            else:
                assert same(fmt, b"".join(pieces))


async def test_cancelled_feed_then_close_and_others_go_on():
    encoder = Encoder("flac", RATE)
    task = asyncio.create_task(encoder.feed(tone(60.0)))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await encoder.close()
    assert (await encode(tone(), "flac", RATE)).startswith(b"fLaC")


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.8, 1.5, 2.0, 4.0])
async def test_tempo_changes_duration_not_pitch(factor):
    tempo, samples = Tempo(RATE, factor), tone()
    blocks = [await tempo.feed(samples[i : i + 2_400]) for i in range(0, len(samples), 2_400)]
    blocks.append(await tempo.finish())
    await tempo.close()
    heard = np.concatenate(blocks)
    assert len(heard) / RATE == pytest.approx(SECONDS / factor, rel=0.02)
    assert pitch(heard, RATE) == pytest.approx(440.0, abs=2.0)
    assert np.abs(heard).max() == pytest.approx(0.5, abs=0.02)


async def test_tempo_without_input_gives_nothing():
    tempo = Tempo(RATE, 2.0)
    assert (await tempo.finish()).size == 0
    await tempo.close()
