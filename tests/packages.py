"""Packages for tests that need more than the environment has: installed by uv where it is there, else by pip."""

import shutil
import subprocess
import sys


class NoNetwork(Exception):
    """No package can be had."""


def install(*arguments, python=sys.executable):
    """Run the installer; raise NoNetwork where it finds not even itself, AssertionError for anything else."""
    job = _installer(python, *arguments)
    if job.returncode:
        if _installer(python, "--dry-run", "--no-deps", "--reinstall" if shutil.which("uv") else "--ignore-installed",
                      "pip").returncode:
            raise NoNetwork(f"no package can be had: {job.stdout.strip()[-200:]}")
        raise AssertionError(job.stdout)


def _installer(python, *arguments):
    command = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
    return subprocess.run([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
