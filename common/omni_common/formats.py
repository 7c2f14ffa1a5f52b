"""How models write what is not for reading: the tags around it, by the format that a pipeline's `formats` names.

The gateway looks for them in answers, and a processor for what a chat template has opened already.
"""

#: `formats.reasoning: think`: the way to the answer, before it.
THINK, UNTHINK = "<think>", "</think>"
#: `formats.tools: hermes`: `{"name": ..., "arguments": {...}}` between them calls a tool.
CALL, UNCALL = "<tool_call>", "</tool_call>"


def forced_call(name: str) -> str:
    """How an answer begins that calls the tool `name`, up to the arguments. A name has no letter that JSON escapes."""
    return f'{CALL}\n{{"name": "{name}", "arguments":'
