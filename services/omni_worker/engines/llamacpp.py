"""Autoregressive text from a GGUF file, through llama.cpp.

A token is a call: the engine says "this slot holds these ids, what comes next" and llama.cpp, whose slot still has the
keys and values of all ids but the last, computes one row. Against llama.cpp's own stream that costs 0.5 ms of 8 ms a
token for one job and 1.2 ms for each of four (one thread, SmolLM2-135M), and makes the engine plain: every id is seen
(the stream swallows those of unfinished characters), sampling is keyed by (seed, token index), no call lasts longer
than one piece of prefill or one token, so cancelling needs no help from llama.cpp, and going on with somebody else's
answer is what every token does anyway. Calls of different slots that meet in llama.cpp are computed as one batch.
"""

import hashlib
from collections import deque
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from omni_common.errors import OmniError, invalid
from omni_common.frames import AudioPart, Message, Part, Prompt, Text, TextPart, Transcript
from omni_common.params import Sampling, check_biases
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.llama_server import LlamaServer, Sampled
from omni_worker.engines.token_text import TokenText

#: Tokens of a prompt that one call computes: the grain of cancelling, and how long others wait for their next token.
PREFILL = 64


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """`options:` of the stage. Memory for keys and values is allocated for parallel * context tokens."""

    #: Jobs that generate at a time.
    parallel: int = 4
    #: Tokens of prompt and answer together, for each job.
    context: int = 4096
    #: System message of conversations that begin without one; empty: what the model's template says then.
    system: str = ""


@dataclass(slots=True)
class _Slot:
    """A sequence in llama.cpp. What it holds stays until others need the place: a cache of prefixes."""

    number: int
    ids: list[int] = field(default_factory=list)
    taken: bool = False
    #: When it was last given away, as a count.
    used: int = 0


@dataclass(eq=False, slots=True)
class _Generation:
    """A job: its input so far, then its ids and what of its text is not out yet."""

    job: Job
    params: Sampling
    text: TokenText
    #: Sources that have not sent their last piece.
    waiting: set[str]
    prompt: Prompt | None = None
    #: The words of each audio, and which audios have ended.
    heard: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    #: Prompt, then answer. While words are missing: the prompt without them, and `prompt_tokens` is 0.
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    slot: _Slot | None = None
    #: Of the next output: its text, and the index in `ids` where it starts.
    shown: str = ""
    sent: int = 0
    finish: Literal["", "stop", "length"] = ""
    #: Also failed: what comes back for it is dropped.
    cancelled: bool = False

    @property
    def answered(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def complete(self) -> bool:
        """Nothing that is still to come changes the prompt."""
        if not self.waiting:
            return True
        return self.prompt is not None and self.ended.issuperset(named_audios(self.prompt))


class Llamacpp:
    """`prompt` from the client and `transcript` from a recogniser in, `text` out; see `omni_worker.engine.Engine`.

    An audio part of the prompt is replaced by the words of that audio; without a prompt the words are the user's
    message. Generation starts when the prompt and all audios that it names are there; what stands before an audio is
    computed meanwhile. Positions are sampled tokens, the one that ended the answer included; `ids` are all of them,
    also where they have no text (end of answer, stop string, part of a character). The context is a limit on prompt
    and answer together: a prompt that leaves no room is refused, an answer is cut with `length`. Tokens of a blocked
    job are generated and kept, at most `max_tokens` of them, so that a slow consumer does not hold a slot.

    Output depends on input, parameters and seed alone. Measured with one thread on x86-64 (AVX2), up to 800 tokens: the
    five best log-probabilities are equal to the last digit alone and beside three busy jobs, with and without a cached
    prefix, and from prefill in pieces as from decoding, because no pass has 64 rows or more (`llama_server.BATCH_ROWS`;
    with 512 rows prefill and decoding differed by up to 0.26). With two threads that holds up to 257 tokens; beyond
    them prefill and decoding differed by up to 0.16, so there the cache and a restart can change a token.

    Of `Sampling`, repetition_penalty counts prompt and answer, and the other two penalties, without it, the answer
    only; with it, llama.cpp has one window for all three. Filters work after the temperature, as in vLLM.

    After a death the ids that were emitted, appended to the rendered prompt, give the state of an undisturbed run, and
    with one thread its next tokens, at any temperature. `TokenText` is fed with them again, to know what of the text
    was held back.
    """

    resumes = True
    rebuilds = False

    def __init__(self) -> None:
        self._server: LlamaServer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._slots: list[_Slot] = []
        self._jobs: dict[str, _Generation] = {}
        #: Complete prompts without a slot; prompts that wait for words and can be computed up to there. In order.
        self._queue: deque[_Generation] = deque()
        self._early: deque[_Generation] = deque()
        #: Calls that came back, from the pool's threads.
        self._done: deque[tuple[_Slot, _Generation, list[int], Future[Sampled]]] = deque()
        self._failures: list[Failure] = []
        self._uses = 0

    @property
    def busy(self) -> bool:
        """False while calls are under way: they wake the worker when they are back."""
        return bool(self._done or self._failures)

    @property
    def in_flight(self) -> bool:
        return any(slot.taken for slot in self._slots)

    def load(self, context: LoadContext) -> None:
        """Raises OmniError: `model_missing` when the prepared file is not there, `load_failed` when it is of no use."""
        try:
            options = msgspec.convert(context.options, Options)
        except msgspec.ValidationError as error:
            raise OmniError(f"options of a llamacpp stage: {error}", code="invalid_config") from None
        path = Path(context.models) / context.model / "model.gguf"
        if not path.is_file():
            raise OmniError(f"{path} is missing: run `omni prepare embedded`", status=503, code="model_missing")
        self._wake = context.wake
        self._context = options.context
        self._system = [Message("system", [TextPart(options.system)])] if options.system else []
        context.progress("weights", 0.1)
        server = LlamaServer(str(path), slots=options.parallel, context=options.context, threads=context.threads)
        self._server = server
        self._slots = [_Slot(number) for number in range(options.parallel)]
        context.progress("warm-up", 0.7)
        self._pool = ThreadPoolExecutor(options.parallel, thread_name_prefix="llamacpp")
        # After this every slot holds what the template puts before each conversation.
        greeting = self._render([Message("user", [TextPart("Hello")])], {})
        warm = [self._pool.submit(server.next_token, slot.number, greeting, {}) for slot in self._slots]
        for slot, call in zip(self._slots, warm, strict=True):
            call.result()
            slot.ids = greeting
        context.progress("warm-up", 1.0)

    def add(self, job: Job) -> None:
        params = job.params
        if not isinstance(params, Sampling):
            raise OmniError(f"a llamacpp stage takes Sampling, not {type(params).__name__}")
        if "" in params.stop:
            raise invalid("A stop sequence must not be empty.", "stop")
        assert self._server is not None
        check_biases(params, self._server.vocabulary)
        text = TokenText(self._server.text, params.stop)
        self._jobs[job.request_id] = _Generation(job, params, text, set(job.sources))

    def push(self, request_id: str, piece: Piece) -> None:
        generation = self._jobs.get(request_id)
        if generation is None or generation.prompt_tokens:
            return
        body = piece.body
        if isinstance(body, Prompt):
            generation.prompt = body
        elif isinstance(body, Transcript):
            words = "".join(segment.text for segment in body.segments)
            generation.heard[body.index] = generation.heard.get(body.index, "") + words
            if body.end_of_audio:
                generation.ended.add(body.index)
        if piece.last:
            generation.waiting.discard(piece.source)
        try:
            if generation.complete:
                self._begin(generation)
            elif isinstance(body, Prompt):
                generation.ids = self._render(body.messages, generation.heard)
                self._early.append(generation)
        except OmniError as error:
            self._fail(generation, error)

    def cancel(self, request_id: str) -> None:
        generation = self._jobs.pop(request_id, None)
        if generation is not None:
            generation.cancelled = True
        self._failures = [failure for failure in self._failures if failure.request_id != request_id]

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        while self._done:
            self._absorb(*self._done.popleft())
        self._dispatch()
        results: list[Output | Failure] = [*self._failures]
        self._failures = []
        for request_id in [name for name in self._jobs if name not in blocked]:
            output = self._output(self._jobs[request_id])
            if output is not None:
                results.append(output)
                if output.last:
                    del self._jobs[request_id]
        return results

    def close(self) -> None:
        for request_id in list(self._jobs):
            self.cancel(request_id)
        if self._pool is not None:
            self._pool.shutdown()
            self._done.clear()
        if self._server is not None:
            self._server.close()

    # ---------------------------------------------------------------------------------------------------- the prompt

    def _render(self, messages: list[Message], heard: dict[int, str]) -> list[int]:
        assert self._server is not None
        if not any(message.role == "system" for message in messages[:1]):
            messages = [*self._system, *messages]
        return self._server.render([{"role": m.role, "content": content(m, heard)} for m in messages])

    def _begin(self, generation: _Generation) -> None:
        """All input is there. Raises OmniError when it does not fit."""
        heard = generation.heard
        ids = self._render(generation.prompt.messages if generation.prompt else spoken(heard), heard)
        if len(ids) + 1 > self._context:
            raise invalid(
                f"The messages have {len(ids)} tokens; with at least one for the answer they do not fit into "
                f"the context of {self._context} tokens.",
                "messages",
                code="context_length_exceeded",
            )
        generation.ids, generation.prompt_tokens = ids, len(ids)
        self._replay(generation)
        generation.sent = len(generation.ids)
        self._queue.append(generation)

    def _replay(self, generation: _Generation) -> None:
        """Put the tokens back that a former self of this stage decided; their text is out already."""
        assert self._server is not None
        for decision in generation.job.resume:
            for token in decision.body.ids if isinstance(decision.body, Text) else []:
                may_stop = generation.answered >= generation.params.min_tokens
                generation.ids.append(token)
                generation.text.push(token, self._server.text([token]), may_stop=may_stop)

    def _fail(self, generation: _Generation, error: BaseException) -> None:
        name = generation.job.request_id
        self.cancel(name)
        if isinstance(error, OmniError):
            self._failures.append(Failure(name, error.message, error.code, error.status, error.param))
        else:
            self._failures.append(Failure(name, f"{type(error).__name__}: {error}"))

    # ----------------------------------------------------------------------------------------------------- the calls

    def _dispatch(self) -> None:
        """Give free slots away: to complete prompts for good, then to beginnings for one piece."""
        for queue in (self._queue, self._early):
            while queue:
                generation = queue[0]
                if generation.cancelled or (queue is self._early and generation.prompt_tokens):
                    queue.popleft()
                    continue
                slot = self._free_slot(generation.ids)
                if slot is None:
                    return
                queue.popleft()
                if queue is self._queue:
                    generation.slot = slot
                self._call(slot, generation)

    def _free_slot(self, ids: list[int]) -> _Slot | None:
        """The free slot that holds the most of `ids`; of equals the one that was given away longest ago."""
        free = [slot for slot in self._slots if not slot.taken]
        return max(free, key=lambda slot: (common(slot.ids, ids), -slot.used), default=None)

    def _call(self, slot: _Slot, generation: _Generation) -> None:
        """Have the next piece of the prompt computed, or the next token."""
        assert self._server is not None and self._pool is not None
        self._uses += 1
        slot.taken, slot.used = True, self._uses
        held = min(common(slot.ids, generation.ids), len(generation.ids) - 1)
        # Pieces end at multiples of PREFILL, wherever the cache ended.
        ids = generation.ids[: (held // PREFILL + 1) * PREFILL]
        request = sampling(generation.params, generation.job.seed, len(generation.ids), generation.answered)
        future = self._pool.submit(self._server.next_token, slot.number, ids, request)
        future.add_done_callback(partial(self._back, slot, generation, ids))

    def _back(self, slot: _Slot, generation: _Generation, ids: list[int], future: Future[Sampled]) -> None:
        """In a thread of the pool."""
        self._done.append((slot, generation, ids, future))
        self._wake()

    def _absorb(self, slot: _Slot, generation: _Generation, ids: list[int], future: Future[Sampled]) -> None:
        """A call is back: the slot holds `ids`; if they are all of the job's, there is a token."""
        error = future.exception()
        slot.ids, slot.taken = ([] if error else ids), False
        if generation.cancelled:
            return
        if error is not None:
            self._fail(generation, error)
        elif generation.slot is slot:
            if len(ids) == len(generation.ids):
                self._append(generation, future.result())
            if not generation.finish and not generation.cancelled:
                self._call(slot, generation)
        elif len(ids) < len(generation.ids):
            self._early.append(generation)

    # ---------------------------------------------------------------------------------------------------- the answer

    def _append(self, generation: _Generation, token: Sampled) -> None:
        """A token was sampled: show what can be shown, see whether the answer ends."""
        params, text = generation.params, generation.text
        may_stop = generation.answered >= params.min_tokens
        generation.ids.append(token.id)
        try:
            if token.end or token.id in params.stop_token_ids:
                generation.finish = "stop"
            else:
                generation.shown += text.push(token.id, token.text, may_stop=may_stop)
                if text.stopped:
                    generation.finish = "stop"
                elif generation.answered == params.max_tokens or len(generation.ids) == self._context:
                    generation.finish = "length"
            if generation.finish and not text.stopped:
                generation.shown += text.flush()
        except OmniError as error:
            self._fail(generation, error)

    def _output(self, generation: _Generation) -> Output | None:
        new = generation.ids[generation.sent :]
        if not generation.prompt_tokens or not new:
            return None
        finish = generation.finish
        body = Text(generation.shown, new, finish, generation.prompt_tokens if finish else 0)
        start, end = generation.sent - generation.prompt_tokens, generation.answered
        generation.shown, generation.sent = "", len(generation.ids)
        return Output(generation.job.request_id, start, end, bool(finish), body)


def named_audios(prompt: Prompt) -> set[int]:
    """Indices of the audios that a prompt's messages refer to."""
    return {part.index for message in prompt.messages for part in message.parts if isinstance(part, AudioPart)}


def spoken(heard: dict[int, str]) -> list[Message]:
    """The conversation of a job without a prompt: all audios, as one message of the user."""
    return [Message("user", [AudioPart(index) for index in sorted(heard)])]


def content(message: Message, heard: dict[int, str]) -> str:
    """A message's text, one line a part; an audio part is what was heard."""
    return "\n".join(_words(part, heard) for part in message.parts)


def _words(part: Part, heard: dict[int, str]) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, AudioPart):
        return heard.get(part.index, "").strip()
    raise invalid("This model neither sees images nor videos.", "messages")


def common(held: list[int], ids: list[int]) -> int:
    """How many ids two sequences share from the start."""
    if held == ids[: len(held)]:
        return len(held)
    return next(at for at, (a, b) in enumerate(zip(held, [*ids, None], strict=False)) if a != b)


def token_seed(seed: int, index: int) -> int:
    """31 bits for llama.cpp's random numbers, for the token at `index` of an answer."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=4).digest()) >> 1


def sampling(params: Sampling, job_seed: int, length: int, index: int) -> dict[str, Any]:
    """llama.cpp's fields for the token at `index` of an answer; `length` is that of prompt and answer so far."""
    request: dict[str, Any] = {
        "seed": token_seed(job_seed if params.seed is None else params.seed, index),
        "temperature": params.temperature,
        "repeat_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repeat_last_n": index if params.repetition_penalty == 1.0 else length,
        "ignore_eos": params.ignore_eos or index < params.min_tokens,
    }
    bias: list[list[float | bool]] = [[id_, bias] for id_, bias in params.biases.items()]
    if index < params.min_tokens:
        bias += [[token, False] for token in params.stop_token_ids]
    if bias:
        request["logit_bias"] = bias
    if params.temperature == 0.0:
        return request | {"samplers": ["penalties", "top_k"], "top_k": 1}
    return request | {
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
