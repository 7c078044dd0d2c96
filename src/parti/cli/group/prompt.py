"""`parti group prompt`: the verbs in an interactive shell, which asks for missing arguments."""

from __future__ import annotations

import asyncio
import shlex
import threading
from dataclasses import dataclass, field
from typing import Any

import click

from parti.cli.group.consume import JoinArguments, consume_until, event_text, show_text
from parti.cli.group.elastic import compact, elastic
from parti.cli.group.parse import seconds
from parti.cli.group.static import static
from parti.cli.output import note
from parti.cli.settings import log_quietly, with_config
from parti.config import LoadedConfig
from parti.errors import PartiError
from parti.groups.names import GroupKind
from parti.groups.template import ConsumerTemplate
from parti.wire.configured import configured_options
from parti.wire.options import ConnectOptions


@dataclass(slots=True)
class _Job:
    """A `consume` that runs in the background of the prompt."""

    name: str
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    until: asyncio.Event

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.until.set)
        self.thread.join()


@dataclass(slots=True)
class Shell:
    """The prompt's state between two lines."""

    options: ConnectOptions
    flags: list[str]
    kind: GroupKind = GroupKind.ELASTIC
    sleep: float = 0.02
    jobs: list[_Job] = field(default_factory=list)

    def run(self, line: str) -> bool:
        """Execute the line; False when it asks to leave."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            note(f"Error: {error}")
            return True
        if not words:
            return True
        verb, rest = words[0], words[1:]
        if verb in ("exit", "quit"):
            return False
        try:
            self._do(verb, rest)
        except click.ClickException as error:
            note(f"Error: {error.format_message()}")
        except (PartiError, click.exceptions.Exit) as error:
            if isinstance(error, PartiError):
                note(f"Error: {error}")
        except click.Abort:
            note("Cancelled.")
        return True

    def _do(self, verb: str, rest: list[str]) -> None:
        if verb in ("help", "?"):
            self._help()
        elif verb in list(GroupKind):
            self.kind = GroupKind(verb)
        elif verb in ("processing-time", "processingtime"):
            given = _ask(rest, "processing time")
            self.sleep = seconds(click.Context(click.Command(verb)), click.Option(["--sleep"]), given) or 0.0
        elif verb in ("consume", "join"):
            self._consume(rest)
        elif verb == "jobs":
            for number, job in enumerate(self.jobs):
                click.echo(f"{number}: {job.name}{'' if job.thread.is_alive() else ' (ended)'}")
        elif verb == "stop":
            self.stop_all()
        else:
            self._command(verb, rest)

    def _command(self, verb: str, rest: list[str]) -> None:
        commands = _KINDS[self.kind]
        with click.Context(commands, info_name=self.kind.value) as ctx:
            name, command, arguments = commands.resolve_command(ctx, [verb, *rest])
            assert command is not None
            if isinstance(command, click.Group):
                name = arguments[0] if arguments else click.prompt(f"{verb} ({'/'.join(command.commands)})")
                command, arguments = command.get_command(ctx, name) or command, arguments[1:]
            # The arguments were asked for once: the command uses exactly what the user saw and confirmed.
            command.main([*self._complete(command, arguments), *self.flags], prog_name=name, standalone_mode=False)

    def _complete(self, command: click.Command, given: list[str]) -> list[str]:
        """The arguments, after asking for each missing one."""
        wanted = [param for param in command.params if isinstance(param, click.Argument)]
        typed = [word for word in given if not word.startswith("-")]
        for param in wanted[len(typed) :]:
            answer = click.prompt(str(param.human_readable_name).lower().replace("_", " "))
            words = shlex.split(answer) if param.nargs == -1 else [answer]
            given = [*given, *words]
            typed += words
        return given

    def _consume(self, rest: list[str]) -> None:
        stream, group, member = (_ask(rest[place : place + 1], what) for place, what in enumerate(_PLACE))
        joining = JoinArguments(self.kind, stream, group, member, ConsumerTemplate(ack_wait=2), sleep=self.sleep)
        started: list[Any] = []
        ready = threading.Event()

        async def work() -> None:
            until = asyncio.Event()
            started.extend([asyncio.get_running_loop(), until])
            ready.set()
            try:
                await consume_until(
                    self.options, joining, show=show_text, on_event=lambda e: note(event_text(e)), until=until
                )
            except PartiError as error:
                note(f"Error: {error}")

        thread = threading.Thread(target=lambda: asyncio.run(work()), name=f"consume-{member}", daemon=True)
        thread.start()
        ready.wait()
        self.jobs.append(_Job(f"{self.kind} {stream} {group} {member}", thread, *started))
        note("consuming beside the prompt; `stop` ends it, `jobs` lists what runs")

    def stop_all(self) -> None:
        for job in self.jobs:
            if job.thread.is_alive():
                job.stop()
        self.jobs.clear()

    def _help(self) -> None:
        commands = _KINDS[self.kind]
        click.echo("static, elastic: switch the kind of groups   exit, quit: leave   processing-time 20ms")
        click.echo("consume STREAM GROUP MEMBER: in the background   jobs   stop")
        for name in sorted(commands.commands):
            names = [name, *(alias for alias, target in commands.aliases.items() if target == name)]
            click.echo(f"{', '.join(names)}: {commands.commands[name].get_short_help_str(80)}")


_PLACE = ("stream", "group", "member")


def _ask(given: list[str], what: str) -> str:
    return given[0] if given else str(click.prompt(what))


def _same_flags(params: dict[str, Any]) -> list[str]:
    """The connection flags of the prompt, for each of its commands."""
    names = {"config_file": "--config", "server": "--server", "context": "--context"}
    flags = [part for name, flag in names.items() if params.get(name) for part in (flag, str(params[name]))]
    return flags + [part for setting in params.get("settings") or () for part in ("--set", setting)]


def prompt_command(kind: GroupKind, help_text: str) -> click.Command:
    """A shell that starts with the groups of this kind."""

    @click.command("prompt", help=help_text)
    @with_config
    def prompt(loaded: LoadedConfig) -> None:
        log_quietly(loaded)
        options = configured_options(loaded).options
        shell = Shell(options, _same_flags(click.get_current_context().params), kind)
        try:
            while True:
                try:
                    line = click.prompt(f"[{shell.kind}]", prompt_suffix="> ", default="", show_default=False)
                except (click.Abort, EOFError):
                    break
                if not shell.run(line):
                    break
        finally:
            shell.stop_all()

    return prompt


prompt = prompt_command(GroupKind.ELASTIC, "An interactive shell with the same verbs; `help` lists them.")
_KINDS = {GroupKind.STATIC: static, GroupKind.ELASTIC: elastic, GroupKind.COMPACT: compact}
for _kind, _commands in _KINDS.items():
    _commands.add(prompt_command(_kind, f"An interactive shell that begins with {_kind} groups."))
