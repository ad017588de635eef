"""A real SLURM cluster on this one machine, for tests: `with Lab(root) as lab: lab.run(["sinfo"])`.

A login host and compute hosts n1, n2, ...: each has a network, a host name, processes, mounts, a /tmp and a /dev/shm of
its own (Linux namespaces), and all of them share the machine's other folders, as a cluster shares its file system. What
a lab mounts is mounted inside its namespaces only. It ends with the process that started it, even if that is killed.
`python tests/cluster/lab.py` opens a shell on a lab's login host.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

REPOSITORY = Path(__file__).resolve().parents[2]
USER, UID = "labuser", 2000
STATUS_COMMANDS = ("squeue", "sacct", "scontrol")
PROGRAMS = (
    *("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo", "sacctmgr", "sshare", "munged"),
    *("ip", "unshare", "nsenter", "setpriv", "gcc"),
)
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
CLOCK = Path(__file__).with_name("clock_ahead.c")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SMI = shutil.which("nvidia-smi")
DRIVER = {}  # where the driver's programs and libraries are, if that isn't the usual place
if _SMI:
    PATH += f":{Path(_SMI).parent}"
    DRIVER = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
# Without this a requeued job waits two minutes before it starts again.
AuthInfo=cred_expire=5
SlurmctldPidFile={root}/state/slurmctld.pid
SlurmdPidFile={root}/state/slurmd.%n.pid
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
# The hosts claim more processors than the machine may have.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={memory_per_cpu}
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = """\
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10
PartitionName=cpu Nodes=ALL MaxTime=INFINITE PriorityTier=10
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE
PartitionName=lowcancel Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL GraceTime=10
PartitionName=short Nodes=ALL MaxTime=2 OverTimeLimit=0 PriorityTier=10
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoreFlags=job_comment,job_env,job_script
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=login
DbdAddr=10.77.0.1
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={root}/log/slurmdbd.log
PidFile={root}/state/slurmdbd.pid
"""
# The database dies with the lab, so nothing needs to reach the disk.
MARIADB = [
    "--no-defaults",
    "--user=root",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--innodb-doublewrite=0",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
]
NO_DEVICE = "/run/no-device"  # of a driver that doesn't exist: opening it fails
# SLURM 22.05 starts no slurmd where cgroups are version 2 without systemd: there it gets a version 1 of its own.
_CGROUP_1 = """\
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi"""
BROKEN_COMMAND = """\
#!/bin/sh
echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
exit 1
"""
# The user clones a repository that belongs to somebody else, which git refuses otherwise.
GITCONFIG = f"""\
[safe]
    directory = *
[user]
    name = {USER}
    email = {USER}@lab
"""
# What the controller is told at the end of a job whose memory cgroup killed it: 253 is SLURM's exit code for that.
OUT_OF_MEMORY = """\
import ctypes, glob, sys
slurm = ctypes.CDLL(glob.glob("/usr/lib/*/slurm*/libslurmfull.so")[0], ctypes.RTLD_GLOBAL)
slurm.slurm_init(None)
sys.exit(slurm.slurm_complete_job(int(sys.argv[1]), 253))
"""


class LabError(RuntimeError):
    """The cluster didn't do what it was asked to; with the ends of its logs."""


@dataclass
class Host:
    """A set of namespaces that lives as long as the process `pid`, and the processes started in it from outside."""

    name: str
    holder: subprocess.Popen
    pid: int
    children: list[subprocess.Popen] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> list[str]:
        # By file, not by --target: nsenter is born in the host's process namespace, where the pid has another number.
        kinds = {"mount": "mnt", "net": "net", "uts": "uts"}
        return ["/usr/bin/nsenter", *(f"--{kind}=/proc/{self.pid}/ns/{file}" for kind, file in kinds.items()), "--"]

    def start(self, words: list[str], **options: object) -> subprocess.Popen:
        with self.lock, self._births():
            process = subprocess.Popen([*self.enter(), *words], **options)
            self.children = [child for child in self.children if child.poll() is None] + [process]
        return process

    @contextlib.contextmanager
    def _births(self) -> Iterator[None]:
        """What this thread starts is born in the host's process namespace: a signal to it needs no go-between."""
        ours, theirs = (os.open(f"/proc/{who}/ns/pid", os.O_RDONLY) for who in ("self", self.pid))
        try:
            os.setns(theirs, os.CLONE_NEWPID)
            yield
        finally:
            os.setns(ours, os.CLONE_NEWPID)
            os.close(ours)
            os.close(theirs)

    def kill(self) -> None:
        """Kill the first process of the host's namespace, with which the kernel kills all others."""
        if self.holder.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for child in self.children:  # before the holder: the first process waits for these, which only we can reap
            child.wait()
        self.holder.wait()
        self.holder.stdin.close()


class Lab:
    """The cluster. `nodes` is the list of its compute hosts, `home` the ordinary user's folder on all hosts.

    `shared`: folders that the hosts see although they lie in /tmp or where others can't enter (they always see the
    repository, its Python and `root`). `programs`: a Debian tree to take the programs from. `memory_kill`: kill what
    uses more memory than its job asked for; such jobs end as FAILED (see `out_of_memory`). `extra_conf`: lines for
    slurm.conf; they win over ours. `real_gpus`: devices of this machine, in as many as each host has, which hosts take
    in turn, in place of `gpus` that are none. `features`: of which each host has one, in turn.
    """

    def __init__(
        self,
        root: Path,
        nodes: int = 3,
        cpus: int = 4,
        gpus: int = 2,
        memory_mb: int = 8000,
        accounting: bool = True,
        extra_conf: Sequence[str] = (),
        memory_kill: bool = False,
        programs: Path | None = None,
        shared: Sequence[Path] = (),
        real_gpus: Sequence[Sequence[Path]] = (),
        features: Sequence[str] = (),
    ) -> None:
        self.root = Path(root).resolve()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.home = self.root / "home" / USER
        self._logs = self.root / "log"
        self.cpus, self.gpus, self.memory_mb = cpus, len(real_gpus[0]) if real_gpus else gpus, memory_mb
        self.real_gpus = real_gpus
        self.features = dict(zip(self.nodes, itertools.cycle(features), strict=False))
        self.accounting, self.memory_kill, self.programs = accounting, memory_kill, programs
        self.extra_conf, self.shared = extra_conf, shared
        self.addresses = {"login": "10.77.0.1"} | {name: f"10.77.0.{10 + int(name[1:])}" for name in self.nodes}
        self._hosts: dict[str, Host] = {}
        self._daemons: dict[str, subprocess.Popen] = {}
        self._broken: list[tuple[str, str]] = []  # hosts and commands

    def __enter__(self) -> "Lab":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._write_files()
        # The rack is no host: it holds the network's bridge, and the mounts that every host begins with.
        namespaces = ["unshare", "--mount", "--net", "--propagation", "private"]
        self._hosts["rack"] = self._hold("rack", namespaces, self._rack())
        self._power_on("login")
        self._start_munge()
        if self.accounting:
            self._start_database()
            self.start_accounting()
            for words in (["cluster", "lab"], ["account", "lab"], ["user", f"root,{USER}", "Account=lab"]):
                self.run(["sacctmgr", "-i", "add", *words], user="root")
        self.start_controller()
        for node in self.nodes:
            self.boot(node)
        self.wait_idle()

    def stop(self) -> None:
        """End every process of the lab: those of its users too."""
        for name in reversed(list(self._hosts)):
            self._hosts.pop(name).kill()
        self._daemons.clear()

    # Commands

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        user: str = USER,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        host: str = "login",
        **options: object,
    ) -> subprocess.Popen:
        """Start a command on a host, in a session and a process group of its own.

        The process is the command itself: `send_signal`, `kill` and `os.killpg(process.pid, ...)` reach it directly.
        It gets a fresh login's environment with `env` on top, not the caller's, and begins in `home`.
        """
        machine = self._hosts[host]
        uid = {USER: UID, "root": 0}[user]
        become = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        home = str(self.home) if user == USER else "/root"
        environment = {
            "PATH": PATH,
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "LANG": "C.UTF-8",
            "HOSTNAME": host,
            **DRIVER,
        }
        words = [*become, "/usr/bin/env", "--default-signal", f"--chdir={cwd or self.home}", *map(str, command)]
        options = {"stdin": DEVNULL, "start_new_session": True} | options
        return machine.start(words, env=environment | DRIVER | dict(env or {}), **options)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
        **options: object,
    ) -> subprocess.CompletedProcess:
        """Run a command on the login host (or on `host`) and return its output; `options` are those of `popen`."""
        pipes = {"stdin": DEVNULL if input is None else PIPE, "stdout": PIPE, "stderr": PIPE}
        process = self.popen(command, encoding="utf-8", errors="replace", **pipes, **options)
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        result = subprocess.CompletedProcess(list(map(str, command)), process.returncode, output, errors)
        try:
            if check:
                result.check_returncode()
        except subprocess.CalledProcessError as error:
            error.add_note(f"{output[-2000:]}{errors[-4000:]}")
            raise
        return result

    def on_node(self, node: str, command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess:
        return self.run(command, host=node, **options)

    # What happens to hosts and jobs

    def boot(self, node: str) -> None:
        self._power_on(node)
        self._daemon(f"slurmd.{node}", ["slurmd", "-D"], node)

    def crash(self, node: str) -> None:
        """Cut a host's power: its processes end, and the others hear nothing more of it."""
        self._ip("link", "delete", node)  # first: the dying processes' connections would say goodbye
        self._daemons.pop(f"slurmd.{node}")
        self._hosts.pop(node).kill()

    def isolate(self, node: str) -> None:
        """Pull a host's network cable; its processes go on. SLURM takes it back up to 40 s after `reconnect`."""
        self._ip("link", "set", node, "down")

    def reconnect(self, node: str) -> None:
        self._ip("link", "set", node, "up")

    def is_on(self, node: str) -> bool:
        return node in self._hosts

    def set_clock_ahead(self, node: str, seconds: int) -> None:
        """Of whatever is started on a host from now on.

        Its slurmd is older and keeps the right time: SLURM starts nothing where the clocks differ by more than the
        life of a credential.
        """
        library = self.root / f"clock-{seconds}.so"
        build = ["gcc", "-shared", "-fPIC", "-O2", f"-DAHEAD={seconds}", f"--output={library}", CLOCK]
        subprocess.run(build, check=True)
        script = 'mkdir "$1"; cp -a /etc/. "$1"; echo "$2" >"$1/ld.so.preload"; mount --bind "$1" /etc'
        self._mounts(node, script, "/run/etc", library)

    def hide_gpu(self, node: str) -> None:
        """The first of a host's real GPUs falls off its bus."""
        self._mounts(node, 'mount --bind "$1" "$2"', NO_DEVICE, self._owned_gpus(node)[0])

    def _owned_gpus(self, node: str) -> Sequence[Path]:
        return self.real_gpus[self.nodes.index(node) % len(self.real_gpus)]

    def _foreign_gpus(self, name: str) -> list[Path]:
        """All others of this machine, also those that no host has."""
        if not self.real_gpus or name not in self.nodes:
            return []
        return sorted(
            {*itertools.chain(*self.real_gpus), *Path("/dev").glob("nvidia[0-9]*")} - {*self._owned_gpus(name)}
        )

    def state(self, node: str) -> str:
        """Such as "idle", "allocated", "down*" (the asterisk: doesn't answer)."""
        return self.run(["sinfo", "-h", "-N", "-p", "gpu", "-n", node, "-o", "%T"], check=False).stdout.strip()

    def wait_idle(self, n: int | None = None, timeout: float = 90) -> None:
        """Wait until at least `n` hosts (without it: all) are idle."""

        def idle() -> int:
            return self.run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%T"], check=False).stdout.split().count("idle")

        wanted = len(self.nodes) if n is None else n
        self.wait(lambda: idle() >= wanted, timeout, f"{wanted} idle hosts")

    def out_of_memory(self, job: str | int) -> None:
        """End a job as SLURM does when a memory cgroup has killed it: OUT_OF_MEMORY, 0:125."""
        self.run([sys.executable, "-c", OUT_OF_MEMORY, str(job)], user="root")

    # What happens to SLURM's services

    def start_controller(self) -> None:
        self._daemon("slurmctld", ["slurmctld", "-D"])
        self.wait(lambda: self._succeeds(["sinfo"]), 60, "the controller")

    def stop_controller(self) -> None:
        self._end("slurmctld")

    def kill_controller(self) -> None:
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def configure(self, **values: object) -> None:
        """Change slurm.conf while the cluster is up."""
        with (self.root / "etc" / "slurm.conf").open("a") as conf:
            conf.writelines(f"{key}={value}\n" for key, value in values.items())
        self.run(["scontrol", "reconfigure"], user="root")

    def restart_controller(self) -> None:
        self.stop_controller()
        self.start_controller()

    def start_accounting(self) -> None:
        self._daemon("slurmdbd", ["slurmdbd", "-D"])
        self.wait(lambda: self._succeeds(["sacctmgr", "-n", "list", "cluster"]), 60, "accounting")

    def stop_accounting(self) -> None:
        self._end("slurmdbd")

    def break_commands(self, commands: Sequence[str] = STATUS_COMMANDS, host: str = "login") -> None:
        """Make SLURM's client programs fail on a host, as they do while the controller doesn't answer."""
        for command in commands:
            self._mounts(host, 'mount --bind "$1" "$(command -v "$2")"', self.root / "broken-command", command)
            self._broken.append((host, command))

    def mend_commands(self) -> None:
        while self._broken:
            host, command = self._broken.pop()
            self._mounts(host, 'umount "$(command -v "$1")"', command)

    def wait(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Wait until `condition()` is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            dead = [name for name, process in self._daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} ended" if dead else f"nothing after {timeout} s"
                raise LabError(f"while waiting for {what}: {why}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 15) -> str:
        """The ends of all the lab's logs."""
        ends = ((path.name, path.read_text(errors="replace").splitlines()[-lines:]) for path in self._logs.iterdir())
        return "\n".join("\n".join([f"--- {name}", *end]) for name, end in sorted(ends) if end)

    # Details

    def _write_files(self) -> None:
        for name in ("etc", "munge", "state", "spool", "log", "db", "dev", "home", f"home/{USER}"):
            (self.root / name).mkdir(parents=True)
        self.root.chmod(0o755)
        os.chown(self.home, UID, UID)
        etc = self.root / "etc"
        (etc / "munge.key").write_bytes(os.urandom(128))
        (etc / "munge.key").chmod(0o400)
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        for name, line in (("passwd", f"{USER}:x:{UID}:{UID}::{self.home}:/bin/bash"), ("group", f"{USER}:x:{UID}:")):
            (etc / name).write_text(f"{Path('/etc', name).read_text()}{line}\n")
        (self.home / ".gitconfig").write_text(GITCONFIG)
        (self.root / "broken-command").write_text(BROKEN_COMMAND)
        (self.root / "broken-command").chmod(0o755)
        (etc / "slurm.conf").write_text(self._slurm_conf())
        (etc / "slurmdbd.conf").write_text(SLURMDBD_CONF.format(root=self.root))
        (etc / "slurmdbd.conf").chmod(0o600)
        (etc / "cgroup.conf").touch()
        (etc / "gres.conf").write_text(self._gres_conf())

    def _slurm_conf(self) -> str:
        hardware = f"CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1"
        hardware += f" RealMemory={self.memory_mb}" + (f" Gres=gpu:h100:{self.gpus}" if self.gpus else "")
        lines = [SLURM_CONF.format(root=self.root, memory_per_cpu=self.memory_mb // self.cpus)]
        lines += ["GresTypes=gpu\n"] if self.gpus else []
        lines += ["JobAcctGatherParams=OverMemoryKill\n"] if self.memory_kill else []
        lines += [ACCOUNTING if self.accounting else "AccountingStorageType=accounting_storage/none\n"]
        lines += ["AccountingStorageTRES=gres/gpu\n"] if self.accounting and self.gpus else []
        for name in self.nodes:
            feature = f" Features={self.features[name]}" if self.features else ""
            lines += [f"NodeName={name} NodeAddr={self.addresses[name]} {hardware}{feature} State=UNKNOWN\n"]
        return "".join([*lines, PARTITIONS, *(f"{line}\n" for line in self.extra_conf)])

    def _gres_conf(self) -> str:
        if self.real_gpus:
            owned = zip(self.nodes, itertools.cycle(self.real_gpus), strict=False)
            return "AutoDetect=off\n" + "".join(
                f"NodeName={node} Name=gpu Type=h100 File={','.join(map(str, devices))}\n" for node, devices in owned
            )
        for number in range(self.gpus):  # SLURM wants a device per GPU; these are more of /dev/null
            device = self.root / "dev" / f"nvidia{number}"
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            device.chmod(0o666)
        files = f"File={self.root}/dev/nvidia[0-{self.gpus - 1}]"
        return f"AutoDetect=off\nName=gpu Type=h100 {files}\n" if self.gpus else ""

    def _rack(self) -> list[str]:
        programs = [self.programs / "usr", self.programs / "etc" / "alternatives"] if self.programs else []
        etc = [("", "slurm"), ("hosts", "hosts"), ("passwd", "passwd"), ("group", "group")]
        return [
            *(_shell("mount", "--bind", path, Path("/") / path.relative_to(self.programs)) for path in programs),
            *(_shell("mount", "--bind", self.root / "etc" / ours, Path("/etc", theirs)) for ours, theirs in etc),
            "ip link add br0 type bridge",
            "ip link set br0 up",
        ]

    def _power_on(self, name: str) -> None:
        if name in self._hosts:
            raise LabError(f"{name} is already on")
        namespaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        rack = f"--mount=/proc/{self._hosts['rack'].pid}/ns/mnt"
        setup = [
            "mount -t proc proc /proc",
            f"hostname {name}",
            "mount -t tmpfs -o mode=755 tmpfs /run",
            "mkdir -p /run/munge /run/mysqld /run/lock",
            _shell("mount", "--bind", self.root / "munge", "/run/munge"),
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            _CGROUP_1,
            # As a site's cgroups do: a compute host's GPUs are the only ones that can be opened there.
            _shell("mknod", NO_DEVICE, "c", "511", "255"),
            *(_shell("mount", "--bind", NO_DEVICE, gpu) for gpu in self._foreign_gpus(name)),
            *_uncover({REPOSITORY, self.root, Path(sys.prefix), Path(sys.base_prefix), *self.shared}),
            "ip link set lo up",
        ]
        host = self._hold(name, ["nsenter", rack, "--", "unshare", *namespaces], setup)
        self._hosts[name] = host
        self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._ip("link", "set", name, "master", "br0", "up")
        network = f"ip addr add {self.addresses[name]}/24 dev eth0 && ip link set eth0 up"
        self.run(["sh", "-c", network], user="root", host=name, cwd="/")

    def _hold(self, name: str, namespaces: list[str], setup: list[str]) -> Host:
        """Make namespaces, prepare them, and keep them until the pipe to their first process closes."""
        script = [
            "set -e",
            "read -r pid _ </proc/self/stat",  # the machine's number of this process: /proc is still the machine's
            *setup,
            "echo $pid",
            # Orphans become children of a host's first process: with SIGCHLD ignored they leave no zombies.
            "exec env --ignore-signal=CHLD cat",
        ]
        with (self._logs / f"{name}.log").open("a") as log:
            words = [*namespaces, "sh", "-c", "\n".join(script)]
            environment = {"PATH": PATH}
            holder = subprocess.Popen(
                words, stdin=PIPE, stdout=PIPE, stderr=log, env=environment, start_new_session=True, text=True
            )
        with holder.stdout:
            pid = holder.stdout.readline()
        if not pid:
            holder.stdin.close()
            holder.wait()
            raise LabError(f"can't set up the host {name}\n{self.logs()}")
        return Host(name, holder, int(pid))

    def _ip(self, *words: str) -> None:
        rack = f"--net=/proc/{self._hosts['rack'].pid}/ns/net"
        subprocess.run(["nsenter", rack, "--", "ip", *words], check=True, stdin=DEVNULL, env={"PATH": PATH})

    def _start_munge(self) -> None:
        state = [f"--{kind}-file={self.root}/state/munged.{kind}" for kind in ("pid", "seed")]
        files = [f"--key-file={self.root}/etc/munge.key", f"--log-file={self._logs}/munged.log", *state]
        self._daemon("munged", ["munged", "--foreground", "--force", *files])
        self.wait((self.root / "munge" / "munge.socket.2").exists, 10, "munge")

    def _start_database(self) -> None:
        data = f"--datadir={self.root}/db"
        install = ["mariadb-install-db", "--auth-root-authentication-method=normal", "--skip-test-db"]
        self.run([install[0], *MARIADB, data, *install[1:]], user="root")
        self._daemon("mariadbd", ["mariadbd", *MARIADB, data, "--skip-networking", "--performance-schema=OFF"])
        self.wait(lambda: self._succeeds(["mariadb-admin", "ping"]), 60, "the database")

    def _daemon(self, name: str, command: list[str], host: str = "login") -> None:
        with (self._logs / f"{name}.log").open("a") as log:
            options = {"stdout": log, "stderr": STDOUT}
            self._daemons[name] = self.popen(command, user="root", cwd="/", host=host, **options)

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _succeeds(self, command: list[str]) -> bool:
        result = self.run(command, user="root", check=False)
        (self._logs / f"{command[0]}.log").write_text(result.stderr)
        return result.returncode == 0

    def _mounts(self, host: str, script: str, *words: str | Path) -> None:
        self.run(["sh", "-ec", script, "sh", *words], user="root", host=host, cwd="/")


def skip_reason(accounting: bool = True) -> str | None:
    """What this machine lacks for a lab."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [program for program in programs if not shutil.which(program, path=PATH)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not Path("/etc/slurm").is_dir():
        return "there is no folder /etc/slurm to put the lab's configuration over"
    trial = "ip link add br0 type bridge && ip link add n1 type veth peer name eth0 && mount -t tmpfs tmpfs /run"
    namespaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--propagation", "private"]
    words = ["unshare", *namespaces, "sh", "-c", trial]
    result = subprocess.run(words, capture_output=True, text=True, env={"PATH": PATH})
    return f"namespaces aren't permitted: {result.stderr.strip()}" if result.returncode else None


def _uncover(paths: set[Path]) -> list[str]:
    """Shell lines that give the host a /tmp of its own, and make `paths` reachable by an ordinary user.

    An empty folder goes over /tmp and over each folder that others can't enter, such as /root; then `paths` go into it.
    """
    paths = paths | {path.resolve() for path in paths}
    covers = {Path("/tmp"): 0o1777}
    for ancestor in sorted(parent for path in paths for parent in path.parents):  # the outer ones first
        closed = not ancestor.stat().st_mode & 0o001
        if closed and not any(cover in [ancestor, *ancestor.parents] for cover in covers):
            covers[ancestor] = 0o755
    inside = sorted(path for path in paths if any(cover in path.parents for cover in covers))
    inside = [path for path in inside if not any(parent in inside for parent in path.parents)]
    aside = {path: Path("/run/aside", str(number)) for number, path in enumerate(inside)}
    return [
        *(f"{_shell('mkdir', '-p', at)}; {_shell('mount', '--rbind', path, at)}" for path, at in aside.items()),
        *(_shell("mount", "-t", "tmpfs", "-o", f"mode={mode:o}", "tmpfs", cover) for cover, mode in covers.items()),
        *(f"{_shell('mkdir', '-p', path)}; {_shell('mount', '--move', at, path)}" for path, at in aside.items()),
    ]


def _shell(*words: str | Path) -> str:
    return shlex.join(map(str, words))


def main() -> None:
    if reason := skip_reason():
        sys.exit(reason)
    root = Path(tempfile.mkdtemp(prefix="megaboa-lab-", dir="/tmp"))
    try:
        with Lab(root) as lab:
            print(f"{USER}'s shell on the login host; logs in {root}/log. The lab ends when you leave it.")
            for name in ("login", *lab.nodes):
                print(f"  root on {name}: nsenter -t {lab._hosts[name].pid} -m -n -u -p")
            terminal = {"TERM": os.environ.get("TERM", "dumb")}
            lab.popen(["bash"], env=terminal, stdin=None, start_new_session=False).wait()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
