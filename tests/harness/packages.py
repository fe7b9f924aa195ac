"""Packages needed by tests beyond the environment: installed by uv if available, otherwise by pip."""

import shutil
import subprocess
import sys


class NoNetwork(Exception):
    """No package can be installed."""


def install(*arguments, python=sys.executable):
    """Run the installer; raise NoNetwork if the package index is unreachable, AssertionError after other failures."""
    job = _installer(python, *arguments)
    if job.returncode:
        if _installer(python, "--dry-run", "--no-deps", "--reinstall" if shutil.which("uv") else "--ignore-installed",
                      "pip").returncode:
            raise NoNetwork(f"no package can be had: {job.stdout.strip()[-200:]}")
        raise AssertionError(job.stdout)


def _installer(python, *arguments):
    command = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
    return subprocess.run([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
