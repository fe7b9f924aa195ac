"""What starts ranks on a cluster, on the hosts of one machine (`hosts.made`): Slurm, and ssh with a file of hosts.

Each is a context with the variables for commands on the head. All daemons end on leaving the context.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hosts import SOCKETS, Host
from processes import output_of

START = 120.0  # seconds for all daemons to answer
SLOTS = 8     # ranks per host; more than the machine has cores
# Several tasks on a core and no cgroups: the hosts share the cores of one machine. A host is given up after 30 s, and a
# requeued job starts once its old credential has expired, after 20 s: enough for a loaded machine.
CONFIGURATION = """\
ClusterName=gpucoll
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=3
MessageTimeout=30
TreeWidth=65533
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""
SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PermitUserEnvironment no
AcceptEnv *
"""
CLIENT = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    BatchMode yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""
PROGRAMS = {"slurm": ("munged", "slurmctld", "slurmd", "srun"), "ssh": ("sshd", "ssh", "ssh-keygen")}
PACKAGES = {"slurm": "slurmctld slurmd slurm-client munge", "ssh": "openssh-server openssh-client"}
SYSTEM = f"{os.defpath}:/usr/sbin:/sbin:/usr/local/sbin"  # with the folders of daemons, not on every user's PATH


class NotStarted(Exception):
    """A daemon did not start; the message has the end of its log."""


def found(program: str) -> "str | None":
    return shutil.which(program) or shutil.which(program, path=SYSTEM)


def lacking(kind: str) -> str:
    """Return the reason why this machine cannot start the daemons; "" if it can."""
    missing = [name for name in PROGRAMS[kind] if found(name) is None]
    return f"no {', '.join(missing)}; Debian's packages: {PACKAGES[kind]}" if missing else ""


@contextlib.contextmanager
def running(command: "Sequence[str]", log: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a daemon in a session of its own; end the daemon on leaving."""
    with open(log, "ab") as output:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                  start_new_session=True)
    try:
        yield daemon
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)


def await_daemons(is_ready: "Callable[[], bool]", daemons: "Sequence[subprocess.Popen[bytes]]",
                  logs: "Sequence[str]") -> None:
    """Wait until the daemons answer; raise NotStarted if a daemon has ended, or after `START` seconds."""
    deadline = time.monotonic() + START
    while not is_ready():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            tails = [f"{log}:\n{_tail(log)}" for log in logs if os.path.exists(log)]
            raise NotStarted("\n".join(tails))
        time.sleep(0.1)


def _tail(log: str) -> str:
    return "\n".join(Path(log).read_text(errors="replace").splitlines()[-8:])


@contextlib.contextmanager
def slurm(everyone: "Sequence[Host]") -> "Iterator[dict[str, str]]":
    """Start Slurm: the controller on the head, a daemon on each host; yield the variables for srun and sbatch."""
    head, *nodes = everyone
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))
        os.chmod(folder, 0o755)  # for munge's socket
        os.mkdir(f"{folder}/state")
        Path(folder, "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        Path(folder, "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")  # the hosts share /tmp
        lines = [f"NodeName={host.name} NodeAddr={host.address} CPUs={SLOTS} RealMemory=4000 State=UNKNOWN"
                 for host in nodes]
        configuration = f"{folder}/slurm.conf"
        Path(configuration).write_text(CONFIGURATION.format(head=head.address, folder=folder, nodes="\n".join(lines)))
        variables = {"SLURM_CONF": configuration, **SOCKETS}
        key = os.open(f"{folder}/munge.key", os.O_WRONLY | os.O_CREAT, 0o400)
        os.write(key, os.urandom(128))
        os.close(key)
        munged = [str(found("munged")), "--foreground", "--force", f"--socket={folder}/munge.socket",
                  f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid",
                  f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"]
        commands = {"munge": munged, "slurmctld": head.apart(str(found("slurmctld")), "-D", "-f", configuration)}
        for host in nodes:
            os.mkdir(f"{folder}/{host.name}")
            commands[host.name] = host.apart(str(found("slurmd")), "-D", "-N", host.name, "-f", configuration)
        logs = [f"{folder}/{name}.log" for name in commands]
        daemons = [stack.enter_context(running(command, log))
                   for command, log in zip(commands.values(), logs, strict=True)]
        await_daemons(lambda: _idle(head, variables) == len(nodes), daemons, logs)
        yield variables


def _idle(head: Host, variables: "dict[str, str]") -> int:
    """Return the number of Slurm's idle hosts; 0 before the controller answers."""
    command = head.within(str(found("sinfo")), "-h", "-N", "-t", "idle", "-o", "%N")
    return len(output_of(command, 10.0, **variables).split())


@contextlib.contextmanager
def ssh(everyone: "Sequence[Host]") -> "Iterator[dict[str, str]]":
    """Start a sshd on each host; yield the variables for commands on the head: PATH, and the file of hosts.

    The first `ssh` of the PATH knows the hosts' key, for mpiexec and all other programs using ssh.
    """
    _, *nodes = everyone
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ssh-"))
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd's own condition
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True)
        Path(folder, "config").write_text(CLIENT.format(folder=folder))
        os.mkdir(f"{folder}/bin")
        client = f"{folder}/bin/ssh"
        Path(client).write_text(f'#!/bin/sh\nexec {found("ssh")} -F {folder}/config "$@"\n')
        os.chmod(client, 0o755)
        Path(folder, "hosts").write_text("".join(f"{host.name}\n" for host in nodes))
        daemons, logs = [], [f"{folder}/{host.name}.log" for host in nodes]
        for host, log in zip(nodes, logs, strict=True):
            configuration = SSHD.format(address=host.address, folder=folder, name=host.name)
            Path(folder, f"{host.name}.conf").write_text(configuration)
            command = host.apart(str(found("sshd")), "-D", "-e", "-f", f"{folder}/{host.name}.conf")
            daemons.append(stack.enter_context(running(command, log)))
        variables = {"PATH": f"{folder}/bin:{os.environ.get('PATH', os.defpath)}", "HOSTFILE": f"{folder}/hosts",
                     **SOCKETS}
        await_daemons(lambda: all(_answers(host, everyone[0], client) for host in nodes), daemons, logs)
        yield variables


def _answers(host: Host, head: Host, client: str) -> bool:
    return output_of(head.within(client, "-o", "ConnectTimeout=2", host.name, "echo", "here"), 10.0) == "here\n"


KINDS = {"slurm": slurm, "ssh": ssh}


def prepared(python: str, variables: "dict[str, str]") -> "dict[str, str]":
    """Return the environment of a command on the head, with the folder of a Python first on the PATH."""
    path = variables.get("PATH", os.environ.get("PATH", os.defpath))
    return {**os.environ, **variables, "PATH": f"{os.path.dirname(python)}:{path}"}
