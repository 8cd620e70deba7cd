"""The `shardline` command: global flags, the list of commands, and what a failure looks like to a person.

Owns exit codes: 0 done, 1 failed (a sentence and advice on stderr, no traceback), 2 wrong usage or configuration.
Heavy imports stay inside the commands. Shown by tests/cli/test_main.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from shardline import __version__
from shardline.cli.artifact import artifact
from shardline.cli.artifact_store import STORE_COMMANDS
from shardline.cli.audit import audit
from shardline.cli.bench import bench
from shardline.cli.chat import chat
from shardline.cli.cluster import demo, serve, up
from shardline.cli.cuts import cuts
from shardline.cli.doctor import doctor
from shardline.cli.expel import expel
from shardline.cli.flags import naming_flags
from shardline.cli.invite import invite
from shardline.cli.invocation import Invocation
from shardline.cli.keys import keys
from shardline.cli.listings import config, nodes, routes, sessions
from shardline.cli.plan import plan
from shardline.cli.roles import gateway, node, tracker
from shardline.cli.split import split
from shardline.errors import ShardlineError

USAGE_CODES = frozenset({"setting_invalid", "insecure_listener", "cluster_ambiguous"})


class _InOrder(click.Group):
    """Lists the commands as they were added: what one wants first stands first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Settings may also stand in the file or in SHARDLINE_… variables: `shardline config show` lists them all.",
)
@click.version_option(__version__, prog_name="shardline")
@click.option("--config", metavar="FILE", help="TOML file [default: ~/.config/shardline/config.toml, where it is].")
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any setting, for this call. Repeatable."
)
@click.option(
    "--state-dir", metavar="FOLDER", help="Credential, keys, logs, caches [default: ~/.local/state/shardline]."
)
@click.option("--credential-file", metavar="FILE", help="Cluster credential [default: the one in the state folder].")
@click.option(
    "--log-format", type=click.Choice(["auto", "console", "json"]), help="Log lines on stderr [default: auto]."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
@click.option("--supervised", is_flag=True, hidden=True)
@click.pass_context
def cli(
    context: click.Context,
    config: str | None,
    assignments: tuple[str, ...],
    state_dir: str | None,
    credential_file: str | None,
    log_format: str | None,
    log_level: str | None,
    debug: bool,
    supervised: bool,
) -> None:
    """Serve one open model over several machines.

    A Node holds a range of the model's layers, a Tracker picks routes over Nodes, a Gateway speaks the OpenAI API.
    `shardline up MODEL` starts all of them on this machine.
    """
    flags = {
        "state_dir": state_dir,
        "credential_file": credential_file,
        "log_format": log_format,
        "log_level": log_level,
    }
    context.obj = Invocation(config, assignments, flags, supervised, debug)


for _command in (
    up,
    demo,
    chat,
    nodes,
    sessions,
    routes,
    tracker,
    gateway,
    serve,
    node,
    invite,
    expel,
    keys,
    doctor,
    plan,
    audit,
    cuts,
    split,
    artifact,
    bench,
    config,
):
    cli.add_command(_command)
for _command in STORE_COMMANDS:
    artifact.add_command(_command)
naming_flags(cli)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command and of `python -m shardline`; always leaves through `SystemExit`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(given, prog_name="shardline", standalone_mode=False)
        if isinstance(code, int):
            sys.exit(code)  # of a command that ended with `click.exceptions.Exit`
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has what it wants (`| head`).
        sys.stderr.close()
        sys.exit(0)
    except ShardlineError as error:
        if "--debug" in given:
            raise
        print(f"shardline: {error.message}\n  What to do: {error.advice}", file=sys.stderr)
        sys.exit(2 if error.code in USAGE_CODES else 1)
    except Exception as error:  # The last boundary: a person gets a sentence, `--debug` the traceback.
        if "--debug" in given:
            raise
        print(
            f"shardline: a fault of Shardline: {type(error).__name__}: {error}\n"
            "  What to do: run it again with `shardline --debug …` and report what it prints.",
            file=sys.stderr,
        )
        sys.exit(1)
