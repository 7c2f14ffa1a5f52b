"""llama.cpp's own server inside this process, asked for one token of one slot at a time.

The prebuilt binding has the server's completion call but neither its chat template nor its tokenizer; those are two
HTTP routes of the same object. The server listens on a Unix socket whose file is removed at once: the only way left
to it is the descriptor kept here, so there is no port, nothing for other users to reach, nothing left after a kill.
"""

import http.client
import json
import os
import socket
import tempfile
from dataclasses import dataclass
from typing import Any

import xllamacpp

from omni_common.errors import OmniError, invalid

#: Rows that one pass of the model takes. From 64 rows on flash attention takes another way with other rounding; below
#: that, prefill in any pieces, decoding, and any company in the batch agree. Price: prefill takes 18% more time than
#: with 512 rows (4.8 ms of CPU time a token against 4.05), with 32 rows as with 63.
BATCH_ROWS = 32
_HTTP_S = 30.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token. `text` has U+FFFD in place of bytes that are not whole characters."""

    id: int
    text: str
    #: The model says that it is done; `text` is empty.
    end: bool


class LlamaServer:
    """`slots` sequences of `context` tokens each. `next_token` may be called from several threads, one a slot."""

    def __init__(self, path: str, *, slots: int, context: int, threads: int) -> None:
        """Load the weights; holds the interpreter's lock meanwhile. Raises OmniError with the reason."""
        # Without this an abort of ggml starts a debugger, seconds before the process is seen to be dead.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_parallel = slots
        # The total: llama.cpp divides it by the sequences.
        params.n_ctx = context * slots
        params.kv_unified = False
        params.n_ubatch = BATCH_ROWS
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        # Each slot keeps its last sequence, which is the only cache wanted: no copies of idle ones.
        params.cache_ram_mib = 0
        params.cache_idle_slots = False
        params.prefill_assistant = False
        params.warmup = False
        params.fit_params = False
        params.ui = False
        params.n_threads_http = 1
        #: Errors only, to stderr.
        params.verbosity = 1
        with tempfile.TemporaryDirectory(prefix="omni-llama-") as folder:
            address = os.path.join(folder, "llama.sock")
            params.hostnames = [address]
            try:
                self._server: Any = xllamacpp.Server(params)
            except RuntimeError as error:
                raise OmniError(f"llama.cpp cannot load {path}: {error}", code="load_failed") from None
            self._door = os.open(address, os.O_PATH | os.O_CLOEXEC)
        #: Tokens that there are.
        self.vocabulary: int = self._ask("GET", "/v1/models")["data"][0]["meta"]["n_vocab"]
        available = self._ask("GET", "/props")["default_generation_settings"]["n_ctx"]
        if available < context:
            self.close()
            raise OmniError(f"{path} has a context of {available} tokens, not {context}", code="load_failed")

    def close(self) -> None:
        """Free the model and end llama.cpp's threads. No call may be under way."""
        if self._server is not None:
            self._server = None
            os.close(self._door)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to where the assistant begins to speak.

        `messages` have role and content. What the template adds itself (a default system prompt) is in. Raises
        OmniError 400 when the template refuses them.
        """
        prompt = self._ask("POST", "/apply-template", {"messages": messages})["prompt"]
        answer = self._ask("POST", "/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
        ids: list[int] = answer["tokens"]
        return ids

    def text(self, ids: list[int]) -> str:
        """Text of tokens that belong together; U+FFFD stands for bytes that are not whole characters."""
        text: str = self._ask("POST", "/detokenize", {"tokens": ids})["content"]
        return text

    def next_token(self, slot: int, ids: list[int], sampling: dict[str, Any]) -> Sampled:
        """Make `ids` the content of the slot, computing only what goes beyond what it shares with its last content,
        and sample what comes next. Blocks; other threads run meanwhile. Raises OmniError.
        """
        answer = self._server.handle_completions(
            {
                **sampling,
                "prompt": ids,
                "n_predict": 1,
                "id_slot": slot,
                "cache_prompt": True,
                "stream": False,
                "return_tokens": True,
                # llama.cpp's own answer inside the OpenAI-shaped one, which has no ids.
                "verbose": True,
                "response_fields": ["tokens", "content", "stop_type"],
            }
        )
        if "error" in answer:
            raise OmniError(f"llama.cpp: {answer['error'].get('message', answer['error'])}", code="engine_error")
        native = answer["__verbose"]
        return Sampled(native["tokens"][0], native["content"], native["stop_type"] == "eos")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = _Connection(self._door)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise OmniError(f"llama.cpp does not answer {path}: {error}", code="engine_error") from None
        finally:
            connection.close()
        if response.status != 200:
            reason = answer.get("error", {}).get("message", f"status {response.status}")
            raise invalid(f"The model's chat template refuses these messages: {reason}", "messages")
        return answer


class _Connection(http.client.HTTPConnection):
    """HTTP to the socket behind a descriptor, whether or not it still has a name."""

    def __init__(self, door: int) -> None:
        super().__init__("llama", timeout=_HTTP_S)
        self._door = door

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_HTTP_S)
        self.sock.connect(f"/proc/self/fd/{self._door}")
