"""The inner side of `pipeline.sandbox`: a script that locks itself in, runs a program and says how it ended.

    python -I -S sandbox_child.py '{"reply": FD, "nonce": FD, "memory_bytes": ..., ...}' < PROGRAM

Not to be imported. Only the standard library is used, since nothing else is in reach.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import sys

_NOBODY = 65534

# unshare(2), mount(2), prctl(2), mount_setattr(2)
_CLONE = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # NS, UTS, IPC, PID, NET
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY = 1 | 2 | 4  # and no setuid, no devices
_CAPABILITY_VERSION = 0x20080522
_SCRATCH_BYTES = 16 << 20

# What programs import most: without namespaces nobody may be unable to read the libraries of root.
_PRELOADED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "hashlib"),
    *("heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "typing"),
)

# Events of sys.addaudithook (the library reference has the table); a prefix names all that begin with it.
_REFUSED = (
    "ctypes.",
    "fcntl.",
    "ftplib.",
    "http.client.",
    "imaplib.",
    "nntplib.",
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.lockf",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.removexattr",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "poplib.",
    "pty.",
    "resource.",
    "shutil.",
    "smtplib.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "syslog.",
    "tempfile.",
    "telnetlib.",
    "urllib.",
    "webbrowser.",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _call(function, *arguments):
    """A C function that returns 0; its errno becomes an OSError."""
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _encoded(path):
    return ctypes.c_char_p(os.fsencode(path))


def _mount(libc, source, target, kind, flags, options=""):
    none = ctypes.c_char_p(None)
    _call(
        libc.mount,
        _encoded(source) if source else none,
        _encoded(target),
        _encoded(kind) if kind else none,
        ctypes.c_ulong(flags),
        _encoded(options) if options else none,
    )


def _separate(libc, root):
    """New namespaces: of users where the caller is not root, of processes, mounts, network and IPC."""
    user, group = os.geteuid(), os.getegid()
    _call(libc.unshare, _CLONE | (0 if root else _CLONE_NEWUSER))
    if not root:
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def _libraries():
    """Folders that the interpreter loads from."""
    candidates = (sys.base_prefix, sys.base_exec_prefix, "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    return [path for path in dict.fromkeys(candidates) if os.path.exists(path)]


def _show_only_libraries(libc, folder):
    """Makes `folder` the root of a file system that holds the libraries, read-only, and an empty place."""
    _mount(libc, "none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount(
        libc, "tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_SCRATCH_BYTES},mode=0755"
    )
    for path in _libraries():
        inside = folder + path
        if os.path.lexists(inside):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.makedirs(inside, exist_ok=True)
        _mount(libc, path, inside, "", _MS_BIND | _MS_REC)
        wanted = _MountAttributes(set=_READ_ONLY)
        _call(
            libc.syscall,
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_long(_AT_FDCWD),
            _encoded(inside),
            ctypes.c_long(_AT_RECURSIVE),
            ctypes.byref(wanted),
            ctypes.c_long(ctypes.sizeof(wanted)),
        )
    os.mkdir(folder + "/scratch", 0o777)
    os.chmod(folder + "/scratch", 0o777)
    os.chdir(folder)
    _call(libc.pivot_root, _encoded("."), _encoded("."))
    _call(libc.umount2, _encoded("."), ctypes.c_int(_MNT_DETACH))
    os.chdir("/scratch")


def _fork_and_wait():
    """Goes on in a child, the first process of the new namespace, whose end ends all that it started."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    os.setsid()


def _enter_namespaces(folder):
    """Locks the process in; the kernel then keeps it there. Raises if the kernel has no such locks."""
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.geteuid() == 0
    _separate(libc, root)
    _fork_and_wait()
    _show_only_libraries(libc, folder)
    _become_nobody(root)
    _drop_capabilities(libc)
    _call(libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)  # after the change of user, which resets it


def _become_nobody(root):
    if root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _drop_capabilities(libc):
    _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _call(libc.capset, ctypes.byref(header), ctypes.byref(nothing))


def _limit(memory_bytes, cpu_s):
    # No file may grow and no process or thread may be added, whatever else is allowed.
    for limited, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limited, (value, value))


def _refuse(readable):
    """An audit hook: nothing is written, started, signalled or connected to; only libraries are read."""

    def hook(event, arguments):
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & _WRITING
            writes = writes or (isinstance(mode, str) and set(mode) & set("wax+"))
            known = isinstance(path, str | bytes) and os.path.abspath(os.fsdecode(path)).startswith(
                readable
            )
            if writes or not known:
                raise PermissionError(f"{path!r} may not be opened here")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused here")

    return hook


def _lock_in(options):
    """The strongest lock that this machine has; returns its name."""
    level = "audit hooks"
    if options["namespaces"]:
        try:
            _enter_namespaces(options["folder"])
            level = "namespaces"
        except (OSError, AttributeError):
            pass  # an old kernel, another system, or a container that forbids it
    if level != "namespaces":
        os.chdir(options["folder"])
        for name in _PRELOADED:
            importlib.import_module(name)
        _become_nobody(os.geteuid() == 0)
    _limit(options["memory_bytes"], options["cpu_s"])
    if options["hooks"]:
        sys.addaudithook(_refuse(tuple(f"{path}{os.sep}" for path in _libraries())))
    return level


def main():
    options = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    reply, nonce = options["reply"], options["nonce"]
    level = _lock_in(options)
    read, write, leave = os.read, os.write, os._exit  # as they are now
    write(reply, level.encode() + b"\n")
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:200]
        with contextlib.suppress(BaseException):
            write(reply, b"failed " + outcome.encode("utf-8", "replace"))
        leave(1)
    # Nobody has read the nonce before: whoever claims success without having come here does not know it.
    write(reply, b"passed " + read(nonce, 64))
    leave(0)


if __name__ == "__main__":
    main()
