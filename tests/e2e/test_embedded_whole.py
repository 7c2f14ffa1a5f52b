"""The embedded models with stages that wait for each other's whole output: the same words and sound as streamed."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from e2e.clients.api import Api, say
from e2e.clients.instance import serving

pytestmark = pytest.mark.embedded


async def test_without_streaming_between_stages_the_answer_is_the_same(api: Api, tmp_path: Path) -> None:
    """Also when each of the stages in turn dies in mid-answer. The client streams all the same."""
    body = say("Tell me about the moon.", stream=True)
    streamed, spoken = await api.chat_stream(body), await api.speech("One. Two. Three.")
    with serving(tmp_path, "--set", "stream=false") as instance:
        async with aiohttp.ClientSession() as session:
            whole = Api(session, instance.url)
            answer = await whole.chat_stream(body)
            assert (answer.text, answer.sound) == (streamed.text, streamed.sound)
            kinds = [kind for kind, _ in answer.pieces]
            assert kinds.index("sound") > max(at for at, kind in enumerate(kinds) if kind == "text")
            assert (await whole.speech("One. Two. Three.")).data == spoken.data
            for stage in ("thinker", "talker", "code2wav"):
                seen = len(instance.log)
                running = asyncio.create_task(whole.chat_stream(body))
                name = f"{stage}-0"
                await whole.wait_for(lambda fleet, name=name: any(r.name == name and r.running for r in fleet.replicas))
                instance.processes()[name].kill()
                answer = await running
                assert (answer.text, answer.sound) == (streamed.text, streamed.sound), stage
                await asyncio.to_thread(instance.said, rf"^{name} +\| .*is ready", seen)
            assert (await whole.idle()).deaths == 3
