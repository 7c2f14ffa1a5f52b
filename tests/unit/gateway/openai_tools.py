"""What openai-python makes of answers with calls and reasoning, told as JSON; `PYTHONPATH` chooses the version.

Usage: openai_tools.py BASE_URL
"""

import json
import sys
from typing import Any

import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "strict": True,
        },
    }
]
USER: Any = [{"role": "user", "content": "How is the weather in Köln and Nice?"}]


def main(base_url: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        told: dict[str, Any] = {"version": openai.__version__}
        whole = client.chat.completions.create(model="omnibus", messages=USER, tools=TOOLS)
        message = whole.choices[0].message
        told["whole"] = seen(message, whole.choices[0].finish_reason)
        told["whole"]["reasoning"] = (message.model_extra or {}).get("reasoning_content")
        # The library's own accumulator: what it cannot put together, no application can.
        with client.chat.completions.stream(model="omnibus", messages=USER, tools=TOOLS) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        told["streamed"] = seen(final.message, final.finish_reason)
        told["kinds"] = sorted(set(kinds))
        # The next turn, as an application writes it: the message as it came, and the results.
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "grey"}'} for call in message.tool_calls or []
        ]
        history = [*USER, message, *results]
        again = client.chat.completions.create(model="omnibus", messages=history, tools=TOOLS, tool_choice="none")
        told["next"] = again.choices[0].message.content
        return told


def seen(message: Any, finish: str) -> dict[str, Any]:
    calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"content": message.content, "calls": calls, "finish": finish}


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
