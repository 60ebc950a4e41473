"""What tracking costs the loop: a step with no store at all, with a dead one, and with a server that takes 10 s a call.

The slow server is a real `mlflow server` behind a relay that holds every request for 10 s before it lets it through. The loop
itself never waits for a store, so what one can cost is the processor time of the threads beside the loop's own: counted for
each kind from a quarter of the run on, when MLflow is imported, and added to the step without a store. That is what a step
takes where loop and threads share one core, the worst case; runs compared by their total time would show the machine's
moods, which are larger than the goal. The time that the loop's thread spends in handing over is inside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import measure
from kill_resume import write_data
from runtime import before_each_step, make_config

from cluster.world import World
from pretrain import engine, run_tracking
from pretrain.config import TrainConfig
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
from pretrain.tracking import MlflowForwarder
from pretrain.trainer import train

GOAL = 1.01
DELAY = 10.0
"""Seconds that the slow server takes for each call."""


def main() -> None:
    """Print a step of each kind, what the slow server got meanwhile, and a JSON line for the dead and the slow one."""
    quick = measure.quick_argument(__doc__ or "").quick
    steps = 12 if quick else 120
    world = World()
    engine.start_ranks(world, threads=1)
    spent: dict[str, tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data" / "train", blocks=40)
        import mlflow  # noqa: F401 - once for all kinds: a run pays it at its start, beside the first steps

        with slow_server(folder, real=not quick) as slow:
            for kind, uri in (("none", ""), ("dead", f"http://127.0.0.1:{free_port()}"), ("slow", slow.uri)):
                spent[kind] = step_seconds(tracked(make_config(folder, folder / kind, steps), uri), world)
            print(f"the slow server got {slow.passed} calls, each after {DELAY:g} s")
    for kind, (own, others, handing) in spent.items():
        print(
            f"{kind}: {own * 1000:.1f} ms a step in the loop's thread, of it {handing * 1e6:.0f} us to hand lines over; "
            f"{others * 1000:.2f} ms in other threads"
        )
    own, others, handing = spent["none"]
    for kind in ("dead", "slow"):
        more = spent[kind][1] - others + spent[kind][2] - handing
        step = (own + others) * 1000
        measure.report(f"tracking_{kind}_server", step + more * 1000, "ms a step", step, GOAL, higher_is_better=False)
    engine.stop_ranks()


def tracked(config: TrainConfig, uri: str) -> TrainConfig:
    """A line of metrics every ten steps, sent to `uri`; to nowhere where it is empty."""
    tracking = config.tracking.model_copy(update={"enabled": bool(uri), "uri": uri})
    table = config.train.model_copy(update={"log_every": 10 if config.train.steps > 50 else 2})
    return config.model_copy(update={"tracking": tracking, "train": table})


def step_seconds(config: TrainConfig, world: World) -> tuple[float, float, float]:
    """Seconds a step after the first quarter: of the loop's thread, of all other threads, and of handing lines over."""
    times: list[tuple[float, float]] = []
    handing: list[float] = []

    class Timed(MlflowForwarder):
        """A forwarder that notes what the loop spends on it."""

        def notify(self) -> None:
            began = time.perf_counter()
            super().notify()
            handing.append(time.perf_counter() - began)

    kept, run_tracking.MlflowForwarder = run_tracking.MlflowForwarder, Timed  # type: ignore[misc]
    try:
        with before_each_step(lambda: times.append((time.thread_time(), time.process_time()))):
            data = RunData(config)
            train(data.model_config(), world, data, StopRequest())
    finally:
        run_tracking.MlflowForwarder = kept  # type: ignore[misc]
    begin, end, steps = times[len(times) // 4], times[-1], len(times) - 1 - len(times) // 4
    own, whole = ((last - first) / steps for first, last in zip(begin, end, strict=True))
    each = statistics.median(handing) if handing else 0.0
    return own, whole - own, each / config.train.log_every


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class SlowRelay:
    """Passes bytes between clients and a server; each request waits `DELAY` seconds before it goes on.

    Attributes:
        uri: what a client is to be told.
        passed: requests that have been let through.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port, self.passed = server_port, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection; what a client sends first, or after an answer, is a new request."""
        new = threading.Event()
        new.set()
        with client, contextlib.suppress(OSError):
            server = None
            while data := client.recv(1 << 16):
                if new.is_set():
                    new.clear()
                    time.sleep(DELAY)
                    self.passed += 1
                if server is None:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                    threading.Thread(target=_answer, args=(server, client, new), daemon=True).start()
                server.sendall(data)


def _answer(server: socket.socket, client: socket.socket, new: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(1 << 16):
            new.set()
            client.sendall(data)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_server(folder: Path, *, real: bool) -> Iterator[SlowRelay]:
    """A relay before an MLflow server; before nothing where `real` is false: then calls fail after their delay."""
    port = free_port()
    if not real:
        yield SlowRelay(port)
        return
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(port)
        yield SlowRelay(port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(port: int) -> None:
    """Until the server answers.

    Raises:
        RuntimeError: not within five minutes.
    """
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError("the MLflow server did not start")


if __name__ == "__main__":
    main()
