"""Python processes that start at once: a server imports what takes seconds, and each program runs in a fork of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

_SERVER = """
import json, os, signal, sys, traceback
exec(sys.argv[1])
for line in sys.stdin:
    job = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        signal.alarm(120)
        os.environ.update(job["environ"])
        sys.path[1:1] = job["path"]
        failed = 0
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"code": textwrap.dedent(code), "path": [*map(str, path)], "environ": environ}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server ended with exit status {self._process.wait(10)}"
        status, output = json.loads(answer)
        assert status == 0, output
        return json.loads(output.splitlines()[-1])

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()
