"""`omni-scheduler`: the machine on real sockets."""

import argparse
import asyncio
import logging

from omni_common.frames import Plain, Refused
from omni_common.ids import is_incarnation, new_incarnation
from omni_common.lifeline import LifelineServer
from omni_common.service import Common, Stop, run_service
from omni_common.sockets import ControlServer, new_context
from omni_scheduler.events import Send
from omni_scheduler.machine import Scheduler

log = logging.getLogger("omni.scheduler")

TICK_S = 0.25
#: Ticks between two reports to the gateways when nothing changed.
REPORT_TICKS = 4


class Shell:
    """Feeds the machine with frames, deaths and time, and sends what it says."""

    def __init__(self, common: Common) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = Scheduler(new_incarnation(), common.pipelines)
        self._context = new_context()
        self._control = ControlServer(self._context, common.run.control, self._received, self._unreachable)
        self._lifelines = LifelineServer(common.run.lifeline, self._gone)
        self._run = common.run
        self._ticks = 0
        self._report_due = False

    async def start(self) -> None:
        await self._lifelines.start()
        for incarnation in self._run.dead():
            # It died while there was no scheduler to see it.
            self._gone(incarnation)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _received(self, sender: str, frame: Plain) -> None:
        if not is_incarnation(sender):
            # It would become part of paths.
            self._control.send(sender, Refused("the routing identity must be the incarnation, 16 hex digits"))
            return
        self._send(self._machine.received(sender, frame, self._loop.time()))

    def _gone(self, incarnation: str) -> None:
        self._send(self._machine.gone(incarnation, "its process ended", self._loop.time()))
        # A dead process cannot remove its sockets; nobody else may while it lives.
        self._run.clear(incarnation)

    def _unreachable(self, peer: str) -> None:
        log.debug("%s cannot be reached", peer)
        if not self._lifelines.holds(peer):
            self._gone(peer)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._send(self._machine.tick(self._loop.time()))
        self._ticks += 1
        if self._ticks % REPORT_TICKS == 0:
            self._report()

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            self._control.send(send.peer, send.frame)
        if self._machine.changed and not self._report_due:
            self._report_due = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._report_due = self._machine.changed = False
        fleet = self._machine.status(self._loop.time())
        for gateway in self._machine.gateways():
            self._control.send(gateway, fleet)

    async def close(self) -> None:
        self._timer.cancel()
        self._control.flush()
        self._control.close()
        await self._lifelines.close()
        self._context.term()
        self._run.clear_control()


async def serve(arguments: argparse.Namespace, common: Common, stop: Stop) -> None:
    common.run.lock_scheduler()
    shell = Shell(common)
    await shell.start()
    log.info("serving %s in %s", ", ".join(common.pipelines), common.run.path)
    try:
        await stop.wait()
    finally:
        await shell.close()


def main() -> int:
    return run_service(argparse.ArgumentParser(prog="omni-scheduler", description=__doc__), serve)


if __name__ == "__main__":
    raise SystemExit(main())
