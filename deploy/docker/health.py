"""Health of this container's process, for Docker: exit status 0 when it does its work, else 1 and one line of why.

`health.py gateway`: every stage can be reached through its HTTP API. `health.py scheduler`: it answers on the bus.
`health.py STAGE`: the scheduler has this very container's replica of the stage as ready, and has heard it lately.
"""

import asyncio
import json
import os
import socket
import sys
import urllib.error
import urllib.request

from omni_common.frames import Fleet, Look, Plain
from omni_common.ids import new_incarnation
from omni_common.run_dir import RunDir
from omni_common.sockets import ControlClient, new_context

#: Seconds for an answer; below the health check's own limit, so that there is a reason to read.
ANSWER_S = 3.0
#: Seconds since a replica's last beat, of which there is one a second.
SILENT_S = 4.0
READY = "http://127.0.0.1:8000/health/ready"


def gateway() -> str:
    """Why it is not healthy, empty when it is."""
    try:
        with urllib.request.urlopen(READY, timeout=ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            missing = json.load(error).get("missing", {})
        return f"missing {'; '.join(f'{stage}: {why}' for stage, why in missing.items())}"
    except OSError as error:
        return f"the gateway does not answer: {error}"


async def fleet() -> Fleet | None:
    """The scheduler's answer, None if there is none in time."""
    answer: asyncio.Future[Fleet] = asyncio.get_running_loop().create_future()

    def received(frame: Plain) -> None:
        if isinstance(frame, Fleet) and not answer.done():
            answer.set_result(frame)

    context = new_context()
    client = ControlClient(context, RunDir(os.environ["OMNI_RUN_DIR"]).control, new_incarnation(), received)
    client.send(Look())
    try:
        return await asyncio.wait_for(answer, ANSWER_S)
    except TimeoutError:
        return None
    finally:
        client.close()
        context.term()


def replica(stage: str, seen: Fleet, host: str) -> str:
    """Why the replica of `stage` on `host` is not healthy, empty when it is."""
    for found in seen.replicas:
        if found.stage == stage and found.host == host:
            if found.state != "ready":
                return f"{found.state}: {found.detail}"
            return f"silent for {found.silent_s:.1f} s" if found.silent_s > SILENT_S else ""
    return "the scheduler does not know it"


def main() -> int:
    role = sys.argv[1]
    if role == "gateway":
        trouble = gateway()
    else:
        seen = asyncio.run(fleet())
        if seen is None:
            trouble = "the scheduler does not answer"
        else:
            trouble = "" if role == "scheduler" else replica(role, seen, socket.gethostname())
    print(trouble or "healthy")
    return 1 if trouble else 0


if __name__ == "__main__":
    raise SystemExit(main())
