"""A conversation as token ids, with slots for its media, so that nothing a user writes is taken for a control token.

The checkpoint's chat template is rendered with the users' words in place, in which a mark breaks up whatever reads as
a special token or could become one together with what follows. The special tokens found in the rendering are the
template's own; between them, without the marks, text is tokenised with special tokens switched off. Since a tokenizer
splits at special tokens before anything else, the ids are those of plain tokenisation wherever there is nothing to
defuse, and no merge across the join of template and text is lost.
"""

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2 import Environment, TemplateError

from omni_common.errors import OmniError, invalid
from omni_common.formats import THINK
from omni_common.frames import AudioPart, ImagePart, Message, Part, Prompt, TextPart, ToolCall, VideoPart

Kind = Literal["audio", "image", "video"]
#: Ids, or where a medium's ids belong.
Pieces = list[list[int] | Kind]

#: What no user can know, so no text has it before the mark is set.
MARK = f"\ue000{secrets.token_hex(16)}\ue000"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt up to where the answer begins."""

    pieces: Pieces
    #: The template has opened the reasoning.
    reasoning: bool


class ChatText:
    """The text side of a processor of transformers: template and tokenizer.

    Raises OmniError `load_failed` when the tokenizer does not keep control and text apart.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        added = self._tokenizer.added_tokens_decoder
        self._ids: dict[str, int] = {token.content: id_ for id_, token in added.items() if token.special}
        video = processor.vision_bos_token + processor.video_token + processor.vision_eos_token
        self._slots: dict[str, Kind] = {
            processor.audio_token: "audio",
            processor.image_token: "image",
            processor.video_token: "video",
            video: "video",
        }
        around = (processor.audio_bos_token, processor.audio_eos_token)
        lost = {*self._slots, *around} - {video} - self._ids.keys()
        if lost:
            raise OmniError(f"not special tokens of the tokenizer: {', '.join(sorted(lost))}", code="load_failed")
        self._split = re.compile(f"({_any_of(self._ids)})")
        self._split_sounded = re.compile(f"({_any_of([*self._ids, video])})")
        #: A chat template, and the names in it.
        self._named: tuple[Any, frozenset[str]] = ("", frozenset())
        self._begins = re.compile(f"(?={_any_of(self._ids)})")
        self._longest = max(map(len, self._ids))
        self._check()

    def render(self, prompt: Prompt, sounded: bool = False) -> Rendered:
        """The prompt up to where the answer begins.

        With `sounded` the slot of a video takes the place of the tokens around it, too. Raises OmniError 400 when the
        template cannot render the messages, or does not know what is asked of it.
        """
        settings: dict[str, Any] = {**prompt.template}
        if prompt.tools:
            settings["tools"] = self._defused(json.loads(prompt.tools))
        names = self._names() if settings else frozenset()
        for key in settings.keys() - names:
            # Efforts have a field of their own.
            param = key if key in ("tools", "reasoning_effort") else f"chat_template_kwargs.{key}"
            raise invalid(f"{param}: the model's chat template knows no {key}.", param)
        rendered = self._render(self._turns(prompt.messages), **settings)
        reasoning = rendered.rstrip().endswith(THINK)
        if prompt.prefix and reasoning:
            raise invalid(
                "tool_choice: a call cannot be forced where the model's template begins with thinking; "
                "switch that off, or use auto.",
                "tool_choice",
            )
        pieces: Pieces = []
        split = self._split_sounded if sounded else self._split
        for at, piece in enumerate(split.split(rendered)):
            if at % 2:
                pieces.append(self._slots.get(piece) or [self._ids[piece]])
            elif piece:
                pieces.append(self._encode(piece.replace(MARK, "")))
        if prompt.prefix:
            # The server's own words: their control tokens are meant.
            pieces.append(self._tokenizer(prompt.prefix, add_special_tokens=False)["input_ids"])
        return Rendered(pieces, reasoning)

    def count_media(self, ids: list[int]) -> tuple[int, int]:
        """How many of a prompt's ids stand for sounds, and how many for images and frames."""
        heard, *seen = (self._ids[getattr(self._processor, f"{kind}_token")] for kind in ("audio", "image", "video"))
        return ids.count(heard), sum(map(ids.count, seen))

    def defuse(self, text: str) -> str:
        """`text` with a mark inside all that is, or at its end begins, a special token."""
        at = {match.start() for match in self._begins.finditer(text)}
        # A template may trim what it inserts, before the next part's text follows.
        trimmed = text.rstrip()
        for start in range(max(0, len(trimmed) - self._longest), len(trimmed)):
            if any(token.startswith(trimmed[start:]) for token in self._ids):
                at.add(start)
        bounds = [0, *(start + 1 for start in sorted(at)), len(text)]
        return MARK.join(text[start:end] for start, end in pairwise(bounds))

    def _turns(self, messages: list[Message]) -> list[dict[str, Any]]:
        """The conversation as templates take it."""
        turns: list[dict[str, Any]] = []
        called: dict[str, str] = {}
        for message in messages:
            turn: dict[str, Any] = {"role": message.role, "content": self._content(message.parts)}
            if message.role == "tool":
                # Templates take it for a string.
                turn["content"] = "\n".join(self.defuse(p.text) for p in message.parts if isinstance(p, TextPart))
                turn |= {
                    "tool_call_id": self.defuse(message.tool_call_id),
                    "name": called.get(message.tool_call_id, ""),
                }
            if message.reasoning:
                turn["reasoning_content"] = self.defuse(message.reasoning)
            if message.tool_calls:
                called |= {call.id: call.name for call in message.tool_calls}
                turn["content"] = turn["content"] or ""
                turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
            turns.append(turn)
        return turns

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": self._defused(json.loads(call.arguments))}
        return {"id": self.defuse(call.id), "type": "function", "function": function}

    def _defused(self, value: Any) -> Any:
        """What JSON holds, with its strings defused."""
        if isinstance(value, str):
            return self.defuse(value)
        if isinstance(value, list):
            return [self._defused(item) for item in value]
        if isinstance(value, dict):
            return {self.defuse(key): self._defused(item) for key, item in value.items()}
        return value

    def _names(self) -> frozenset[str]:
        """Names in the chat template, its variables among them."""
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template["default"]
        if template != self._named[0]:
            # Read by the lexer: it needs to know nothing of tags that extensions of the library add.
            found = (value for _, kind, value in Environment().lex(template) if kind == "name")
            self._named = template, frozenset(found)
        return self._named[1]

    def _content(self, parts: list[Part]) -> str | list[dict[str, str]]:
        """As the library takes it; words alone as a string, which every template understands."""
        if len(parts) == 1 and isinstance(parts[0], TextPart):
            return self.defuse(parts[0].text)
        return [
            {"type": "text", "text": self.defuse(part.text)} if isinstance(part, TextPart) else {"type": kind_of(part)}
            for part in parts
        ]

    def _render(self, conversation: list[dict[str, Any]], **settings: Any) -> str:
        try:
            rendered: str = self._processor.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **settings
            )
        except (TemplateError, TypeError) as error:
            raise invalid(f"The model's chat template refuses the messages: {error}", "messages") from None
        return rendered

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _check(self) -> None:
        """A tokenizer that adds ids of its own, or whose special tokens eat spaces, would not be served rightly."""
        conversation = [{"role": "user", "content": " Hello "}]
        plain = self._tokenizer(self._render(conversation))["input_ids"]
        pieces = self.render(Prompt([Message("user", [TextPart(" Hello ")])])).pieces
        if plain != [id_ for piece in pieces for id_ in piece]:
            raise OmniError("the tokenizer does not split at special tokens alone", code="load_failed")


def kind_of(part: AudioPart | ImagePart | VideoPart) -> Kind:
    """What the slot of a medium is called."""
    if isinstance(part, AudioPart):
        return "audio"
    return "image" if isinstance(part, ImagePart) else "video"


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern that prefers the longest, as tokenizers do."""
    return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
