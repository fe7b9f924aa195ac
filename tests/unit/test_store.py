"""The store of compiled kernels: built once, verified, owned by the user."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest

from gpucoll.device import store

ARTIFACT = b"artifact " * 1000

# The program of the other processes, printing each action on a line.


def ask(folder, content=ARTIFACT, source="source", builds=None):
    """Open a store anew, like another process; check the artifact, and whether the call built it (`builds`)."""
    opened, calls = store.Store(folder), []
    path = opened.path(source, ".so", lambda: calls.append(1) or content)
    assert path.read_bytes() == content
    assert builds in (None, bool(calls))
    return opened, path


def assert_private(opened, folder):
    """Assert a private folder away from `folder`, and a reason naming `folder`."""
    assert not opened.folder.is_relative_to(folder)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in opened.unavailable_reason


def test_built_and_verified_once(tmp_path, monkeypatch):
    opened, path = ask(tmp_path, builds=True)
    assert ask(tmp_path, builds=False)[1] == path
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read again"))
    assert opened.path("source", ".so", lambda: pytest.fail("built again")) == path


def test_everything_counts(tmp_path):
    opened = store.Store(tmp_path)
    for reader in (opened, store.Store(tmp_path)):
        for case in (("a", "b", ".c"), ("ab", "", ".c"), ("a", "bb", ".c"), ("a", "b", ".d")):
            source, flags, suffix = case
            assert reader.path(source, suffix, str(case).encode, flags=flags).read_bytes() == str(case).encode()
    _, one = ask(tmp_path)
    _, other = ask(tmp_path, b"other", source="other")
    one.rename(one.with_name(f"{other.name.partition('-')[0]}-{one.name.partition('-')[2]}"))
    other.unlink()
    ask(tmp_path, b"other", source="other")  # a renamed file does not pass for another kernel


def test_whatever_is_broken_is_built_again(tmp_path):
    for harm in (Path.unlink, lambda path: path.write_bytes(b"x" + path.read_bytes()[1:])):
        harm(ask(tmp_path)[1])
        ask(tmp_path, builds=True)


def test_folders_of_others_are_left_alone(tmp_path):
    for mode in (0o770, 0o707):
        ask(tmp_path / str(mode), b"planted")[0].folder.chmod(mode)
        assert_private(ask(tmp_path / str(mode))[0], tmp_path / str(mode))
    opened, _ = ask(tmp_path, b"planted")
    opened.folder.rename(tmp_path / "elsewhere")
    opened.folder.symlink_to(tmp_path / "elsewhere")
    assert_private(ask(tmp_path)[0], tmp_path)
    opened, _ = ask(tmp_path / "another's", b"planted")
    with pytest.MonkeyPatch.context() as patch:
        other = os.stat_result((*opened.folder.lstat()[:4], os.geteuid() + 1, *opened.folder.lstat()[5:]))
        lstat = Path.lstat
        patch.setattr(Path, "lstat", lambda path: other if path == opened.folder else lstat(path))
        assert_private(ask(tmp_path / "another's")[0], tmp_path)


def test_nobody_else_has_a_say_on_the_way(tmp_path):
    for mode in (0o770, 0o707):
        way = tmp_path / str(mode) / "deep"
        ask(way, b"planted")
        way.parent.chmod(mode)
        assert_private(ask(way)[0], way)
        with pytest.raises(PermissionError):
            store.read_trusted(way / "table")
        # Like a temporary folder: the sticky bit keeps users from exchanging the files of others.
        way.parent.chmod(mode | 0o1000)
        assert ask(way, b"planted")[0].unavailable_reason == ""
    mask = os.umask(0)
    try:
        assert ask(tmp_path / "open" / "wide")[0].unavailable_reason == ""
    finally:
        os.umask(mask)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_without_a_folder_a_private_one_serves(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GPUCOLL_CACHE", str(tmp_path / "file"))
    assert store.default_folder() == tmp_path / "file"
    assert_private(ask(tmp_path / "file")[0], tmp_path)
    _, path = ask(tmp_path)
    path.unlink()
    monkeypatch.setattr(store, "LOCK_TIMEOUT", 0)
    with filelock.FileLock(path.with_name(f"{path.name.partition('-')[0]}.lock")):  # held by a hanging process
        assert_private(ask(tmp_path)[0], tmp_path)
    written = store._written
    monkeypatch.setattr(store, "_written", lambda path, *rest: no_room() if path.is_relative_to(tmp_path)
                        else written(path, *rest))
    opened, _ = ask(tmp_path)
    assert_private(opened, tmp_path)
    assert os.strerror(errno.ENOSPC) in opened.unavailable_reason


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_killed_processes_have_left_is_swept(tmp_path, monkeypatch):
    """Sweeping spares folders of living processes, young folders (perhaps not yet locked) and other users' folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = """
import os, pathlib, signal, sys, tempfile
from gpucoll.device.store import private_folder
tempfile.tempdir = sys.argv[1]
(private_folder()[0] / "litter").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    mine, remove = store.private_folder()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    dead = sorted(set(tmp_path.iterdir()) - {mine})
    assert len(dead) == 2
    for place in (mine, dead[0]):
        os.utime(place, (0, 0))
    _, remove_again = store.private_folder()
    remove_again()
    assert set(tmp_path.iterdir()) == {mine, dead[1]}
    os.utime(dead[1], (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1 + os.getuid())
        store._sweep()
    assert dead[1].exists()
    remove()
    store._sweep()
    assert list(tmp_path.iterdir()) == []
