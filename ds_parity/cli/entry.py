"""The command line itself: what ends it, and how."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated

import typer

from ds_parity._version import __version__
from ds_parity.cli.calibrate_command import calibrate
from ds_parity.cli.compare_command import compare
from ds_parity.cli.console import err, forget_output, open_streams, out
from ds_parity.cli.controls_command import controls
from ds_parity.cli.doctor_command import doctor
from ds_parity.cli.init_command import init
from ds_parity.cli.plan_command import plan
from ds_parity.cli.probe_command import probe
from ds_parity.cli.rewrite_command import rewrite
from ds_parity.cli.verify_command import verify
from ds_parity.errors import ConfigError, DsParityError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

# In the order of the help.
for _command in (init, doctor, verify, rewrite, compare, probe, plan, controls, calibrate):
    app.command()(_command)


def main() -> None:
    """Run the command line; whatever is wrong with the input ends in one message and exit code 2.

    So does what the machine refuses. Exit code 1 says that something differs, and nothing else.
    """
    open_streams()
    output = sys.stdout
    try:
        try:
            _refuse_empty(sys.argv[1:])
            # The name under which completion finds its variable, however the command was started.
            app(prog_name="ds-parity")
        finally:
            sys.stdout.flush()  # a disk that is full says so here at the latest
    except SystemExit:
        if sys.stdout is output:
            raise
        sys.exit(2)  # click puts another in its place where nobody reads any more (`| head`), and would leave with 1
    except DsParityError as error:
        err.print(f"ds-parity: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # who reads has seen enough (`| head`)
        forget_output()
        sys.exit(2)
    except OSError as error:
        err.print(f"ds-parity: {_of_the_machine(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        forget_output()
        sys.exit(2)
    except Exception:
        # Python's own exit code is 1, which would say that the runs differ.
        traceback.print_exc()
        sys.exit(2)


def _refuse_empty(arguments: list[str]) -> None:
    """Refuse what a variable leaves that the shell does not have: an empty path would be the folder where one is.

    Raises:
        ConfigError: an argument, or the value of an option, is empty.
    """
    for number, argument in enumerate(arguments, start=1):
        option, _, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if value.strip() or (option and argument == option):
            continue
        before = option or (arguments[number - 2] if number > 1 else "")
        which = f"argument {number}{f', behind {before},' if before.startswith('--') else ''}"
        raise ConfigError(
            f"{which} is empty: give a value (a shell's variable that is not set leaves none; '.' is the folder where "
            "you are), or leave it out"
        )


def _of_the_machine(error: OSError) -> str:
    """Return the message for what the file system or the network refused, with the way out where it is known."""
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else f"{error}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}; choose a folder that you may write (--out or --report, where the command has them)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; free some space, or write to another disk (by --out, --report or the shell's >)"
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return f"{what}; --out names a folder, and --report a file: name one that is of this kind, or not there yet"
    return what


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"ds-parity {__version__}")
        raise typer.Exit


@app.callback(help="Step DeepSpeed's optimizer by rollouts, and prove that the step is right.")
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass
