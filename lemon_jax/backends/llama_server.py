"""The child process that serves one GGUF model on the loopback interface until its parent ends.

Run as `python -m lemon_jax.backends.llama_server`; `embedded.py` starts and stops it. The engine is the
llama.cpp of the package xllamacpp, or the `llama-server` program that LEMON_LLAMA_SERVER names: one that was
compiled for this machine's own processor is faster than a package that must run on any.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from lemon_jax.files import replace_file

PROGRAM_VARIABLE = "LEMON_LLAMA_SERVER"
KEY_VARIABLE = "LEMON_LLAMA_SERVER_KEY"
STATES = "slots"  # the folder of the states of slots, beside the address file
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve until killed; write the address to `--address-file`.

    The package's server is there by then. A program of the user's own has still to start: `/health` says when
    it has loaded the model.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--address-file", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--slots", required=True, type=int)
    parser.add_argument("--ctx", required=True, type=int, help="tokens of context of each slot")
    parser.add_argument("--threads", required=True, type=int)
    args = parser.parse_args()
    program = os.environ.pop(PROGRAM_VARIABLE, "")
    die_with(args.parent)
    if program:
        _become(program, args)
    # Imported late: a parent that is gone, or a wrong argument, must not cost loading the library.
    import xllamacpp

    server = xllamacpp.Server(_params(xllamacpp.CommonParams(), args))
    replace_file(args.address_file, server.listening_address)
    while True:
        time.sleep(3600)


def _states_folder(args: argparse.Namespace) -> str:
    """Where the states of slots are written: it goes with the server's own folder."""
    folder = args.address_file.with_name(STATES)
    folder.mkdir()
    return f"{folder}{os.sep}"  # llama.cpp appends the name as it is


def _become(program: str, args: argparse.Namespace) -> NoReturn:
    """Replace this process by the program, set as in `_params`.

    Only on Linux does it then end with a parent that is killed: the signal of `die_with` stays armed, the
    watching thread is gone. Another process may take the port before the program does, which then ends;
    `embedded.py` tells the two apart by the key.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key_file = args.address_file.with_name("key")  # other users can read a command line, but not this folder
    key_file.write_text(os.environ.pop(KEY_VARIABLE))
    replace_file(args.address_file, f"http://127.0.0.1:{port}")
    settings = {
        "--model": args.model,
        "--host": "127.0.0.1",
        "--port": port,
        "--api-key-file": key_file,
        "--parallel": args.slots,
        "--ctx-size": args.ctx * args.slots,
        "--threads": args.threads,
        "--threads-batch": args.threads,
        "--poll": 0,
        "--poll-batch": 0,
        "--cache-ram": 0,
        "--slot-save-path": _states_folder(args),
        "--fit": "off",
        "--verbosity": 2,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    os.execv(program, [program, *words, "--no-kv-unified", "--no-webui", "--no-slots"])


def die_with(parent: int) -> None:
    """End this process when `parent` ends, even by SIGKILL.

    The kernel's signal comes at once but exists only on Linux; the watching thread works anywhere, for as
    long as this process runs Python. A parent that died before the signal was armed is noticed here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _params(params: Any, args: argparse.Namespace) -> Any:
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # the system chooses a free one while binding, so nobody can take it first
    # Without a key any web page open on this machine could use the server.
    params.api_keys = [os.environ.pop(KEY_VARIABLE)]
    params.ui = False
    params.endpoint_slots = False
    params.n_parallel = args.slots
    params.n_ctx = args.ctx * args.slots  # the server divides it among the slots
    params.kv_unified = False  # a slot's context must not depend on what the others hold
    params.fit_params = False  # the context asked for, or a clear failure
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.cpuparams.poll = 0  # idle threads sleep: the cores belong to another server or to training
    params.cpuparams_batch.poll = 0
    params.cache_ram_mib = 0  # `slot_prompts` keeps what comes again, in files
    params.slot_save_path = _states_folder(args)
    params.verbosity = 2  # warnings and errors
    return params


if __name__ == "__main__":
    main()
