"""docker-compose.yaml for real: images are built, containers started, killed, scaled and stopped by a Docker engine.

Images stay afterwards: they are the cache of the next run.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from e2e.clients.api import Api, say
from omni_common.frames import Fleet, Replica
from support.http import free_port

pytestmark = [pytest.mark.docker, pytest.mark.embedded, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
WORKERS = ("listener", "thinker", "talker", "code2wav")
SERVICES = ("gateway", "scheduler", *WORKERS)
TEXT = "The capital of France is Paris."
LONG = " ".join(f"This is sentence number {number} of a long text." for number in range(1, 25))
#: A health check looks once in so many seconds here.
INTERVAL_S = 1
PATIENCE_S = 120.0
#: A build fetches its packages, and a storage driver may copy whole layers.
BUILD_S = 1800.0
#: The program of a container is the child of its process 1.
PROGRAM = "$(cut -d' ' -f1 /proc/1/task/1/children)"


def docker(*arguments: str, check: bool = True) -> str:
    return run(["docker", *arguments], check=check)


def run(command: list[str], check: bool = True, timeout_s: float = PATIENCE_S, **env: str) -> str:
    """Both outputs of a command that ends."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def find_compose() -> list[str]:
    """The compose command of this machine. Skips the test where it or the engine is missing."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command here")
    engine = subprocess.run(["docker", "info"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if engine.returncode != 0:
        pytest.skip(f"no Docker engine answers: {engine.stderr.strip()[:200]}")
    for command in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "version"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
                return command
    pytest.skip("neither `docker compose` nor docker-compose here")


class Compose:
    """One instance, in a project of its own."""

    def __init__(self, command: list[str], override: Path) -> None:
        self._files = [*command, "-f", str(ROOT / "docker-compose.yaml"), "-f", str(override)]
        self._project = f"omnitest{os.getpid()}"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __call__(self, *arguments: str, check: bool = True, timeout_s: float = PATIENCE_S) -> str:
        command = [*self._files, "-p", self._project, *arguments]
        return run(command, check, timeout_s, OMNI_PUBLISH=f"127.0.0.1:{self._port}")

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """What Docker knows of the containers (of `service`), stopped ones too."""
        labels = ["--filter", f"label=com.docker.compose.project={self._project}"]
        if service:
            labels += ["--filter", f"label=com.docker.compose.service={service}"]
        ids = docker("ps", "--all", "--quiet", *labels).split()
        # One may be removed meanwhile.
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return found

    def one(self, service: str) -> dict[str, Any]:
        (container,) = self.containers(service)
        return container

    def inside(self, service: str, script: str, check: bool = True) -> str:
        return docker("exec", self.one(service)["Id"], "sh", "-c", script, check=check)

    def crash(self, service: str) -> None:
        """As if the program had died by itself; the command in the container may die with it."""
        self.inside(service, f"kill -9 {PROGRAM}", check=False)


def health(container: dict[str, Any]) -> str:
    status: str = container["State"]["Health"]["Status"]
    return status


def reason(container: dict[str, Any]) -> str:
    """What its last health check said."""
    return "".join(look["Output"] for look in container["State"]["Health"]["Log"][-1:])


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what only asking the engine tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


async def all_healthy(compose: Compose) -> None:
    await until(lambda: {health(container) for container in compose.containers()} == {"healthy"})


def ready(fleet: Fleet, stage: str) -> list[Replica]:
    return [replica for replica in fleet.replicas if replica.stage == stage and replica.state == "ready"]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The images, built; started is nothing."""
    override = tmp_path_factory.mktemp("compose") / "override.yaml"
    changes = {
        service: {
            # The build goes where this machine's own pip goes.
            "build": {"network": "host"},
            "healthcheck": {"interval": f"{INTERVAL_S}s"},
        }
        for service in SERVICES
    }
    override.write_text(json.dumps({"services": changes}))
    compose = Compose(find_compose(), override)
    # One service of each image.
    compose("build", "scheduler", "talker", timeout_s=BUILD_S)
    try:
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "10")


@pytest.fixture
async def api(compose: Compose) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession() as session:
        yield Api(session, compose.url)


def pins(lock: Path) -> dict[str, set[str]]:
    """name==version to the hashes."""
    entries = re.split(r"^(?=[a-z])", lock.read_text(), flags=re.MULTILINE)[1:]
    return {entry.split()[0]: set(re.findall(r"--hash=(\S+)", entry)) for entry in entries}


def test_the_lock_of_the_core_image_is_part_of_the_lock() -> None:
    core, full = pins(ROOT / "deploy/docker/requirements-core.lock"), pins(ROOT / "requirements.lock")
    assert core == {pin: full.get(pin) for pin in core} and all(core.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert wanted <= {pin.partition("==")[0] for pin in core}


async def test_the_order_of_the_start_does_not_matter(compose: Compose, api: Api) -> None:
    """B074: who needs the others comes first. B075: starting, then healthy, with the reason while it is not."""
    compose("up", "-d", "--no-deps", "gateway")

    async def answers() -> bool:
        try:
            return (await api.get("/health/live")).status == 200
        except aiohttp.ClientConnectionError:
            return False

    async with asyncio.timeout(PATIENCE_S):
        while not await answers():
            await asyncio.sleep(0.1)
    assert (await api.get("/health/ready")).status == 503
    await until(lambda: reason(compose.one("gateway")))
    assert health(compose.one("gateway")) == "starting" and "thinker" in reason(compose.one("gateway"))
    compose("up", "-d", "--no-deps", *WORKERS)
    await until(lambda: "the scheduler does not answer" in reason(compose.one("talker")))
    compose("up", "-d")
    await all_healthy(compose)
    assert (await api.get("/health/ready")).status == 200
    assert all(container["RestartCount"] == 0 for container in compose.containers())


async def test_nobody_is_root_and_nothing_but_the_run_folder_is_shared(compose: Compose) -> None:
    """B073: neither shm_size nor an IPC namespace in common."""
    users = set()
    for container in compose.containers():
        host = container["HostConfig"]
        users.add(container["Config"]["User"])
        assert host["ReadonlyRootfs"] and host["IpcMode"] == "private" and host["ShmSize"] == 64 << 20
        assert [mount["Destination"] for mount in container["Mounts"]] == ["/run/omnibus"]
        assert container["Config"]["Labels"]["com.docker.compose.service"] == "gateway" or not host["PortBindings"]
    assert users == {"gateway", "scheduler", "worker"}
    for service in ("gateway", "talker"):
        assert compose.inside(service, "grep Cap[EP] /proc/self/status | tr -d '[:alpha:][:space:]:' | tr -d 0") == ""
        assert compose.inside(service, "stat -c '%a %G' /run/omnibus").split() == ["2770", "omnibus"]
        assert compose.inside(service, "find /run/omnibus -mindepth 1 ! -group omnibus -o -perm /o=rwx") == ""


async def test_asked_and_answered_in_text_and_speech(compose: Compose, api: Api) -> None:
    """Between containers tensors go through the producer's arena, whose descriptor came over the run folder."""
    speech = await api.speech(TEXT, "wav")
    assert speech.status == 200, speech.data[:500]
    assert await api.heard(speech.data) == TEXT
    answer = await api.chat_stream(say("What is the capital of France?"))
    assert answer.text and answer.sound
    fleet = await api.idle()
    # The counters come with the next beat.
    await api.wait_for(lambda fleet: ready(fleet, "code2wav")[0].sent.get("arena", 0) > len(speech.data))
    assert {host.host for host in fleet.replicas} == {compose.one(stage)["Id"][:12] for stage in WORKERS}
    for service in SERVICES:
        assert compose.inside(service, "ls -A /dev/shm") == ""


async def test_models_are_in_the_image_and_no_network_is_needed(compose: Compose) -> None:
    for stage in WORKERS:
        assert compose.one(stage)["HostConfig"]["NetworkMode"] == "none"
    find = 'python -c "import importlib.util as u; print([m for m in %r.split() if u.find_spec(m)])"'
    engines = "onnxruntime ctranslate2 xllamacpp"
    assert compose.inside("gateway", find % f"{engines} pip").strip() == "[]"
    assert compose.inside("talker", find % f"{engines} pip").strip() == repr(engines.split())


async def test_a_talker_that_dies_in_mid_speech_is_restarted_and_goes_on(compose: Compose, api: Api) -> None:
    expected = await api.speech(LONG)
    restarts = compose.one("talker")["RestartCount"]
    running = asyncio.create_task(api.speech(LONG))
    await api.wait_for(lambda fleet: ready(fleet, "code2wav")[0].running == 1)
    await asyncio.to_thread(compose.crash, "talker")
    assert not running.done()
    assert (await running).data == expected.data
    await all_healthy(compose)
    assert compose.one("talker")["RestartCount"] == restarts + 1
    await api.idle()


async def test_a_talker_killed_by_hand_is_missed_and_used_again(compose: Compose, api: Api) -> None:
    """B075: what is missing is said, by name. Docker leaves a container that was killed by command to who killed it."""
    compose("kill", "-s", "SIGKILL", "talker")
    await api.wait_for(lambda fleet: not ready(fleet, "talker"))
    assert (await api.chat(say("Say yes.", modalities=["text"], audio=None)))["choices"]
    await until(lambda: health(compose.one("gateway")) == "unhealthy")
    assert "talker" in reason(compose.one("gateway")) and compose.one("talker")["State"]["Status"] == "exited"
    compose("up", "-d", "talker")
    await all_healthy(compose)
    assert await api.heard((await api.speech(TEXT, "wav")).data) == TEXT


async def test_a_stopped_worker_is_unhealthy_and_ends_when_it_wakes(compose: Compose, api: Api) -> None:
    restarts = compose.one("talker")["RestartCount"]
    compose.inside("talker", f"kill -STOP {PROGRAM}")
    await until(lambda: health(compose.one("talker")) == "unhealthy")
    assert "the scheduler does not know it" in reason(compose.one("talker"))
    compose.inside("talker", f"kill -CONT {PROGRAM}")
    await until(lambda: compose.one("talker")["RestartCount"] == restarts + 1)
    await all_healthy(compose)


async def test_two_talkers(compose: Compose, api: Api) -> None:
    compose("up", "-d", "--no-recreate", "--scale", "talker=2")
    fleet = await api.wait_for(lambda fleet: len(ready(fleet, "talker")) == 2, PATIENCE_S)
    assert len({replica.name for replica in fleet.replicas}) == len(WORKERS) + 1
    await all_healthy(compose)
    before = {replica.name: replica.produced for replica in ready(fleet, "talker")}
    answers = await asyncio.gather(*(api.speech(LONG) for _ in range(4)))
    assert len({answer.data for answer in answers}) == 1
    await api.wait_for(lambda fleet: all(r.produced > before[r.name] for r in ready(fleet, "talker")))
    compose("up", "-d", "--no-recreate", "--scale", "talker=1")
    await api.wait_for(lambda fleet: len(ready(fleet, "talker")) == 1, PATIENCE_S)


async def test_a_scheduler_that_dies_is_restarted_and_everybody_returns(compose: Compose, api: Api) -> None:
    restarts = compose.one("scheduler")["RestartCount"]
    running = asyncio.create_task(api.speech(LONG))
    await api.wait_for(lambda fleet: ready(fleet, "code2wav")[0].running == 1)
    await asyncio.to_thread(compose.crash, "scheduler")
    assert not running.done()
    assert len((await running).data) > 0
    await until(lambda: compose.one("scheduler")["RestartCount"] == restarts + 1)
    await all_healthy(compose)
    assert await api.heard((await api.speech(TEXT, "wav")).data) == TEXT
    assert all(compose.one(service)["RestartCount"] == 0 for service in ("gateway", "listener", "thinker", "code2wav"))


async def test_a_user_outside_the_group_is_told_so(compose: Compose) -> None:
    """B074: any user of the group will do, whatever the number."""
    (volume,) = (mount["Name"] for mount in compose.one("scheduler")["Mounts"])
    confined = ["run", "--rm", "--read-only", "--network=none", "--cap-drop=ALL", "--volume", f"{volume}:/run/omnibus"]
    said = await asyncio.to_thread(docker, *confined, "--user=12345", "omnibus-core", "omni-scheduler", check=False)
    assert "omni-scheduler:" in said and "/run/omnibus" in said and "Traceback" not in said
    said = await asyncio.to_thread(docker, *confined, "--user=1:10001", "omnibus-core", "omni-scheduler", check=False)
    assert "another scheduler runs in /run/omnibus" in said


async def test_all_end_in_order_when_told_to(compose: Compose) -> None:
    """The last test: afterwards nothing runs."""
    await asyncio.to_thread(compose, "stop", "--timeout", "10")
    assert {container["State"]["ExitCode"] for container in compose.containers()} == {0}
