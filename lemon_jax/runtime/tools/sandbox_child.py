"""The other side of the sandbox: isolates a process, runs untrusted code in it, reports.

Never imported by the harness to be run there: `box.py` sends this module's code to a fresh
interpreter, which calls `main`. Only modules that load in a millisecond are imported.

Three processes. The top one enters the namespaces and reaps whatever is left. The warden, the first
process of the new process list, keeps the wall clock and says how its child ended; with it the kernel
ends everything in that list. The third gives up every right it has and runs the code.
"""

import _signal  # the built-in half of `signal`, whose other half costs two milliseconds
import builtins
import ctypes
import os
import resource
import select
import sys
import time

_NEWNS, _NEWUSER, _NEWPID = 0x00020000, 0x10000000, 0x20000000
_NAMESPACES = _NEWNS | _NEWPID | 0x40000000 | 0x08000000 | 0x04000000  # + network, IPC, host name
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38  # prctl
_SIGKILL, _SIGTERM = 9, 15
_MAX_INT_BITS, _MAX_TEXT = 13_000, 4_096

libc: ctypes.CDLL | None
try:
    libc = ctypes.CDLL(None, use_errno=True)
except (OSError, TypeError):  # no dynamic libc: every layer below reports that it failed
    libc = None


def _call(name, *args):
    """A libc function that returns 0 on success; OSError otherwise, also where it does not exist."""
    function = getattr(libc, name, None)
    if function is None:
        raise OSError(f"no {name}")
    result = function(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in args))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def _attempt(name, *args):
    try:
        _call(name, *args)
    except OSError:
        return False
    return True


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces(workdir, dirs, hidden):
    """Leave the network, the process list and the file system behind; True if all of it worked.

    A half-built isolation is kept (it only takes rights away) and reported as not built.
    """
    uid, gid = os.getuid(), os.getgid()
    if not _attempt("unshare", _NAMESPACES):
        if not _attempt("unshare", _NAMESPACES | _NEWUSER):
            return False
        try:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        except OSError:
            return False
    try:
        _new_root(workdir, dirs, hidden)
    except OSError:
        return False
    return True


def _new_root(workdir, dirs, hidden):
    root = os.fsencode(workdir)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"tmpfs", root, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=16m,nr_inodes=4k,mode=755")
    for name in dirs:
        source, target = os.fsencode(name), root + os.fsencode(name)
        os.makedirs(target, exist_ok=True)
        _call("mount", source, target, None, _MS_BIND | _MS_REC, None)
        kept = os.statvfs(target).f_flag & 0x40E  # flags a user namespace may not clear
        _call("mount", b"none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept, None)
    for name in hidden:
        target = root + os.fsencode(name)
        _call("mount", b"tmpfs", target, b"tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, b"size=4k,mode=755")
    os.mkdir(root + b"/box")
    os.chmod(root + b"/box", 0o777)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", 2)  # MNT_DETACH: the old root lies over the new one
    os.chdir("/box")


def readable_paths(dirs, hidden):
    """(path, Landlock rights) for all below `dirs` but what is `hidden`: rules can only allow."""
    for name in dirs:
        if not any(path.startswith(name + "/") for path in hidden):
            yield name, 0x4 | 0x8 if os.path.isdir(name) else 0x4  # read file, read directory
            continue
        yield name, 0x8
        inside = [os.path.join(name, child) for child in os.listdir(name)]
        # A link is left out: what it names is below a folder of its own right, or not to be read.
        shown = [path for path in inside if path not in hidden and not os.path.islink(path)]
        yield from readable_paths(shown, hidden)


def confine_files(dirs, hidden):
    """Landlock: read below `dirs`, write nowhere. True if the kernel took it (most since 5.13)."""
    handled = (ctypes.c_uint64 * 1)(0x1FFF)  # the 13 rights of ABI 1
    try:
        ruleset = _call("syscall", 444, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    except OSError:
        return False
    for name, rights in readable_paths(dirs, hidden):
        try:
            fd = os.open(name, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it is gone: one thing less to be read
            continue
        rule = (ctypes.c_uint32 * 3)(rights, 0, fd)  # packed: u64 rights, i32 fd
        _attempt("syscall", 445, ruleset, 1, ctypes.byref(rule), 0)
        os.close(fd)
    confined = _attempt("syscall", 446, ruleset, 0)
    os.close(ruleset)
    return confined


def set_limits(limits):
    """Hard limits: equal soft and hard values, so that nothing is left to raise."""
    for name, value in limits:
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):  # macOS refuses RLIMIT_AS; a lower hard limit is inherited
                continue


def drop_rights(identity, leave_root, isolated):
    """Give up root, every capability and the way back. An own uid makes RLIMIT_NPROC count alone."""
    if os.getuid() == 0 and leave_root:
        for user in (1_000_000_000 + identity, 65_534):
            try:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                break
            except OSError:  # the id is not mapped in this container
                continue
        if isolated:  # without root, the other namespaces needed a user namespace to begin with
            _attempt("unshare", _NEWUSER)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _attempt("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    _attempt("prctl", _PDEATHSIG, _SIGKILL, 0, 0, 0)  # changing credentials cleared the warden's


def install_seccomp(instructions):
    """Load the filter of `seccomp.py`; True if the kernel took it."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    program = Program(len(instructions) // 8, instructions)
    return bool(instructions) and _attempt("prctl", _SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def answer_text(value):
    """The text of an answer; ValueError with the reason if it is no number or text of bounded size."""
    fraction = getattr(sys.modules.get("fractions"), "Fraction", ())
    decimal = getattr(sys.modules.get("decimal"), "Decimal", ())
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise ValueError(f"answer is an integer of {value.bit_length()} bits")
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
    elif isinstance(value, str):
        text = str.__str__(value)
    elif isinstance(value, (fraction, decimal)):
        text = str(value)
    else:
        raise ValueError(f"answer is a {type(value).__name__}, not a number or text")
    if not isinstance(value, str) and text.lstrip("-").lower() in ("inf", "infinity", "nan"):
        raise ValueError("answer is not finite")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"answer is a text of {len(text)} characters")
    return text


def run_code(source):
    """Run `source`; returns (status, text): the answer, or the reason there is none."""
    names = {"__name__": "__main__", "__builtins__": builtins}
    try:
        exec(compile(source, "<program>", "exec"), names)
    except SystemExit:
        pass  # a program may end early; what counts is whether it set the answer
    except MemoryError:
        return "limit", "memory"
    except BaseException as error:
        try:
            reason = f"{type(error).__name__}: {error}"[:300]
            trace = error.__traceback__ and error.__traceback__.tb_next
            sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        except BaseException:
            reason = "an exception that cannot be printed"
        return "error", reason
    if "answer" not in names:
        return "no_answer", "the program set no variable `answer`"
    try:
        return "ok", answer_text(names["answer"])
    except BaseException as error:
        return "error", str(error)[:300]


def program(job, say):
    """The role of a worker's program: its answer, and then no atexit handlers, no waiting for threads."""
    status, text = run_code(job["code"])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue
    say("verdict", status, text)


class Speaker:
    """The line back to the harness: fields after the nonce, which tells them from anybody else's bytes."""

    def __init__(self, fd, nonce):
        self.fd, self.nonce = fd, nonce

    def __call__(self, *fields, write=os.write):
        clean = (str(f).replace("\x1e", " ").replace("\x1f", " ") for f in (self.nonce, *fields))
        write(self.fd, ("\x1f".join(clean) + "\x1e").encode("utf-8", "backslashreplace"))

    def close(self):
        os.close(self.fd)


def boxed_process(config, role, isolated, exit_now=os._exit):
    """The inner process: all rights away, then its role. Does not return."""
    tell, end, _ = config["fds"]
    os.close(end)  # how this process ends is not for it to say
    say = Speaker(tell, config["nonce"])
    layers = config["layers"]
    set_limits(config["limits"])
    _attempt("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    confined = "landlock" in layers and confine_files(config["dirs"], config["hidden"])
    leave_root = (isolated and config["stdlib_readable"]) or config["stdlib_reachable"]
    drop_rights(config["identity"], leave_root, isolated)
    filtered = "seccomp" in layers and install_seccomp(config["filter"])
    files = isolated or ("landlock" if confined and filtered else "")
    level = "+".join(part for part in (files, "seccomp" * filtered) if part) or "rlimits"
    if level not in config["accepted"]:
        say("refused", level)
        exit_now(0)
    say("ready", level)
    role(config["job"], say)
    exit_now(0)


def warden(config, role, isolated):
    """Start the inner process, end it when its time is over, and report how it ended."""
    _attempt("prctl", _PDEATHSIG, _SIGKILL, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        try:
            boxed_process(config, role, isolated)
        finally:
            os._exit(70)
    tell, end, others = config["fds"]
    close_all((tell, *others))  # so that whoever reads from the inner process sees when it has ended
    timed_out = not wait_for(pid, config["wall_s"])
    if timed_out:
        os.kill(pid, _SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os.write(end, f"{int(timed_out)} {code} {usage.ru_utime + usage.ru_stime}".encode())


def close_all(fds):
    for fd in fds:
        os.close(fd)


def wait_for(pid, seconds):
    """True if the process ended within `seconds`; it is not reaped."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.005)
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(seconds * 1000))
    os.close(fd)
    return ended


def kill_survivors():
    """End what the program left behind; orphans come to this process, the subreaper."""
    listing = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(1_000):
        try:
            with open(listing) as file:
                for pid in file.read().split():
                    os.kill(int(pid), _SIGKILL)
        except OSError:  # inside namespaces there is no /proc, and the kernel has ended them all
            pass
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


def main(config, role):
    """Entry point in the fresh interpreter; `config` is what `box.py` sent, `role(job, say)` what to run."""
    _attempt("prctl", _PDEATHSIG, _SIGKILL, 0, 0, 0)  # a harness that dies takes its programs with it
    _attempt("prctl", _SET_SUBREAPER, 1, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for name in ("LD_LIBRARY_PATH", "PWD"):  # the second is bubblewrap's
        os.environ.pop(name, None)
    isolated = "bwrap" if config["in_bwrap"] else ""
    if not isolated and "namespaces" in config["layers"]:
        isolated = "namespaces" * enter_namespaces(config["workdir"], config["dirs"], config["hidden"])
    # From here on nobody of the same user may trace these processes or look into them through /proc.
    _attempt("prctl", _SET_DUMPABLE, 0, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        try:
            warden(config, role, isolated)
        finally:
            os._exit(0)
    _signal.signal(_SIGTERM, lambda *_: os.kill(pid, _SIGKILL))  # the harness wants no more of it
    tell, end, others = config["fds"]
    close_all((tell, end, *others))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _signal.signal(_SIGTERM, _signal.SIG_IGN)  # the id may be somebody else's once it is reaped
    kill_survivors()
