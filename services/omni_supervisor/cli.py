"""`omni`: the command line."""

import argparse
import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

from omni_common.errors import OmniError
from omni_common.paths import deploy_file, models_dir
from omni_common.pipeline_check import PipelineError
from omni_common.service import load_arguments, pipeline_arguments
from omni_supervisor import commands, serve
from omni_supervisor.checkpoint import is_folder, prepare_checkpoint
from omni_supervisor.control import find_supervisor, send_order
from omni_supervisor.describe import describe
from omni_supervisor.orders import ALL, MAX_REPLICAS, Drain, Order, Restart, Scale
from omni_supervisor.plan import API_KEYS
from omni_supervisor.prepare import list_names, load_list, prepare

#: What was asked for cannot work as it stands: a wrong flag, pipeline or port. Nothing has been started.
USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when it failed, 2 when it could not be started as asked, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except PipelineError as error:
        print(error.message, file=sys.stderr)
        return USAGE
    except OmniError as error:
        print(f"omni: {error.message}", file=sys.stderr)
        return USAGE if arguments.command == "serve" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output is gone. Nothing more can be written, not even by the interpreter at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni", description="Serve omni-modality models, and talk to a server.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command

    serve.add_arguments(add("serve", serve.serve, "Run a whole system on this machine: every process of it."))

    command = add("ask", _talk, "Ask by text or by voice; the answer is streamed, and spoken if wanted.")
    command.add_argument("question", nargs="?", default="")
    command.add_argument("--audio", type=Path, metavar="FILE", help="a spoken question, or what the question is about")
    _speech_arguments(command)
    _client_arguments(command, model="embedded")

    command = add("say", _talk, "Have a text spoken.")
    command.add_argument("text")
    command.add_argument("--speed", type=float, default=1.0)
    command.add_argument(
        "--ref-audio", type=Path, metavar="FILE", help="speak like this, where the model clones voices"
    )
    command.add_argument("--ref-text", default="", metavar="TEXT", help="what is said there")
    _speech_arguments(command)
    _client_arguments(command, model="speech")

    command = add("transcribe", _talk, "Print what is said in an audio file.")
    command.add_argument("file", type=Path)
    command.add_argument("--format", default="text", choices=["text", "json", "verbose_json", "srt", "vtt"])
    _client_arguments(command, model="embedded")

    command = add("status", _talk, "Show stages, replicas, load and arenas of a running system.")
    command.add_argument("--json", action="store_true", help="as the server says it")
    _client_arguments(command)

    command = add("drain", _order, "Let a worker of this machine's omni serve finish and go; it is not started again.")
    command.add_argument("target", help="a stage (all of its replicas) or one replica, as talker or talker-0")
    command.set_defaults(order=lambda arguments: Drain(arguments.target))
    _run_dir_argument(command)

    command = add("restart", _order, "Replace processes one after another; no request fails by it.")
    command.add_argument("target", help=f"a stage, a replica, scheduler, gateway, or {ALL}")
    command.add_argument(
        "--stop-first",
        action="store_true",
        help="end the old process before the new one starts, where both do not fit; requests wait meanwhile",
    )
    command.set_defaults(order=lambda arguments: Restart(arguments.target, arguments.stop_first))
    _run_dir_argument(command)

    command = add("scale", _order, "Run so many replicas of a stage; those that are too many finish and go.")
    command.add_argument("scale", type=_scale, metavar="STAGE=COUNT", help="as talker=3")
    command.set_defaults(order=lambda arguments: arguments.scale)
    _run_dir_argument(command)

    command = add("validate", _validate, "Check pipelines and show their graph.")
    command.add_argument("pipelines", metavar="PIPELINE", help="name, or file; several with commas")
    pipeline_arguments(command)

    command = add("prepare", _prepare, "Fetch the models of a pipeline, or split a checkpoint into its stages, once.")
    lists = ", ".join(list_names())
    command.add_argument("what", metavar="LIST|FOLDER", help=f"list of models ({lists}), or folder of a checkpoint")
    command.add_argument("--name", default="", help="of the prepared checkpoint, default the folder's name")
    command.add_argument("--models", type=Path, metavar="DIR", help=f"default {models_dir()}")

    add("version", _version, "Print the version.")
    return parser


def _speech_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, metavar="FILE", help="keep the speech: .wav, .mp3, .flac, .opus, .aac")
    command.add_argument("--play", action="store_true", help="play the speech as it comes")
    command.add_argument("--voice", default="default")


def _client_arguments(command: argparse.ArgumentParser, model: str = "") -> None:
    if model:
        command.add_argument("--model", default=model, help=f"pipeline, default {model}")
    url = f"http://127.0.0.1:{serve.DEFAULT_PORT}"
    command.add_argument("--url", default=url, help=f"default {url}")
    key = next(iter(os.environ.get(API_KEYS, "").split()), "")
    command.add_argument("--api-key", default=key, metavar="KEY", help=f"default ${API_KEYS}")


def _run_dir_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="of the omni serve that is meant, if several run")


def _scale(text: str) -> Scale:
    stage, _, count = text.partition("=")
    if not stage or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not STAGE=COUNT, as talker=3")
    if int(count) > MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text}: a stage has 0 to {MAX_REPLICAS} replicas")
    return Scale(stage, int(count))


def _order(arguments: argparse.Namespace) -> int:
    asyncio.run(_follow(find_supervisor(arguments.run_dir), arguments.order(arguments)))
    return 0


async def _follow(path: Path, order: Order) -> None:
    async for said in send_order(path, order):
        print(said, flush=True)


_TALKS = {"ask": commands.ask, "say": commands.say, "transcribe": commands.transcribe, "status": commands.status}


def _talk(arguments: argparse.Namespace) -> int:
    asyncio.run(_TALKS[arguments.command](arguments))
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    print("\n\n".join(describe(pipeline) for pipeline in load_arguments(arguments).values()))
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    what, models = arguments.what, arguments.models or models_dir()
    lists = list_names()
    if what not in lists and is_folder(what):
        prepare_checkpoint(Path(what), models, arguments.name)
    elif what not in lists:
        raise OmniError(f"{what} is neither a list of models ({', '.join(lists)}) nor a folder with a checkpoint")
    elif arguments.name:
        raise OmniError("--name is for a folder: the models of a list have names")
    else:
        prepare(load_list(deploy_file("models", f"{what}.yaml")), models)
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(importlib.metadata.version("omnibus"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
