"""The messages of a chat request as a stage takes them: checked against limits, media fetched and decoded."""

import asyncio

from omni_common.errors import invalid
from omni_common.frames import AudioPart, ImagePart, Message, TextPart, ToolCall, VideoPart
from omni_common.frames import Part as GivenPart
from omni_common.pipeline import Limits, Pipeline
from omni_gateway.audio_input import RATE
from omni_gateway.audio_store import AudioStore
from omni_gateway.chat_schema import AudioRef, ChatMessage, MediaUrl, Part
from omni_gateway.chat_tools import read_calls
from omni_gateway.errors import quoted
from omni_gateway.media.decode import decode_audio
from omni_gateway.media.fetch import Fetcher
from omni_gateway.media.image import decode_image
from omni_gateway.media.inline import Kind, decode_base64, decode_data_url
from omni_gateway.media.video import VideoLimits, decode_video
from omni_gateway.media_input import Media

_FORMATS = frozenset({"wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm"})
#: Type of a content part -> what it holds.
_KINDS: dict[str, Kind] = {
    "input_audio": "audio",
    "audio_url": "audio",
    "image_url": "image",
    "video_url": "video",
}
_TASK = "chat"
_ROLES = ("system", "developer", "user", "assistant")
#: Pixels of an image that is to be looked at in low detail.
_LOW_PIXELS = 512 * 512
#: Seconds for all that one conversation has to be fetched.
_FETCH_S = 60.0


class Reader:
    """Reads the messages of one conversation, in order; `media` is what they held."""

    def __init__(
        self, pipeline: Pipeline, store: AudioStore, owner: str, fetcher: Fetcher, hears_videos: bool = False
    ) -> None:
        """`owner` is whose audio ids in `store` may be named. `hears_videos`: videos come with their sound."""
        self.media = Media()
        self._pipeline = pipeline
        self._store = store
        self._owner = owner
        self._fetcher = fetcher
        self._hears_videos = hears_videos
        limits = pipeline.limits
        self._text_left = limits.text_chars
        self._seconds_left = limits.audio_s
        self._media_left = limits.media
        self._bytes_left = limits.media_mib << 20
        self._fetch_left = _FETCH_S
        #: Ids of the calls so far.
        self._called: set[str] = set()

    async def message(self, index: int, message: ChatMessage) -> Message:
        """Raises OmniError 400 (413 for a medium that is too large) with the path of the field."""
        where = f"messages[{index}]"
        self._check_role(message, where)
        role = "system" if message.role == "developer" else message.role
        calls = self._calls(message, f"{where}.tool_calls")
        parts: list[GivenPart] = []
        content = message.content
        if isinstance(content, str):
            parts.append(self._text(content, f"{where}.content"))
        elif content is not None:
            for number, part in enumerate(content):
                parts.append(await self._part(part, role, f"{where}.content[{number}]"))
        if message.audio is not None:
            spoken = self._spoken(message.audio, role, f"{where}.audio")
            if not any(isinstance(part, TextPart) and part.text for part in parts):
                parts = [self._text(spoken, f"{where}.audio.id")]
        elif (not parts and not calls) or (
            role == "user" and all(isinstance(p, TextPart) and not p.text.strip() for p in parts)
        ):
            raise invalid(f"{where}.content must not be empty", f"{where}.content")
        return Message(
            role=role,  # type: ignore[arg-type]
            parts=parts,
            tool_calls=calls,
            reasoning=self._reasoning(message, where),
            tool_call_id=message.tool_call_id or "" if role == "tool" else "",
        )

    def _check_role(self, message: ChatMessage, where: str) -> None:
        tools = bool(self._pipeline.formats.tools)
        roles = (*_ROLES, "tool") if tools else _ROLES
        if message.role not in roles:
            text = f"{where}.role: {quoted(message.role)} is not supported; use {', '.join(roles[:-1])} or {roles[-1]}"
            raise invalid(text, f"{where}.role")
        if message.role == "tool" and message.tool_call_id not in self._called:
            where += ".tool_call_id"
            if message.tool_call_id is None:
                raise invalid(f"{where} is missing", where, code="missing_required_parameter")
            raise invalid(f"{where}: no message before has a call {quoted(message.tool_call_id)}", where)

    def _calls(self, message: ChatMessage, where: str) -> list[ToolCall]:
        if not message.tool_calls:
            return []
        if message.role != "assistant":
            raise invalid(f"{where} is only allowed in an assistant message", where)
        if not self._pipeline.formats.tools:
            raise invalid(f"{where}: {self._pipeline.name} calls no tools", where, code="unsupported_parameter")
        calls = read_calls(message.tool_calls, where, self._text)
        self._called.update(call.id for call in calls)
        return calls

    def _reasoning(self, message: ChatMessage, where: str) -> str:
        """Of an earlier answer; a model that does not think is not told of it."""
        name = "reasoning_content" if message.reasoning_content else "reasoning"
        thought = getattr(message, name)
        if message.role != "assistant" or not self._pipeline.formats.reasoning or not isinstance(thought, str):
            return ""
        return self._text(thought, f"{where}.{name}").text

    async def _part(self, part: Part, role: str, where: str) -> GivenPart:
        if part.type == "text":
            if part.text is None:
                raise invalid(f"{where}.text is missing", f"{where}.text", code="missing_required_parameter")
            return self._text(part.text, f"{where}.text")
        takes = self._pipeline.tasks[_TASK].input
        kind = _KINDS.get(part.type)
        if kind is None or kind not in takes:
            types = ", ".join(name for name, holds in _KINDS.items() if holds in takes) or "nothing else"
            text = f"{where}: {self._pipeline.name} takes text and {types}, not {quoted(part.type)}"
            raise invalid(text, where)
        if role != "user":
            raise invalid(f"{where}: {self._pipeline.name} takes no {kind} in a {role} message", where)
        if part.type == "input_audio":
            return await self._input_audio(part, f"{where}.input_audio")
        if kind == "audio":
            return await self._audio_url(part.audio_url, f"{where}.audio_url")
        if kind == "image":
            return await self._image(part.image_url, f"{where}.image_url")
        return await self._video(part.video_url, f"{where}.video_url")

    def _text(self, text: str, where: str) -> TextPart:
        self._text_left -= len(text)
        if self._text_left < 0:
            limit = self._limits.text_chars
            raise invalid(f"the messages hold more than {limit} characters", where, code="string_above_max_length")
        return TextPart(text=text)

    async def _input_audio(self, part: Part, where: str) -> AudioPart:
        given = part.input_audio
        if given is None:
            raise invalid(f"{where} is missing", where, code="missing_required_parameter")
        if given.format is not None and given.format.lower() not in _FORMATS:
            valid = ", ".join(sorted(_FORMATS))
            raise invalid(f"{where}.format: {quoted(given.format)} is not one of {valid}", f"{where}.format")
        where += ".data"
        return await self._audio(await decode_base64(given.data, "audio", self._limits.audio_mib << 20, where), where)

    async def _audio_url(self, ref: str | MediaUrl | None, where: str) -> AudioPart:
        return await self._audio(*await self._load(ref, "audio", self._limits.audio_mib, where))

    async def _audio(self, data: bytes, where: str) -> AudioPart:
        samples = await decode_audio(
            data,
            max_seconds=self._seconds(where),
            max_bytes=self._limits.audio_mib << 20,
            rate=RATE,
            param=where,
        )
        self._seconds_left -= len(samples) / RATE
        self.media.audios.append(samples)
        return AudioPart(index=len(self.media.audios) - 1)

    async def _image(self, ref: str | MediaUrl | None, where: str) -> ImagePart:
        limits = self._limits
        data, where = await self._load(ref, "image", limits.image_mib, where)
        low = isinstance(ref, MediaUrl) and ref.detail == "low"
        pixels = await decode_image(
            data,
            max_bytes=limits.image_mib << 20,
            max_source_pixels=limits.image_source_pixels,
            max_pixels=min(limits.image_pixels, _LOW_PIXELS) if low else limits.image_pixels,
            param=where,
        )
        self._keep(pixels.nbytes, where)
        self.media.images.append(pixels)
        return ImagePart(index=len(self.media.images) - 1)

    async def _video(self, ref: str | MediaUrl | None, where: str) -> VideoPart:
        if self._hears_videos and "audio" not in self._pipeline.tasks[_TASK].input:
            text = f"use_audio_in_video: {self._pipeline.name} takes no audio"
            raise invalid(text, "use_audio_in_video")
        limits = self._limits
        data, where = await self._load(ref, "video", limits.video_mib, where)
        allowed = VideoLimits(
            max_seconds=limits.video_s,
            max_bytes=limits.video_mib << 20,
            max_source_pixels=limits.video_source_pixels,
            fps=limits.video_fps,
            max_frames=limits.video_frames,
            max_pixels=limits.video_pixels,
        )
        sound_s = self._seconds(where) if self._hears_videos else None
        video = await decode_video(data, allowed, param=where, sound_s=sound_s, rate=RATE)
        self._keep(video.frames.nbytes, where)
        self.media.videos.append((video.frames, video.fps))
        number = len(self.media.videos) - 1
        if not self._hears_videos:
            return VideoPart(index=number)
        self._seconds_left -= len(video.sound) / RATE
        self.media.audios.append(video.sound)
        return VideoPart(index=number, audio=len(self.media.audios) - 1)

    async def _load(self, ref: str | MediaUrl | None, kind: Kind, mib: int, where: str) -> tuple[bytes, str]:
        """The bytes behind a URL, and the path of the field that it stands in."""
        if ref is None:
            raise invalid(f"{where} is missing", where, code="missing_required_parameter")
        url, where = (ref.url, f"{where}.url") if isinstance(ref, MediaUrl) else (ref, where)
        self._media_left -= 1
        if self._media_left < 0:
            text = f"the messages hold more than {self._limits.media} images, videos and other URLs"
            raise invalid(text, where, code="too_many_media")
        if url[:5].lower() == "data:":
            return await decode_data_url(url, kind, mib << 20, where), where
        loop = asyncio.get_running_loop()
        since = loop.time()
        data = await self._fetcher.fetch(url, kind, max_bytes=mib << 20, within_s=self._fetch_left, param=where)
        self._fetch_left -= loop.time() - since
        return data, where

    def _seconds(self, where: str) -> float:
        """Of sound that the conversation may still hold."""
        if self._seconds_left <= 0:
            text = f"all audio together is longer than {self._limits.audio_s:g} s"
            raise invalid(text, where, code="audio_too_long")
        return self._seconds_left

    def _keep(self, nbytes: int, where: str) -> None:
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            text = f"all images and videos together have more than {self._limits.media_mib} MiB when decoded"
            raise invalid(text, where, code="media_too_large")

    def _spoken(self, ref: AudioRef, role: str, where: str) -> str:
        if role != "assistant":
            raise invalid(f"{where} is only allowed in an assistant message", where)
        transcript = self._store.get(self._owner, ref.id)
        if transcript is None:
            text = f"{where}.id: no audio {quoted(ref.id)} is known; it may have expired"
            raise invalid(text, f"{where}.id", code="audio_not_found")
        return transcript

    @property
    def _limits(self) -> Limits:
        return self._pipeline.limits
