"""`deepspeed --no_ssh` without its 30 seconds of imports: the same options, variables and way of failing."""

import argparse
import contextlib
import os
import subprocess
import sys
import time

import psutil

parser = argparse.ArgumentParser()
parser.add_argument("--no_ssh", action="store_true", required=True)
parser.add_argument("--hostfile", required=True)
parser.add_argument("--node_rank", type=int, required=True)
parser.add_argument("--master_addr", required=True)
parser.add_argument("--master_port", required=True)
parser.add_argument("--no_python", action="store_true", required=True)
parser.add_argument("--no_local_rank", action="store_true", required=True)
parser.add_argument("program", nargs=argparse.REMAINDER)
options = parser.parse_args()

with open(options.hostfile) as file:
    slots = [int(line.partition("slots=")[2]) for line in file]
here, before = slots[options.node_rank], sum(slots[: options.node_rank])
processes = []
for local_rank in range(here):
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(here))),  # as DeepSpeed does, whatever was allotted
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "WORLD_SIZE": str(sum(slots)),
        "CROSS_RANK": str(options.node_rank),
        "CROSS_SIZE": str(len(slots)),
        "LOCAL_SIZE": str(here),
        "RANK": str(before + local_rank),
        "LOCAL_RANK": str(local_rank),
    }
    processes.append(subprocess.Popen(options.program, env=environ))
while any(process.poll() is None for process in processes):
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        # DeepSpeed ends the whole tree, not its children only
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        until = time.monotonic() + 30
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(0.1)
        for process in processes:
            process.kill()
        sys.exit(failed[0])
    time.sleep(0.1)
sys.exit(max(process.returncode for process in processes))
