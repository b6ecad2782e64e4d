"""Python processes that start at once: a server imports what takes seconds, and each program runs in a fork of it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_SERVER = """
import atexit, json, os, runpy, signal, sys, traceback
exec(sys.argv[1])

def program(argv, folder):
    os.chdir(folder)
    sys.argv = argv[1:] if argv[0] in ("-c", "-m") else argv
    try:
        if argv[0] == "-c":
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        elif argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0

for line in sys.stdin:
    job = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        signal.alarm(300)
        os.environ.update(job["environ"])
        sys.path[1:1] = job["path"]
        failed = 0
        if "argv" in job:
            os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_CREAT), 2)
            failed = program(job["argv"], job["folder"])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
        try:
            exec(compile(job["code"], "<program>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            failed = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    os.close(write)
    with open(read) as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, output]), flush=True)
"""


class ForkServer:
    """A process that has run ``preload``; each program runs in a fork of it and prints JSON on its last line."""

    def __init__(self, preload: str, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, preload],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *path: object, **environ: str) -> Any:
        """Run a program with these folders to import from and variables, and return what it prints, read as JSON."""
        status, output = self._ask({"code": textwrap.dedent(code), "path": [*map(str, path)], "environ": environ})
        assert status == 0, output
        return json.loads(output.splitlines()[-1])

    def program(self, *argv: object, path: Sequence[object] = (), folder: object = ".", **environ: str) -> Any:
        """Run what ``python *argv`` does: a file, ``-m`` and a module or ``-c`` and code, each with its arguments.

        Args:
            *argv: of Python.
            path: folders to import from.
            folder: the working directory.
            **environ: variables.

        Returns:
            A ``subprocess.CompletedProcess`` with the text of stdout and of stderr.
        """
        words = [*map(str, argv)]
        with tempfile.TemporaryDirectory() as errors:
            job = {"argv": words, "path": [*map(str, path)], "environ": environ, "folder": str(folder)}
            status, output = self._ask({**job, "errors": f"{errors}/stderr"})
            return subprocess.CompletedProcess(words, status, output, pathlib.Path(errors, "stderr").read_text("utf-8"))

    def _ask(self, job: Mapping[str, Any]) -> list[Any]:
        """Return the exit status and the output of a job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server ended with exit status {self._process.wait(10)}"
        return json.loads(answer)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()
