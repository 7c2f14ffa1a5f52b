"""Health says what works, metrics count each request once and come back to zero."""

import asyncio
import re
from collections import Counter
from typing import Any

import aiohttp
import pytest

from omni_common.errors import OmniError
from omni_gateway.context import Settings
from omni_gateway.health import missing_stages, task_states
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import WORD_SAMPLES, RigBus, answer, rig_fleet, rig_pipelines

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    async with http.get(url) as response:
        return response.status, await response.json()


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Sample (with its labels, as it is written) -> value."""
    async with http.get(url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def outcomes(samples: dict[str, float]) -> Counter[tuple[str, str]]:
    """(status, outcome) -> requests, of the chat route."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, value in samples.items():
        found = re.fullmatch(
            r'omni_requests_total\{outcome="(\w+)",route="/v1/chat/completions",status="(\d+)"\}', name
        )
        if found:
            counts[found[2], found[1]] += int(value)
    return counts


# ------------------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("missing", "ready", "general", "status"),
    [
        ({}, 200, 200, "ready"),
        ({"talker": "loading weights, 40%"}, 503, 200, "degraded"),
        (dict.fromkeys(("listener", "thinker", "talker", "code2wav"), "no worker"), 503, 503, "unavailable"),
    ],
)
async def test_readiness_names_what_is_missing(
    url: str, http: aiohttp.ClientSession, bus: RigBus, missing: dict, ready: int, general: int, status: str
) -> None:
    bus.fleet = rig_fleet(missing)
    code, body = await get(http, url + "/health/ready")
    assert code == ready and body["status"] == status and body["missing"] == missing
    code, body = await get(http, url + "/health")
    assert code == general
    assert body["status"] == {"ready": "healthy", "degraded": "degraded", "unavailable": "unhealthy"}[status]
    assert await get(http, url + "/health/live") == (200, {"status": "live"})


async def test_a_dead_talker_leaves_text(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.fleet = rig_fleet({"talker": "killed"})
    _, body = await get(http, url + "/health/ready")
    chat = body["pipelines"]["embedded"]["chat"]
    assert chat == {"text>text": True, "text>audio": False, "audio>text": True, "audio>audio": False}
    assert body["pipelines"]["embedded"]["transcription"] == {"audio>text": True}
    assert body["pipelines"]["speech"]["speech"] == {"text>audio": False}
    bus.fleet = rig_fleet()
    assert (await get(http, url + "/health/ready"))[0] == 200


async def test_without_a_scheduler_nothing_is_ready_but_the_process_lives(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    bus.fleet = None
    code, body = await get(http, url + "/health/ready")
    assert code == 503 and body["status"] == "unavailable" and "scheduler" in body["reason"]
    assert set(body["missing"]) == {"listener", "thinker", "talker", "code2wav"}
    assert (await get(http, url + "/health/live"))[0] == 200
    assert (await metrics(http, url))["omni_scheduler_up"] == 0.0


def test_stages_that_the_scheduler_does_not_know_are_missing() -> None:
    pipelines = list(rig_pipelines().values())
    fleet = rig_fleet()
    fleet.stages = fleet.stages[1:]
    assert missing_stages(fleet, pipelines) == {"listener": "no worker"}
    assert task_states(pipelines[0], {"listener"})["chat"]["audio>text"] is False


# ------------------------------------------------------------------------------------------------------------ metrics


async def test_the_fleet_as_metrics(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.fleet = rig_fleet({"talker": "killed"})
    samples = await metrics(http, url)
    assert samples["omni_scheduler_up"] == 1
    assert samples["omni_queue_requests"] == 3 and samples["omni_running_requests"] == 2
    assert samples["omni_scheduler_admitted_total"] == 10
    for stage, ready, running, waiting in (("thinker", 1, 2, 0), ("talker", 0, 0, 4)):
        assert samples[f'omni_stage_ready{{stage="{stage}"}}'] == ready
        assert samples[f'omni_stage_running{{stage="{stage}"}}'] == running
        assert samples[f'omni_stage_waiting{{stage="{stage}"}}'] == waiting
    labels = 'replica="thinker-0",stage="thinker"'
    assert samples[f"omni_arena_used_bytes{{{labels}}}"] == 64
    assert samples[f"omni_arena_total_bytes{{{labels}}}"] == 1024
    assert samples[f'omni_transfer_bytes_total{{{labels},way="arena"}}'] == 700
    assert not any("talker-0" in name for name in samples)


async def test_times_of_an_answer(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for body in (HI, {**HI, "modalities": ["text", "audio"]}, {**HI, "audio": {}, "stream": True}):
        async with http.post(url + CHAT, json=body) as response:
            assert response.status == 200
            await response.read()
    samples = await metrics(http, url)
    labels = '{pipeline="embedded",task="chat"}'
    assert samples[f"omni_time_to_first_text_seconds_count{labels}"] == 3
    assert samples[f"omni_time_to_first_audio_seconds_count{labels}"] == 2
    assert samples[f"omni_request_seconds_count{labels}"] == 3
    assert samples[f"omni_real_time_factor_count{labels}"] == 2
    first, total = (samples[f"omni_{name}_sum{labels}"] for name in ("time_to_first_text_seconds", "request_seconds"))
    assert 0 < first <= total
    # 0.5 s of sound each.
    assert WORD_SAMPLES == 2400
    assert 0 < samples[f"omni_real_time_factor_sum{labels}"] <= total / 0.5


async def test_every_request_is_counted_once_and_gauges_return_to_zero(
    serve: Serve, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    url = await serve(Settings())
    rounds = 10

    async def post(body: Any, status: int) -> None:
        async with http.post(url + CHAT, json=body) as response:
            assert response.status == status
            await response.read()

    async def leave(body: Any) -> None:
        _, writer = await raw_request(url, raw_post(CHAT, body))
        await bus.until(lambda b: b.events_given >= 1)
        writer.close()

    streamed, spoken = {**HI, "stream": True}, {**HI, "stream": True, "audio": {"format": "mp3"}}
    await asyncio.gather(*(post(body, 200) for body in (HI, streamed, spoken) for _ in range(rounds)))
    await asyncio.gather(*(post({**HI, "n": 2}, 400) for _ in range(rounds)))
    bus.failures = {2: OmniError("lost", code="stage_lost")}
    await asyncio.gather(*(post(body, 200) for body in (streamed, spoken) for _ in range(rounds)))
    await asyncio.gather(*(post(HI, 500) for _ in range(rounds)))
    bus.failures = {}
    bus.refusal = OmniError("full", status=429, code="queue_full")
    await asyncio.gather(*(post(HI, 429) for _ in range(rounds)))
    bus.refusal = None
    bus.gates = {1: asyncio.Event()}
    await asyncio.gather(*(leave(body) for body in (HI, streamed, spoken) for _ in range(rounds)))
    await bus.until(lambda b: b.cancelled == 3 * rounds)

    samples = await metrics(http, url)
    assert outcomes(samples) == {
        ("200", "success"): 3 * rounds,
        ("400", "error"): rounds,
        ("200", "error"): 2 * rounds,
        ("500", "error"): rounds,
        ("429", "error"): rounds,
        ("499", "abort"): 3 * rounds,
    }
    assert samples['omni_requests_in_flight{route="/v1/chat/completions"}'] == 0
    in_flight = {name: value for name, value in samples.items() if name.startswith("omni_requests_in_flight")}
    assert sum(in_flight.values()) == 1, "only the question itself"
    assert not bus.open


async def test_the_in_flight_gauge_counts_what_runs(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.gates = {0: asyncio.Event()}
    asked = [asyncio.create_task(http.post(url + CHAT, json=HI)) for _ in range(3)]
    await bus.until(lambda b: len(b.open) == 3)
    assert (await metrics(http, url))['omni_requests_in_flight{route="/v1/chat/completions"}'] == 3
    bus.gates[0].set()
    for task in asked:
        (await task).release()
    assert (await metrics(http, url))['omni_requests_in_flight{route="/v1/chat/completions"}'] == 0


async def test_labels_do_not_grow_with_what_clients_send(url: str, http: aiohttp.ClientSession) -> None:
    for path in ("/a", "/b/c", "/v1/models/one", "/v1/models/two"):
        async with http.get(url + path) as response:
            assert response.status == 404
    routes = {name for name in await metrics(http, url) if name.startswith("omni_requests_total")}
    assert routes == {
        'omni_requests_total{outcome="error",route="unmatched",status="404"}',
        'omni_requests_total{outcome="error",route="/v1/models/{model}",status="404"}',
    }


async def test_two_applications_count_apart(serve: Serve, http: aiohttp.ClientSession, bus: RigBus) -> None:
    one, two = await serve(), await serve()
    bus.script = answer(["x"])
    async with http.post(one + CHAT, json=HI) as response:
        assert response.status == 200
    assert outcomes(await metrics(http, one)) == {("200", "success"): 1}
    assert not outcomes(await metrics(http, two))
